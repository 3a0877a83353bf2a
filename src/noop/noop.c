/* The no-op engine: names of symbols.h and nothing else, every operation complete at once, no data moved.
 *
 * It measures what the binding itself costs, and counts what the binding calls: the counts are read through
 * ncclParamGetParameter("ncclAllReduce", ...), so that no name beyond symbols.h is exported. It is also the
 * proof that the binding needs no more than that list.
 */
#define _GNU_SOURCE
#include "../abi/prototypes.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define DEVICES 8

/* One counter a function, from the list itself. */
enum {
#define INDEX(need, since, result, name, parameters) INDEX_##name,
    PN_NCCL_SYMBOLS(INDEX) PN_CUDA_SYMBOLS(INDEX)
#undef INDEX
        FUNCTIONS
};
static const char *const names[FUNCTIONS] = {
#define NAME(need, since, result, name, parameters) #name,
    PN_NCCL_SYMBOLS(NAME) PN_CUDA_SYMBOLS(NAME)
#undef NAME
};
static _Atomic unsigned long counts[FUNCTIONS];
#define COUNTED(name) atomic_fetch_add_explicit(&counts[INDEX_##name], 1, memory_order_relaxed)

struct ncclComm {
    int rank, size, device;
};
struct CUctx_st {
    int device;
};
struct CUstream_st {
    unsigned long long id;
};

static struct CUctx_st contexts[DEVICES];
static _Thread_local CUcontext current;
static _Thread_local CUstreamCaptureMode capture_mode;
static _Thread_local int depth;
static _Atomic unsigned long long next_stream = 16;
static struct CUevent_st {
    int unused;
} one_event;

/* ---- NCCL ---------------------------------------------------------------------------------------------- */

#define NCCL_OK(name, parameters)                                                                            \
    ncclResult_t name parameters {                                                                           \
        COUNTED(name);                                                                                       \
        return ncclSuccess;                                                                                  \
    }
#define UNUSED __attribute__((unused))

static ncclResult_t make(ncclComm_t *comm, int rank, int size) {
    if (!comm || size < 1 || rank < 0 || rank >= size)
        return ncclInvalidArgument;
    *comm = calloc(1, sizeof **comm);
    if (!*comm)
        return ncclSystemError;
    (*comm)->rank = rank;
    (*comm)->size = size;
    (*comm)->device = current ? current->device : 0;
    return ncclSuccess;
}

