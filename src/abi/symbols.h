/* THE list of foreign functions: everything pynccl ever calls in libnccl and in the CUDA driver.
 *
 * X(need, since, result, name, parameters)
 *   need   REQUIRED: a library without it is refused; OPTIONAL: its slot stays NULL and using it raises
 *          NotSupportedError(name, since)
 *   since  the release that brought it: NCCL as NCCL_SINCE(major, minor) or, where a later one of a minor
 *          release brought it, NCCL_SINCE(major, minor, patch); the driver as CUDA_SINCE(major, minor)
 *
 * The table structs and the loader (src/bind/loader), the host engine's and the no-op engine's
 * prototypes (prototypes.h) and tests/abi are all made from this list, so that a wrong prototype does not
 * compile. A function is added by adding its line here, and nowhere else. What the host engine has for other
 * programs, and pynccl never calls, is in rest.h.
 */
#ifndef PYNCCL_SYMBOLS_H
#define PYNCCL_SYMBOLS_H

#define NCCL_SINCE(major, minor, ...) ((major) * 10000 + (minor) * 100 + (__VA_ARGS__ + 0))
#define CUDA_SINCE(major, minor) ((major) * 1000 + (minor) * 10)

/* clang-format off */
#define PN_NCCL_SYMBOLS(X) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclGetVersion, (int *version)) \
  X(REQUIRED, NCCL_SINCE(2, 18), const char *, ncclGetErrorString, (ncclResult_t result)) \
  X(REQUIRED, NCCL_SINCE(2, 18), const char *, ncclGetLastError, (ncclComm_t comm)) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclGetUniqueId, (ncclUniqueId *uniqueId)) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclCommInitRank, (ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank)) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclCommInitAll, (ncclComm_t *comm, int ndev, const int *devlist)) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclCommInitRankConfig, (ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t *config)) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclCommSplit, (ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config)) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclCommFinalize, (ncclComm_t comm)) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclCommDestroy, (ncclComm_t comm)) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclCommAbort, (ncclComm_t comm)) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t *asyncError)) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclCommCount, (const ncclComm_t comm, int *count)) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclCommCuDevice, (const ncclComm_t comm, int *device)) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclCommUserRank, (const ncclComm_t comm, int *rank)) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclGroupStart, (void)) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclGroupEnd, (void)) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclAllReduce, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclReduce, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream)) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclBroadcast, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream)) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclBcast, (void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream)) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclAllGather, (const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream)) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclReduceScatter, (const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclSend, (const void *sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, cudaStream_t stream)) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclRecv, (void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, cudaStream_t stream)) \
  X(OPTIONAL, NCCL_SINCE(2, 28), ncclResult_t, ncclAlltoAll, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream)) \
  X(OPTIONAL, NCCL_SINCE(2, 28), ncclResult_t, ncclGather, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream)) \
  X(OPTIONAL, NCCL_SINCE(2, 28), ncclResult_t, ncclScatter, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream)) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclRedOpCreatePreMulSum, (ncclRedOp_t *op, void *scalar, ncclDataType_t datatype, ncclScalarResidence_t residence, ncclComm_t comm)) \
  X(REQUIRED, NCCL_SINCE(2, 18), ncclResult_t, ncclRedOpDestroy, (ncclRedOp_t op, ncclComm_t comm)) \
  X(OPTIONAL, NCCL_SINCE(2, 19), ncclResult_t, ncclMemAlloc, (void **ptr, size_t size)) \
  X(OPTIONAL, NCCL_SINCE(2, 19), ncclResult_t, ncclMemFree, (void *ptr)) \
  X(OPTIONAL, NCCL_SINCE(2, 19), ncclResult_t, ncclCommRegister, (const ncclComm_t comm, void *buff, size_t size, void **handle)) \
  X(OPTIONAL, NCCL_SINCE(2, 19), ncclResult_t, ncclCommDeregister, (const ncclComm_t comm, void *handle)) \
  X(OPTIONAL, NCCL_SINCE(2, 22), ncclResult_t, ncclGroupSimulateEnd, (ncclSimInfo_t *simInfo)) \
  X(OPTIONAL, NCCL_SINCE(2, 23), ncclResult_t, ncclCommInitRankScalable, (ncclComm_t *newcomm, int nranks, int myrank, int nId, ncclUniqueId *commIds, ncclConfig_t *config)) \
  X(OPTIONAL, NCCL_SINCE(2, 27), ncclResult_t, ncclCommShrink, (ncclComm_t comm, int *excludeRanksList, int excludeRanksCount, ncclComm_t *newcomm, ncclConfig_t *config, int shrinkFlags)) \
  X(OPTIONAL, NCCL_SINCE(2, 27), ncclResult_t, ncclCommWindowRegister, (ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win, int winFlags)) \
  X(OPTIONAL, NCCL_SINCE(2, 27), ncclResult_t, ncclCommWindowDeregister, (ncclComm_t comm, ncclWindow_t win)) \
  X(OPTIONAL, NCCL_SINCE(2, 28, 7), ncclResult_t, ncclCommRevoke, (ncclComm_t comm, int revokeFlags)) \
  X(OPTIONAL, NCCL_SINCE(2, 29), ncclResult_t, ncclCommGetUniqueId, (ncclComm_t comm, ncclUniqueId *uniqueId)) \
  X(OPTIONAL, NCCL_SINCE(2, 29), ncclResult_t, ncclCommGrow, (ncclComm_t comm, int nRanks, const ncclUniqueId *uniqueId, int rank, ncclComm_t *newcomm, ncclConfig_t *config)) \
  X(OPTIONAL, NCCL_SINCE(2, 29), ncclResult_t, ncclPutSignal, (const void *localbuff, size_t count, ncclDataType_t datatype, int peer, ncclWindow_t peerWin, size_t peerWinOffset, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t stream)) \
  X(OPTIONAL, NCCL_SINCE(2, 29), ncclResult_t, ncclSignal, (int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t stream)) \
  X(OPTIONAL, NCCL_SINCE(2, 29), ncclResult_t, ncclWaitSignal, (int nDesc, ncclWaitSignalDesc_t *signalDescs, ncclComm_t comm, cudaStream_t stream)) \
  X(OPTIONAL, NCCL_SINCE(2, 29, 7), ncclResult_t, ncclCommSuspend, (ncclComm_t comm, int flags)) \
  X(OPTIONAL, NCCL_SINCE(2, 29, 7), ncclResult_t, ncclCommResume, (ncclComm_t comm)) \
  X(OPTIONAL, NCCL_SINCE(2, 29, 7), ncclResult_t, ncclCommMemStats, (ncclComm_t comm, ncclCommMemStat_t stat, uint64_t *value)) \
  X(OPTIONAL, NCCL_SINCE(2, 30), ncclResult_t, ncclParamBind, (ncclParamHandle_t *out, const char *key)) \
  X(OPTIONAL, NCCL_SINCE(2, 30), ncclResult_t, ncclParamGetParameter, (const char *key, const char **value, int *valueLen)) \
  X(OPTIONAL, NCCL_SINCE(2, 30), ncclResult_t, ncclParamGetAllParameterKeys, (const char ***table, int *tableLen)) \
  X(OPTIONAL, NCCL_SINCE(2, 31), ncclResult_t, ncclAllReduceConfig, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config)) \
  X(OPTIONAL, NCCL_SINCE(2, 31), ncclResult_t, ncclBroadcastConfig, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config)) \
  X(OPTIONAL, NCCL_SINCE(2, 31), ncclResult_t, ncclReduceConfig, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config)) \
  X(OPTIONAL, NCCL_SINCE(2, 31), ncclResult_t, ncclAllGatherConfig, (const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config)) \
  X(OPTIONAL, NCCL_SINCE(2, 31), ncclResult_t, ncclReduceScatterConfig, (const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config)) \
  X(OPTIONAL, NCCL_SINCE(2, 31), ncclResult_t, ncclAlltoAllConfig, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config)) \
  X(OPTIONAL, NCCL_SINCE(2, 31), ncclResult_t, ncclGatherConfig, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config)) \
  X(OPTIONAL, NCCL_SINCE(2, 31), ncclResult_t, ncclScatterConfig, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config)) \
  X(OPTIONAL, NCCL_SINCE(2, 32), ncclResult_t, ncclSetEncryption, (const ncclEncryptionConfig_t *config))

