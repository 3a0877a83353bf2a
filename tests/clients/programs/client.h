/* For programs on NCCL's C API: prototypes of the driver, since NCCL's wheel has no cuda.h, and MUST. */
#include <nccl.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int cuInit(unsigned int flags);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuCtxSetCurrent(void *context);
int cuStreamCreate(cudaStream_t *stream, unsigned int flags);
int cuStreamSynchronize(cudaStream_t stream);
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes);
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes);

#define MUST(call)                                                                                           \
    do {                                                                                                     \
        int code = (int)(call);                                                                              \
        if (code != 0) {                                                                                     \
            fprintf(stderr, "%s: %d, %s\n", #call, code, ncclGetLastError(NULL));                            \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)
