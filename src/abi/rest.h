/* Functions of libnccl and of the CUDA driver that pynccl never calls, and that the host engine exports for
 * programs that do. The lines are as in symbols.h; `need` is always OPTIONAL.
 */
#ifndef PYNCCL_REST_H
#define PYNCCL_REST_H

#include "symbols.h"

/* clang-format off */
#define PN_NCCL_REST(X) \
  X(OPTIONAL, NCCL_SINCE(2, 24), void, ncclResetDebugInit, (void)) \
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

#define PN_CUDA_REST(X)
/* clang-format on */

#endif