ncclResult_t ncclGetVersion(int *version) {
    COUNTED(ncclGetVersion);
    *version = NCCL_ABI_VERSION;
    return ncclSuccess;
}
const char *ncclGetErrorString(UNUSED ncclResult_t result) {
    COUNTED(ncclGetErrorString);
    return "no-op engine";
}
const char *ncclGetLastError(UNUSED ncclComm_t comm) {
    COUNTED(ncclGetLastError);
    return "";
}
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    COUNTED(ncclGetUniqueId);
    return getrandom(id, sizeof *id, 0) == sizeof *id ? ncclSuccess : ncclSystemError;
}
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, UNUSED ncclUniqueId id, int rank) {
    COUNTED(ncclCommInitRank);
    return make(comm, rank, nranks);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, UNUSED ncclUniqueId id, int rank,
                                    UNUSED ncclConfig_t *config) {
    COUNTED(ncclCommInitRankConfig);
    return make(comm, rank, nranks);
}
ncclResult_t ncclCommInitAll(ncclComm_t *comm, int ndev, UNUSED const int *devlist) {
    COUNTED(ncclCommInitAll);
    ncclResult_t rc = ncclSuccess;
    for (int i = 0; i < ndev && rc == ncclSuccess; i++)
        rc = make(&comm[i], i, ndev);
    return rc;
}
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, UNUSED int key, ncclComm_t *child,
                           UNUSED ncclConfig_t *config) {
    COUNTED(ncclCommSplit);
    *child = NULL;
    return color == NCCL_SPLIT_NOCOLOR ? ncclSuccess : make(child, comm->rank, comm->size);
}
static ncclResult_t drop(ncclComm_t comm) {
    free(comm);
    return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    COUNTED(ncclCommDestroy);
    return drop(comm);
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    COUNTED(ncclCommAbort);
    return drop(comm);
}
NCCL_OK(ncclCommFinalize, (UNUSED ncclComm_t comm))
ncclResult_t ncclCommGetAsyncError(UNUSED ncclComm_t comm, ncclResult_t *state) {
    COUNTED(ncclCommGetAsyncError);
    *state = ncclSuccess;
    return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
    COUNTED(ncclCommCount);
    *count = comm->size;
    return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) {
    COUNTED(ncclCommCuDevice);
    *device = comm->device;
    return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
    COUNTED(ncclCommUserRank);
    *rank = comm->rank;
    return ncclSuccess;
}
ncclResult_t ncclGroupStart(void) {
    COUNTED(ncclGroupStart);
    depth++;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd(void) {
    COUNTED(ncclGroupEnd);
    if (!depth)
        return ncclInvalidUsage;
    depth--;
    return ncclSuccess;
}

#define SEND_RECV                                                                                            \
    UNUSED const void *sendbuff, UNUSED void *recvbuff, UNUSED size_t count, UNUSED ncclDataType_t type
#define ON UNUSED ncclComm_t comm, UNUSED cudaStream_t stream
NCCL_OK(ncclAllReduce, (SEND_RECV, UNUSED ncclRedOp_t op, ON))
NCCL_OK(ncclReduce, (SEND_RECV, UNUSED ncclRedOp_t op, UNUSED int root, ON))
NCCL_OK(ncclBroadcast, (SEND_RECV, UNUSED int root, ON))
NCCL_OK(ncclBcast, (UNUSED void *buff, UNUSED size_t count, UNUSED ncclDataType_t type, UNUSED int root, ON))
NCCL_OK(ncclAllGather, (SEND_RECV, ON))
NCCL_OK(ncclReduceScatter, (SEND_RECV, UNUSED ncclRedOp_t op, ON))
NCCL_OK(ncclAlltoAll, (SEND_RECV, ON))
NCCL_OK(ncclGather, (SEND_RECV, UNUSED int root, ON))
NCCL_OK(ncclScatter, (SEND_RECV, UNUSED int root, ON))
NCCL_OK(ncclSend,
        (UNUSED const void *buff, UNUSED size_t count, UNUSED ncclDataType_t type, UNUSED int peer, ON))
NCCL_OK(ncclRecv, (UNUSED void *buff, UNUSED size_t count, UNUSED ncclDataType_t type, UNUSED int peer, ON))
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, UNUSED void *scalar, UNUSED ncclDataType_t type,
                                      UNUSED ncclScalarResidence_t residence, UNUSED ncclComm_t comm) {
    COUNTED(ncclRedOpCreatePreMulSum);
    *op = (ncclRedOp_t)(ncclNumOps + 1);
    return ncclSuccess;
}
NCCL_OK(ncclRedOpDestroy, (UNUSED ncclRedOp_t op, UNUSED ncclComm_t comm))
ncclResult_t ncclMemAlloc(void **ptr, size_t size) {
    COUNTED(ncclMemAlloc);
    *ptr = malloc(size);
    return *ptr ? ncclSuccess : ncclUnhandledCudaError;
}
ncclResult_t ncclMemFree(void *ptr) {
    COUNTED(ncclMemFree);
    free(ptr);
    return ncclSuccess;
}
ncclResult_t ncclCommRegister(UNUSED const ncclComm_t comm, UNUSED void *buff, UNUSED size_t size,
                              void **handle) {
    COUNTED(ncclCommRegister);
    *handle = NULL;
    return ncclSuccess;
}
NCCL_OK(ncclCommDeregister, (UNUSED const ncclComm_t comm, UNUSED void *handle))
ncclResult_t ncclParamBind(UNUSED ncclParamHandle_t *out, UNUSED const char *key) {
    COUNTED(ncclParamBind);
    return ncclInvalidArgument;
}
ncclResult_t ncclParamGetParameter(const char *key, const char **value, int *length) {
    static _Thread_local char text[24];
    for (int i = 0; i < FUNCTIONS; i++)
        if (strcmp(names[i], key) == 0) {
            *length = 1 + snprintf(text, sizeof text, "%lu", atomic_load(&counts[i]));
            *value = text;
            return ncclSuccess;
        }
    return ncclInvalidArgument;
}
ncclResult_t ncclParamGetAllParameterKeys(const char ***table, int *length) {
    static const char *keys[FUNCTIONS];
    memcpy(keys, names, sizeof keys);
    *table = keys;
    *length = FUNCTIONS;
    return ncclSuccess;
}

/* ---- CUDA driver --------------------------------------------------------------------------------------- */

