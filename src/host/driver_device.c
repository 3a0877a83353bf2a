/* Devices and the names of errors. The devices are the machine's: two processes that both say device 0 mean
 * the same one, so that sharing a device is found out as it is on a GPU. */
#define _GNU_SOURCE
#include "driver.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

host_device_t host_devices[HOST_MAX_DEVICES];

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
#define ERROR(code, text) {code, #code, text}
    ERROR(CUDA_SUCCESS, "no error"),
    ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    ERROR(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
    ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    ERROR(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
    ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    ERROR(CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, "cannot set while device is active in this process"),
    ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream"),
    ERROR(CUDA_ERROR_CAPTURED_EVENT,
          "operation not permitted on an event last recorded in a capturing stream"),
    ERROR(
        CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE,
        "the graph update was not performed because it included changes which violated constraints specific "
        "to instantiated graph update"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
          "operation would make the legacy stream depend on a capturing one"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "capture was begun by another thread"),
    ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
#undef ERROR
};

static CUresult error_text(CUresult error, bool want_name, const char **text) {
    if (text == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *text = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++)
        if (errors[i].code == error)
            *text = want_name ? errors[i].name : errors[i].text;
    return *text != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorName(CUresult error, const char **text) {
    CUresult result = host_enter("cuGetErrorName", HOST_NEEDS_NOTHING);
    if (result == CUDA_SUCCESS)
        result = error_text(error, true, text);
    return host_leave("cuGetErrorName", NULL, NULL, result);
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    CUresult result = host_enter("cuGetErrorString", HOST_NEEDS_NOTHING);
    if (result == CUDA_SUCCESS)
        result = error_text(error, false, text);
    return host_leave("cuGetErrorString", NULL, NULL, result);
}

static CUresult check(CUdevice device, const void *out) {
    if (out == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    return device >= 0 && device < host_config()->devices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetCount(int *count) {
    CUresult result = host_enter("cuDeviceGetCount", HOST_NEEDS_INIT);
    if (result == CUDA_SUCCESS && count == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *count = host_config()->devices;
    return host_leave("cuDeviceGetCount", NULL, NULL, result);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    CUresult result = host_enter("cuDeviceGet", HOST_NEEDS_INIT);
    if (result == CUDA_SUCCESS)
        result = check(ordinal, device);
    if (result == CUDA_SUCCESS)
        *device = ordinal;
    return host_leave("cuDeviceGet", NULL, NULL, result);
}

CUresult cuDeviceGetName(char *name, int len, CUdevice dev) {
    CUresult result = host_enter("cuDeviceGetName", HOST_NEEDS_INIT);
    if (result == CUDA_SUCCESS)
        result = len > 0 ? check(dev, name) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        snprintf(name, (size_t)len, "pynccl host device %d", dev);
    return host_leave("cuDeviceGetName", NULL, NULL, result);
}

/* Sixteen bytes that are the machine's own until it boots again, or zeros where it has none. */
static void machine_identity(unsigned char identity[16]) {
    char text[64] = "";
    int file = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (file >= 0) {
        ssize_t length = read(file, text, sizeof text - 1);
        close(file);
        text[length > 0 ? length : 0] = '\0';
    }
    int filled = 0;
    for (const char *at = text; filled < 16 && *at != '\0';) {
        unsigned int byte;
        if (*at == '-') {
            at++;
        } else if (sscanf(at, "%2x", &byte) == 1 && at[1] != '\0') {
            identity[filled++] = (unsigned char)byte;
            at += 2;
        } else {
            break;
        }
    }
    memset(identity + filled, 0, (size_t)(16 - filled));
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice dev) {
    CUresult result = host_enter("cuDeviceGetUuid_v2", HOST_NEEDS_INIT);
    if (result == CUDA_SUCCESS)
        result = check(dev, uuid);
    if (result == CUDA_SUCCESS) {
        unsigned char identity[16];
        machine_identity(identity);
        identity[15] = (unsigned char)(identity[15] ^ dev);
        memcpy(uuid->bytes, identity, sizeof identity);
    }
    return host_leave("cuDeviceGetUuid_v2", NULL, NULL, result);
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev) {
    CUresult result = host_enter("cuDeviceTotalMem_v2", HOST_NEEDS_INIT);
    if (result == CUDA_SUCCESS)
        result = check(dev, bytes);
    if (result == CUDA_SUCCESS)
        *bytes = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    return host_leave("cuDeviceTotalMem_v2", NULL, NULL, result);
}

/* Kernels of one device are not given memory of another, as on GPUs with no way between them. */
CUresult cuDeviceCanAccessPeer(int *canAccessPeer, CUdevice dev, CUdevice peerDev) {
    CUresult result = host_enter("cuDeviceCanAccessPeer", HOST_NEEDS_INIT);
    if (result == CUDA_SUCCESS)
        result = check(dev, canAccessPeer);
    if (result == CUDA_SUCCESS)
        result = check(peerDev, canAccessPeer);
    if (result == CUDA_SUCCESS)
        *canAccessPeer = 0;
    return host_leave("cuDeviceCanAccessPeer", NULL, NULL, result);
}

CUresult cuDeviceGetByPCIBusId(CUdevice *dev, const char *pciBusId) {
    CUresult result = host_enter("cuDeviceGetByPCIBusId", HOST_NEEDS_INIT);
    unsigned int domain = 0, bus = 0, slot = 0;
    if (result == CUDA_SUCCESS && (dev == NULL || pciBusId == NULL ||
                                   (sscanf(pciBusId, "%x:%x:%x", &domain, &bus, &slot) != 3 &&
                                    (domain = 0, sscanf(pciBusId, "%x:%x", &bus, &slot) != 2))))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && (domain != 0 || slot != 0))
        result = CUDA_ERROR_INVALID_DEVICE;
    if (result == CUDA_SUCCESS)
        result = check((int)bus - 1, dev);
    if (result == CUDA_SUCCESS)
        *dev = (int)bus - 1;
    return host_leave("cuDeviceGetByPCIBusId", NULL, NULL, result);
}

CUresult cuDeviceGetPCIBusId(char *pciBusId, int len, CUdevice dev) {
    CUresult result = host_enter("cuDeviceGetPCIBusId", HOST_NEEDS_INIT);
    if (result == CUDA_SUCCESS)
        result = len > 0 ? check(dev, pciBusId) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        snprintf(pciBusId, (size_t)len, "0000:%02X:00.0", dev + 1);
    return host_leave("cuDeviceGetPCIBusId", NULL, NULL, result);
}

/* What is not there is 0, as on a GPU without it; only what nobody can say is refused. */
static CUresult attribute_value(CUdevice_attribute attribute, CUdevice dev, int *value) {
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED:
        *value = 1;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: /* 0.0, which no GPU has: it runs no kernel image */
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
    case CU_DEVICE_ATTRIBUTE_INTEGRATED:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES:
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR:
    case CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED:
        *value = 0;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
        *value = dev + 1;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1:
        *value = !host_config()->quirk_no_memory_ops;
        return CUDA_SUCCESS;
    default:
        host_last_error("the host engine has no device attribute %d", (int)attribute);
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice dev) {
    CUresult result = host_enter("cuDeviceGetAttribute", HOST_NEEDS_INIT);
    if (result == CUDA_SUCCESS)
        result = check(dev, value);
    if (result == CUDA_SUCCESS)
        result = attribute_value(attribute, dev, value);
    return host_leave("cuDeviceGetAttribute", NULL, NULL, result);
}
