/* What `bench --peers` measures with: a caller in C, since an interpreter takes longer for its two calls than
 * a short operation does; and the memory, which bounds the long ones. */
#include "host.h"

int64_t pn_host_turns(ncclComm_t comm, CUstream stream, const void *send, void *recv, size_t count,
                      int turns) {
    int64_t start = host_now_ns();
    for (int turn = 0; turn < turns; turn++)
        if (ncclAllReduce(send, recv, count, ncclFloat32, ncclSum, comm, (cudaStream_t)stream) !=
                ncclSuccess ||
            cuStreamSynchronize(stream) != CUDA_SUCCESS)
            return -1;
    return host_now_ns() - start;
}

void pn_host_copy(void *to, const void *from, size_t bytes) {
    host_copy_past(to, from, bytes);
}