#define PN_CUDA_SYMBOLS(X) \
  X(REQUIRED, CUDA_SINCE(2, 0), CUresult, cuInit, (unsigned int flags)) \
  X(REQUIRED, CUDA_SINCE(2, 2), CUresult, cuDriverGetVersion, (int *version)) \
  X(REQUIRED, CUDA_SINCE(6, 0), CUresult, cuGetErrorName, (CUresult error, const char **text)) \
  X(REQUIRED, CUDA_SINCE(6, 0), CUresult, cuGetErrorString, (CUresult error, const char **text)) \
  X(REQUIRED, CUDA_SINCE(2, 0), CUresult, cuDeviceGetCount, (int *count)) \
  X(REQUIRED, CUDA_SINCE(2, 0), CUresult, cuDeviceGet, (CUdevice *device, int ordinal)) \
  X(REQUIRED, CUDA_SINCE(2, 0), CUresult, cuDeviceGetName, (char *name, int len, CUdevice dev)) \
  X(REQUIRED, CUDA_SINCE(11, 4), CUresult, cuDeviceGetUuid_v2, (CUuuid *uuid, CUdevice dev)) \
  X(REQUIRED, CUDA_SINCE(4, 1), CUresult, cuDeviceGetPCIBusId, (char *pciBusId, int len, CUdevice dev)) \
  X(REQUIRED, CUDA_SINCE(2, 0), CUresult, cuDeviceGetAttribute, (int *value, CUdevice_attribute attribute, CUdevice dev)) \
  X(REQUIRED, CUDA_SINCE(7, 0), CUresult, cuDevicePrimaryCtxRetain, (CUcontext *ctx, CUdevice dev)) \
  X(REQUIRED, CUDA_SINCE(11, 0), CUresult, cuDevicePrimaryCtxRelease_v2, (CUdevice dev)) \
  X(REQUIRED, CUDA_SINCE(4, 0), CUresult, cuCtxGetCurrent, (CUcontext *ctx)) \
  X(REQUIRED, CUDA_SINCE(4, 0), CUresult, cuCtxSetCurrent, (CUcontext ctx)) \
  X(REQUIRED, CUDA_SINCE(2, 0), CUresult, cuCtxGetDevice, (CUdevice *dev)) \
  X(REQUIRED, CUDA_SINCE(2, 0), CUresult, cuCtxSynchronize, (void)) \
  X(REQUIRED, CUDA_SINCE(5, 5), CUresult, cuCtxGetStreamPriorityRange, (int *least, int *greatest)) \
  X(REQUIRED, CUDA_SINCE(5, 5), CUresult, cuStreamCreateWithPriority, (CUstream *stream, unsigned int flags, int priority)) \
  X(REQUIRED, CUDA_SINCE(4, 0), CUresult, cuStreamDestroy_v2, (CUstream stream)) \
  X(REQUIRED, CUDA_SINCE(2, 0), CUresult, cuStreamQuery, (CUstream stream)) \
  X(REQUIRED, CUDA_SINCE(2, 0), CUresult, cuStreamSynchronize, (CUstream stream)) \
  X(REQUIRED, CUDA_SINCE(3, 2), CUresult, cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned int flags)) \
  X(REQUIRED, CUDA_SINCE(12, 0), CUresult, cuStreamGetId, (CUstream stream, unsigned long long *id)) \
  X(REQUIRED, CUDA_SINCE(9, 2), CUresult, cuStreamGetCtx, (CUstream stream, CUcontext *ctx)) \
  X(REQUIRED, CUDA_SINCE(10, 0), CUresult, cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus *status)) \
  X(REQUIRED, CUDA_SINCE(10, 1), CUresult, cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode *mode)) \
  X(REQUIRED, CUDA_SINCE(11, 7), CUresult, cuStreamWaitValue32_v2, (CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags)) \
  X(REQUIRED, CUDA_SINCE(11, 7), CUresult, cuStreamWriteValue32_v2, (CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags)) \
  X(REQUIRED, CUDA_SINCE(2, 0), CUresult, cuEventCreate, (CUevent *event, unsigned int flags)) \
  X(REQUIRED, CUDA_SINCE(4, 0), CUresult, cuEventDestroy_v2, (CUevent event)) \
  X(REQUIRED, CUDA_SINCE(2, 0), CUresult, cuEventRecord, (CUevent event, CUstream stream)) \
  X(REQUIRED, CUDA_SINCE(2, 0), CUresult, cuEventQuery, (CUevent event)) \
  X(REQUIRED, CUDA_SINCE(2, 0), CUresult, cuEventSynchronize, (CUevent event)) \
  X(REQUIRED, CUDA_SINCE(2, 0), CUresult, cuEventElapsedTime, (float *milliseconds, CUevent start, CUevent end)) \
  X(REQUIRED, CUDA_SINCE(10, 0), CUresult, cuLaunchHostFunc, (CUstream stream, CUhostFn fn, void *userData)) \
  X(REQUIRED, CUDA_SINCE(3, 2), CUresult, cuMemAlloc_v2, (CUdeviceptr *ptr, size_t bytes)) \
  X(REQUIRED, CUDA_SINCE(3, 2), CUresult, cuMemFree_v2, (CUdeviceptr ptr)) \
  X(REQUIRED, CUDA_SINCE(2, 2), CUresult, cuMemHostAlloc, (void **ptr, size_t bytes, unsigned int flags)) \
  X(REQUIRED, CUDA_SINCE(2, 0), CUresult, cuMemFreeHost, (void *ptr)) \
  X(REQUIRED, CUDA_SINCE(3, 2), CUresult, cuMemHostGetDevicePointer_v2, (CUdeviceptr *device, void *host, unsigned int flags)) \
  X(REQUIRED, CUDA_SINCE(4, 0), CUresult, cuMemcpyAsync, (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream)) \
  X(REQUIRED, CUDA_SINCE(3, 2), CUresult, cuMemcpyHtoDAsync_v2, (CUdeviceptr dst, const void *src, size_t bytes, CUstream stream)) \
  X(REQUIRED, CUDA_SINCE(3, 2), CUresult, cuMemcpyDtoHAsync_v2, (void *dst, CUdeviceptr src, size_t bytes, CUstream stream)) \
  X(REQUIRED, CUDA_SINCE(3, 2), CUresult, cuMemsetD8Async, (CUdeviceptr dst, unsigned char value, size_t bytes, CUstream stream)) \
  X(REQUIRED, CUDA_SINCE(4, 0), CUresult, cuPointerGetAttribute, (void *value, CUpointer_attribute attribute, CUdeviceptr ptr)) \
  X(OPTIONAL, CUDA_SINCE(10, 1), CUresult, cuStreamBeginCapture_v2, (CUstream stream, CUstreamCaptureMode mode)) \
  X(OPTIONAL, CUDA_SINCE(10, 0), CUresult, cuStreamEndCapture, (CUstream stream, CUgraph *graph)) \
  X(OPTIONAL, CUDA_SINCE(11, 4), CUresult, cuGraphInstantiateWithFlags, (CUgraphExec *exec, CUgraph graph, unsigned long long flags)) \
  X(OPTIONAL, CUDA_SINCE(10, 0), CUresult, cuGraphLaunch, (CUgraphExec exec, CUstream stream)) \
  X(OPTIONAL, CUDA_SINCE(10, 0), CUresult, cuGraphExecDestroy, (CUgraphExec exec)) \
  X(OPTIONAL, CUDA_SINCE(10, 0), CUresult, cuGraphDestroy, (CUgraph graph))
/* clang-format on */

#endif