#define CUDA_OK(name, parameters)                                                                            \
    CUresult name parameters {                                                                               \
        COUNTED(name);                                                                                       \
        return CUDA_SUCCESS;                                                                                 \
    }

CUDA_OK(cuInit, (UNUSED unsigned int flags))
CUresult cuDriverGetVersion(int *version) {
    COUNTED(cuDriverGetVersion);
    *version = 13000;
    return CUDA_SUCCESS;
}
static CUresult text_of(const char **text, const char *value) {
    *text = value;
    return CUDA_SUCCESS;
}
CUresult cuGetErrorName(UNUSED CUresult error, const char **text) {
    COUNTED(cuGetErrorName);
    return text_of(text, "CUDA_ERROR");
}
CUresult cuGetErrorString(UNUSED CUresult error, const char **text) {
    COUNTED(cuGetErrorString);
    return text_of(text, "no-op engine");
}
CUresult cuDeviceGetCount(int *count) {
    COUNTED(cuDeviceGetCount);
    *count = DEVICES;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    COUNTED(cuDeviceGet);
    *device = ordinal;
    return ordinal >= 0 && ordinal < DEVICES ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    COUNTED(cuDeviceGetName);
    snprintf(name, (size_t)length, "no-op device %d", device);
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    COUNTED(cuDeviceGetUuid_v2);
    memset(uuid, device, sizeof *uuid);
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetPCIBusId(char *bus, int length, CUdevice device) {
    COUNTED(cuDeviceGetPCIBusId);
    snprintf(bus, (size_t)length, "0000:00:%02x.0", device);
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, UNUSED CUdevice_attribute attribute, UNUSED CUdevice device) {
    COUNTED(cuDeviceGetAttribute);
    *value = 1;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    COUNTED(cuDevicePrimaryCtxRetain);
    contexts[device].device = device;
    *context = &contexts[device];
    return CUDA_SUCCESS;
}
CUDA_OK(cuDevicePrimaryCtxRelease_v2, (UNUSED CUdevice device))
CUresult cuCtxGetCurrent(CUcontext *context) {
    COUNTED(cuCtxGetCurrent);
    *context = current;
    return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
    COUNTED(cuCtxSetCurrent);
    current = context;
    return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice *device) {
    COUNTED(cuCtxGetDevice);
    *device = current ? current->device : 0;
    return current ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
CUDA_OK(cuCtxSynchronize, (void))
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    COUNTED(cuCtxGetStreamPriorityRange);
    *least = 0;
    *greatest = -5;
    return CUDA_SUCCESS;
}
CUresult cuStreamCreateWithPriority(CUstream *stream, UNUSED unsigned int flags, UNUSED int priority) {
    COUNTED(cuStreamCreateWithPriority);
    *stream = malloc(sizeof **stream);
    if (!*stream)
        return CUDA_ERROR_OUT_OF_MEMORY;
    (*stream)->id = atomic_fetch_add(&next_stream, 1);
    return CUDA_SUCCESS;
}
CUresult cuStreamDestroy_v2(CUstream stream) {
    COUNTED(cuStreamDestroy_v2);
    free(stream);
    return CUDA_SUCCESS;
}
CUDA_OK(cuStreamQuery, (UNUSED CUstream stream))
CUDA_OK(cuStreamSynchronize, (UNUSED CUstream stream))
CUDA_OK(cuStreamWaitEvent, (UNUSED CUstream stream, UNUSED CUevent event, UNUSED unsigned int flags))
CUresult cuStreamGetId(CUstream stream, unsigned long long *id) {
    COUNTED(cuStreamGetId);
    *id = (uintptr_t)stream < 16 ? (uintptr_t)stream : stream->id;
    return CUDA_SUCCESS;
}
CUresult cuStreamGetCtx(UNUSED CUstream stream, CUcontext *context) {
    COUNTED(cuStreamGetCtx);
    *context = current;
    return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(UNUSED CUstream stream, CUstreamCaptureStatus *status) {
    COUNTED(cuStreamIsCapturing);
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    COUNTED(cuThreadExchangeStreamCaptureMode);
    CUstreamCaptureMode before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}
CUDA_OK(cuStreamWaitValue32_v2, (UNUSED CUstream stream, UNUSED CUdeviceptr address, UNUSED cuuint32_t value,
                                 UNUSED unsigned int flags))
CUresult cuStreamWriteValue32_v2(UNUSED CUstream stream, CUdeviceptr address, cuuint32_t value,
                                 UNUSED unsigned int flags) {
    COUNTED(cuStreamWriteValue32_v2);
    *(volatile uint32_t *)(uintptr_t)address = value;
    return CUDA_SUCCESS;
}
CUresult cuEventCreate(CUevent *event, UNUSED unsigned int flags) {
    COUNTED(cuEventCreate);
    *event = &one_event;
    return CUDA_SUCCESS;
}
CUDA_OK(cuEventDestroy_v2, (UNUSED CUevent event))
CUDA_OK(cuEventRecord, (UNUSED CUevent event, UNUSED CUstream stream))
CUDA_OK(cuEventQuery, (UNUSED CUevent event))
CUDA_OK(cuEventSynchronize, (UNUSED CUevent event))
CUresult cuEventElapsedTime(float *milliseconds, UNUSED CUevent start, UNUSED CUevent end) {
    COUNTED(cuEventElapsedTime);
    *milliseconds = 0.0f;
    return CUDA_SUCCESS;
}
CUresult cuLaunchHostFunc(UNUSED CUstream stream, CUhostFn function, void *data) {
    COUNTED(cuLaunchHostFunc);
    function(data);
    return CUDA_SUCCESS;
}
static CUresult allocate(void **pointer, size_t bytes) {
    *pointer = calloc(1, bytes);
    return *pointer ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    COUNTED(cuMemAlloc_v2);
    void *memory;
    CUresult rc = allocate(&memory, bytes);
    *pointer = (uintptr_t)memory;
    return rc;
}
CUresult cuMemFree_v2(CUdeviceptr pointer) {
    COUNTED(cuMemFree_v2);
    free((void *)(uintptr_t)pointer);
    return CUDA_SUCCESS;
}
CUresult cuMemHostAlloc(void **pointer, size_t bytes, UNUSED unsigned int flags) {
    COUNTED(cuMemHostAlloc);
    return allocate(pointer, bytes);
}
CUresult cuMemFreeHost(void *pointer) {
    COUNTED(cuMemFreeHost);
    free(pointer);
    return CUDA_SUCCESS;
}
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *host, UNUSED unsigned int flags) {
    COUNTED(cuMemHostGetDevicePointer_v2);
    *device = (uintptr_t)host;
    return CUDA_SUCCESS;
}
CUDA_OK(cuMemcpyAsync,
        (UNUSED CUdeviceptr dst, UNUSED CUdeviceptr src, UNUSED size_t bytes, UNUSED CUstream stream))
CUDA_OK(cuMemcpyHtoDAsync_v2,
        (UNUSED CUdeviceptr dst, UNUSED const void *src, UNUSED size_t bytes, UNUSED CUstream stream))
CUDA_OK(cuMemcpyDtoHAsync_v2,
        (UNUSED void *dst, UNUSED CUdeviceptr src, UNUSED size_t bytes, UNUSED CUstream stream))
CUDA_OK(cuMemsetD8Async,
        (UNUSED CUdeviceptr dst, UNUSED unsigned char value, UNUSED size_t bytes, UNUSED CUstream stream))
CUresult cuPointerGetAttribute(UNUSED void *value, UNUSED CUpointer_attribute attribute,
                               UNUSED CUdeviceptr pointer) {
    COUNTED(cuPointerGetAttribute);
    return CUDA_ERROR_INVALID_VALUE;
}

/* Capture and graphs: this engine has none, and says so. */
#define CUDA_REFUSED(name, parameters)                                                                       \
    CUresult name parameters {                                                                               \
        COUNTED(name);                                                                                       \
        return CUDA_ERROR_NOT_SUPPORTED;                                                                     \
    }
CUDA_REFUSED(cuStreamBeginCapture_v2, (UNUSED CUstream stream, UNUSED CUstreamCaptureMode mode))
CUDA_REFUSED(cuStreamEndCapture, (UNUSED CUstream stream, UNUSED CUgraph *graph))
CUDA_REFUSED(cuGraphInstantiateWithFlags,
             (UNUSED CUgraphExec * exec, UNUSED CUgraph graph, UNUSED unsigned long long flags))
CUDA_REFUSED(cuGraphLaunch, (UNUSED CUgraphExec exec, UNUSED CUstream stream))
CUDA_REFUSED(cuGraphExecDestroy, (UNUSED CUgraphExec exec))
CUDA_REFUSED(cuGraphDestroy, (UNUSED CUgraph graph))
