/* Functions of libnccl and of the CUDA driver that pynccl never calls, and that the host engine exports for
 * programs that do. The lines are as in symbols.h; `need` is always OPTIONAL.
 */
#ifndef PYNCCL_REST_H
#define PYNCCL_REST_H

#include "symbols.h"

/* clang-format off */
#define PN_NCCL_REST(X) \
  X(OPTIONAL, NCCL_SINCE(2, 24), void, ncclResetDebugInit, (void)) \
  X(OPTIONAL, NCCL_SINCE(2, 28), ncclResult_t, ncclDevCommCreate, (ncclComm_t comm, const ncclDevCommRequirements_t *reqs, ncclDevComm_t *outDevComm)) \
  X(OPTIONAL, NCCL_SINCE(2, 28), ncclResult_t, ncclDevCommDestroy, (ncclComm_t comm, const ncclDevComm_t *devComm)) \
  X(OPTIONAL, NCCL_SINCE(2, 28), ncclTeam_t, ncclTeamWorld, (ncclComm_t comm)) \
  X(OPTIONAL, NCCL_SINCE(2, 28), ncclTeam_t, ncclTeamLsa, (ncclComm_t comm)) \
  X(OPTIONAL, NCCL_SINCE(2, 28), ncclTeam_t, ncclTeamRail, (ncclComm_t comm)) \
  X(OPTIONAL, NCCL_SINCE(2, 28), int, ncclTeamRankToWorld, (ncclComm_t comm, ncclTeam_t team, int rank)) \
  X(OPTIONAL, NCCL_SINCE(2, 28), int, ncclTeamRankToLsa, (ncclComm_t comm, ncclTeam_t team, int rank)) \
  X(OPTIONAL, NCCL_SINCE(2, 29), ncclResult_t, ncclCommQueryProperties, (ncclComm_t comm, ncclCommProperties_t *props)) \
  X(OPTIONAL, NCCL_SINCE(2, 29), ncclResult_t, ncclGetLsaDevicePointer, (ncclWindow_t window, size_t offset, int lsaRank, void **outPtr)) \
  X(OPTIONAL, NCCL_SINCE(2, 29), ncclResult_t, ncclGetPeerDevicePointer, (ncclWindow_t window, size_t offset, int peer, void **outPtr)) \
  X(OPTIONAL, NCCL_SINCE(2, 29), ncclResult_t, ncclGetLsaMultimemDevicePointer, (ncclWindow_t window, size_t offset, void **outPtr)) \
  X(OPTIONAL, NCCL_SINCE(2, 29), ncclResult_t, ncclGetMultimemDevicePointer, (ncclWindow_t window, size_t offset, ncclMultimemHandle_t multimem, void **outPtr)) \
  X(OPTIONAL, NCCL_SINCE(2, 29), ncclResult_t, ncclWinGetUserPtr, (ncclComm_t comm, ncclWindow_t win, void **outUserPtr)) \
  X(OPTIONAL, NCCL_SINCE(2, 30), ncclResult_t, ncclParamGetI8, (ncclParamHandle_t h, int8_t *out)) \
  X(OPTIONAL, NCCL_SINCE(2, 30), ncclResult_t, ncclParamGetI16, (ncclParamHandle_t h, int16_t *out)) \
  X(OPTIONAL, NCCL_SINCE(2, 30), ncclResult_t, ncclParamGetI32, (ncclParamHandle_t h, int32_t *out)) \
  X(OPTIONAL, NCCL_SINCE(2, 30), ncclResult_t, ncclParamGetI64, (ncclParamHandle_t h, int64_t *out)) \
  X(OPTIONAL, NCCL_SINCE(2, 30), ncclResult_t, ncclParamGetU8, (ncclParamHandle_t h, uint8_t *out)) \
  X(OPTIONAL, NCCL_SINCE(2, 30), ncclResult_t, ncclParamGetU16, (ncclParamHandle_t h, uint16_t *out)) \
  X(OPTIONAL, NCCL_SINCE(2, 30), ncclResult_t, ncclParamGetU32, (ncclParamHandle_t h, uint32_t *out)) \
  X(OPTIONAL, NCCL_SINCE(2, 30), ncclResult_t, ncclParamGetU64, (ncclParamHandle_t h, uint64_t *out)) \
  X(OPTIONAL, NCCL_SINCE(2, 30), ncclResult_t, ncclParamGetStr, (ncclParamHandle_t h, const char **out)) \
  X(OPTIONAL, NCCL_SINCE(2, 30), ncclResult_t, ncclParamGet, (ncclParamHandle_t h, void *out, int maxLen, int *len)) \
  X(OPTIONAL, NCCL_SINCE(2, 30), void, ncclParamDumpAll, (void))

