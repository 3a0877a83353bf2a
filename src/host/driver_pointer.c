/* What a pointer is: its memory's type, device, range and pool. */
#define _GNU_SOURCE
#include "driver.h"

#include <string.h>
#include <unistd.h>

typedef union {
    CUcontext context;
    CUdeviceptr address;
    void *pointer;
    CUmemoryPool pool;
    size_t bytes;
    unsigned int type;
    int number;
    bool is;
} value_t;

/* How many bytes the attribute's value has, 0 where the engine has no such attribute; `found` may be memory
 * that the engine did not give, of which all is 0 or NULL. */
static size_t value_of(CUpointer_attribute attribute, const host_memory_t *found, void *pointer,
                       value_t *value) {
    *value = (value_t){.pointer = NULL};
    bool own = found->own;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        value->context = own ? &host_devices[found->device] : NULL;
        return sizeof value->context;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        value->type = own ? (unsigned int)found->type : 0;
        return sizeof value->type;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        value->address = own ? (CUdeviceptr)(uintptr_t)pointer : 0;
        return sizeof value->address;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: /* a device's memory is not shown to the host */
        value->pointer = own && found->type == CU_MEMORYTYPE_HOST ? pointer : NULL;
        return sizeof value->pointer;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        value->type = 0;
        return sizeof value->type;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        value->number = own ? found->device : -2; /* the driver's own word for none */
        return sizeof value->number;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        value->address = own ? (CUdeviceptr)(uintptr_t)found->base : 0;
        return sizeof value->address;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        value->bytes = own ? found->bytes : 0;
        return sizeof value->bytes;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        value->type = own;
        return sizeof value->type;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        value->pool = own ? host_mempool_of(found->base) : NULL;
        return sizeof value->pool;
    default:
        host_last_error("the host engine has no pointer attribute %d", (int)attribute);
        return 0;
    }
}

static CUresult write_value(void *out, CUpointer_attribute attribute, const host_memory_t *found,
                            void *pointer) {
    value_t value;
    size_t bytes = value_of(attribute, found, pointer, &value);
    if (out == NULL || bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(out, &value, bytes);
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr ptr) {
    CUresult result = host_enter("cuPointerGetAttribute", HOST_NEEDS_INIT);
    void *pointer = (void *)(uintptr_t)ptr;
    host_memory_t found;
    host_memory_find(pointer, &found);
    if (result == CUDA_SUCCESS)
        result = found.own ? write_value(value, attribute, &found, pointer) : CUDA_ERROR_INVALID_VALUE;
    return host_leave("cuPointerGetAttribute", NULL, pointer, result);
}

/* Other than its singular it takes any pointer: what is not the driver's has no attributes. */
CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **values,
                                CUdeviceptr ptr) {
    CUresult result = host_enter("cuPointerGetAttributes", HOST_NEEDS_INIT);
    void *pointer = (void *)(uintptr_t)ptr;
    host_memory_t found;
    host_memory_find(pointer, &found);
    if (result == CUDA_SUCCESS && (count == 0 || attributes == NULL || values == NULL))
        result = CUDA_ERROR_INVALID_VALUE;
    for (unsigned int i = 0; i < count && result == CUDA_SUCCESS; i++)
        result = write_value(values[i], attributes[i], &found, pointer);
    return host_leave("cuPointerGetAttributes", NULL, pointer, result);
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr ptr) {
    CUresult result = host_enter("cuMemGetAddressRange_v2", HOST_NEEDS_CONTEXT);
    void *pointer = (void *)(uintptr_t)ptr;
    host_memory_t found;
    host_memory_find(pointer, &found);
    if (result == CUDA_SUCCESS && !found.own)
        result = CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS && base != NULL)
        *base = (CUdeviceptr)(uintptr_t)found.base;
    if (result == CUDA_SUCCESS && bytes != NULL)
        *bytes = found.bytes;
    return host_leave("cuMemGetAddressRange_v2", NULL, pointer, result);
}

/* The devices share the machine's memory. */
CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
    CUresult result = host_enter("cuMemGetInfo_v2", HOST_NEEDS_CONTEXT);
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (result == CUDA_SUCCESS && (free == NULL || total == NULL))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *free = (size_t)sysconf(_SC_AVPHYS_PAGES) * page;
        *total = (size_t)sysconf(_SC_PHYS_PAGES) * page;
    }
    return host_leave("cuMemGetInfo_v2", NULL, NULL, result);
}