#define PN_CUDA_REST(X) \
  X(OPTIONAL, CUDA_SINCE(12, 0), CUresult, cuGetProcAddress_v2, (const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags, CUdriverProcAddressQueryResult *symbolStatus)) \
  X(OPTIONAL, CUDA_SINCE(3, 2), CUresult, cuDeviceTotalMem_v2, (size_t *bytes, CUdevice dev)) \
  X(OPTIONAL, CUDA_SINCE(4, 1), CUresult, cuDeviceGetByPCIBusId, (CUdevice *dev, const char *pciBusId)) \
  X(OPTIONAL, CUDA_SINCE(4, 0), CUresult, cuDeviceCanAccessPeer, (int *canAccessPeer, CUdevice dev, CUdevice peerDev)) \
  X(OPTIONAL, CUDA_SINCE(7, 0), CUresult, cuDevicePrimaryCtxGetState, (CUdevice dev, unsigned int *flags, int *active)) \
  X(OPTIONAL, CUDA_SINCE(4, 0), CUresult, cuCtxPushCurrent_v2, (CUcontext ctx)) \
  X(OPTIONAL, CUDA_SINCE(4, 0), CUresult, cuCtxPopCurrent_v2, (CUcontext *ctx)) \
  X(OPTIONAL, CUDA_SINCE(12, 0), CUresult, cuCtxGetId, (CUcontext ctx, unsigned long long *id)) \
  X(OPTIONAL, CUDA_SINCE(7, 0), CUresult, cuCtxGetFlags, (unsigned int *flags)) \
  X(OPTIONAL, CUDA_SINCE(3, 2), CUresult, cuCtxGetApiVersion, (CUcontext ctx, unsigned int *version)) \
  X(OPTIONAL, CUDA_SINCE(13, 0), CUresult, cuCtxGetDevice_v2, (CUdevice *dev, CUcontext ctx)) \
  X(OPTIONAL, CUDA_SINCE(13, 0), CUresult, cuCtxSynchronize_v2, (CUcontext ctx)) \
  X(OPTIONAL, CUDA_SINCE(2, 0), CUresult, cuStreamCreate, (CUstream *stream, unsigned int flags)) \
  X(OPTIONAL, CUDA_SINCE(5, 5), CUresult, cuStreamGetFlags, (CUstream stream, unsigned int *flags)) \
  X(OPTIONAL, CUDA_SINCE(5, 5), CUresult, cuStreamGetPriority, (CUstream stream, int *priority)) \
  X(OPTIONAL, CUDA_SINCE(12, 8), CUresult, cuStreamGetDevice, (CUstream stream, CUdevice *dev)) \
  X(OPTIONAL, CUDA_SINCE(12, 5), CUresult, cuStreamGetCtx_v2, (CUstream stream, CUcontext *ctx, CUgreenCtx *greenCtx)) \
  X(OPTIONAL, CUDA_SINCE(11, 3), CUresult, cuStreamGetCaptureInfo_v2, (CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **dependencies, size_t *count)) \
  X(OPTIONAL, CUDA_SINCE(12, 3), CUresult, cuStreamGetCaptureInfo_v3, (CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **dependencies, const CUgraphEdgeData **edges, size_t *count)) \
  X(OPTIONAL, CUDA_SINCE(11, 1), CUresult, cuEventRecordWithFlags, (CUevent event, CUstream stream, unsigned int flags)) \
  X(OPTIONAL, CUDA_SINCE(12, 8), CUresult, cuEventElapsedTime_v2, (float *milliseconds, CUevent start, CUevent end)) \
  X(OPTIONAL, CUDA_SINCE(3, 2), CUresult, cuMemAllocHost_v2, (void **ptr, size_t bytes)) \
  X(OPTIONAL, CUDA_SINCE(3, 2), CUresult, cuMemGetInfo_v2, (size_t *free, size_t *total)) \
  X(OPTIONAL, CUDA_SINCE(3, 2), CUresult, cuMemGetAddressRange_v2, (CUdeviceptr *base, size_t *bytes, CUdeviceptr ptr)) \
  X(OPTIONAL, CUDA_SINCE(7, 0), CUresult, cuPointerGetAttributes, (unsigned int count, CUpointer_attribute *attributes, void **values, CUdeviceptr ptr)) \
  X(OPTIONAL, CUDA_SINCE(4, 0), CUresult, cuMemcpy, (CUdeviceptr dst, CUdeviceptr src, size_t bytes)) \
  X(OPTIONAL, CUDA_SINCE(3, 2), CUresult, cuMemcpyHtoD_v2, (CUdeviceptr dst, const void *src, size_t bytes)) \
  X(OPTIONAL, CUDA_SINCE(3, 2), CUresult, cuMemcpyDtoH_v2, (void *dst, CUdeviceptr src, size_t bytes)) \
  X(OPTIONAL, CUDA_SINCE(3, 2), CUresult, cuMemcpyDtoD_v2, (CUdeviceptr dst, CUdeviceptr src, size_t bytes)) \
  X(OPTIONAL, CUDA_SINCE(3, 2), CUresult, cuMemcpyDtoDAsync_v2, (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream)) \
  X(OPTIONAL, CUDA_SINCE(3, 2), CUresult, cuMemsetD8_v2, (CUdeviceptr dst, unsigned char value, size_t count)) \
  X(OPTIONAL, CUDA_SINCE(3, 2), CUresult, cuMemsetD16_v2, (CUdeviceptr dst, unsigned short value, size_t count)) \
  X(OPTIONAL, CUDA_SINCE(3, 2), CUresult, cuMemsetD32_v2, (CUdeviceptr dst, unsigned int value, size_t count)) \
  X(OPTIONAL, CUDA_SINCE(3, 2), CUresult, cuMemsetD16Async, (CUdeviceptr dst, unsigned short value, size_t count, CUstream stream)) \
  X(OPTIONAL, CUDA_SINCE(3, 2), CUresult, cuMemsetD32Async, (CUdeviceptr dst, unsigned int value, size_t count, CUstream stream)) \
  X(OPTIONAL, CUDA_SINCE(11, 2), CUresult, cuDeviceGetDefaultMemPool, (CUmemoryPool *pool, CUdevice dev)) \
  X(OPTIONAL, CUDA_SINCE(11, 2), CUresult, cuDeviceGetMemPool, (CUmemoryPool *pool, CUdevice dev)) \
  X(OPTIONAL, CUDA_SINCE(11, 2), CUresult, cuDeviceSetMemPool, (CUdevice dev, CUmemoryPool pool)) \
  X(OPTIONAL, CUDA_SINCE(11, 2), CUresult, cuMemPoolCreate, (CUmemoryPool *pool, const CUmemPoolProps *props)) \
  X(OPTIONAL, CUDA_SINCE(11, 2), CUresult, cuMemPoolDestroy, (CUmemoryPool pool)) \
  X(OPTIONAL, CUDA_SINCE(11, 2), CUresult, cuMemPoolSetAttribute, (CUmemoryPool pool, CUmemPool_attribute attribute, void *value)) \
  X(OPTIONAL, CUDA_SINCE(11, 2), CUresult, cuMemPoolGetAttribute, (CUmemoryPool pool, CUmemPool_attribute attribute, void *value)) \
  X(OPTIONAL, CUDA_SINCE(11, 2), CUresult, cuMemPoolTrimTo, (CUmemoryPool pool, size_t bytesToKeep)) \
  X(OPTIONAL, CUDA_SINCE(11, 2), CUresult, cuMemPoolSetAccess, (CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)) \
  X(OPTIONAL, CUDA_SINCE(11, 2), CUresult, cuMemPoolGetAccess, (CUmemAccess_flags *flags, CUmemoryPool pool, CUmemLocation *location)) \
  X(OPTIONAL, CUDA_SINCE(11, 2), CUresult, cuMemAllocAsync, (CUdeviceptr *ptr, size_t bytes, CUstream stream)) \
  X(OPTIONAL, CUDA_SINCE(11, 2), CUresult, cuMemAllocFromPoolAsync, (CUdeviceptr *ptr, size_t bytes, CUmemoryPool pool, CUstream stream)) \
  X(OPTIONAL, CUDA_SINCE(11, 2), CUresult, cuMemFreeAsync, (CUdeviceptr ptr, CUstream stream)) \
  X(OPTIONAL, CUDA_SINCE(10, 0), CUresult, cuGraphGetNodes, (CUgraph graph, CUgraphNode *nodes, size_t *count)) \
  X(OPTIONAL, CUDA_SINCE(11, 1), CUresult, cuGraphUpload, (CUgraphExec exec, CUstream stream)) \
  X(OPTIONAL, CUDA_SINCE(12, 0), CUresult, cuGraphExecUpdate_v2, (CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *resultInfo)) \
  X(OPTIONAL, CUDA_SINCE(3, 0), CUresult, cuGetExportTable, (const void **table, const CUuuid *id)) \
  X(OPTIONAL, CUDA_SINCE(13, 0), CUresult, cuMemGetDefaultMemPool, (CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)) \
  X(OPTIONAL, CUDA_SINCE(13, 0), CUresult, cuMemGetMemPool, (CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)) \
  X(OPTIONAL, CUDA_SINCE(12, 0), CUresult, cuGraphInstantiateWithParams, (CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters))
/* clang-format on */

#endif
