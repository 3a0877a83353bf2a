/* Ordinary memory of other processes: copies that the kernel makes from one process to another (cross-memory
 * attach). That costs one copy where shared slots cost two, and no data goes from one core's cache to the
 * other's: between cores that share none, slots were measured to take up to seven times as long.
 *
 * The kernel lets a process do so that may trace the other one: the same user, and where Yama or a container
 * says so, nobody. So it is tried once, and where one rank may not, all ranks do without.
 */
#define _GNU_SOURCE
#include "nccl.h"

#include <errno.h>
#include <string.h>
#include <sys/uio.h>

static int copy_far(pid_t pid, void *here, uintptr_t there, size_t bytes, bool out) {
    while (bytes != 0) {
        struct iovec local = {.iov_base = here, .iov_len = bytes};
        struct iovec remote = {.iov_base = (void *)there, .iov_len = bytes};
        ssize_t copied = out ? process_vm_writev(pid, &local, 1, &remote, 1, 0)
                             : process_vm_readv(pid, &local, 1, &remote, 1, 0);
        if (copied <= 0)
            return copied == 0 ? EFAULT : errno;
        here = (char *)here + copied;
        there += (size_t)copied;
        bytes -= (size_t)copied;
    }
    return 0;
}

/* The kernel could not copy. That process is gone, which the watch will say; or somebody gave a buffer that
 * is no memory. */
static void fail(host_kernel_t *kernel, int rank, int error) {
    kernel->stuck = true;
    if (error == ESRCH)
        return;
    host_last_error("%s: rank %d cannot copy between its buffer and that of rank %d: %s", kernel->name,
                    kernel->comm->rank, rank, strerror(error));
    host_comm_set_state(kernel->comm, error == EFAULT ? ncclUnhandledCudaError : ncclSystemError);
}

bool host_copy_between(host_kernel_t *kernel, int rank, host_place_t to, host_place_t from, size_t bytes) {
    pid_t pid = host_segment_area(kernel->clique->head, rank)->pid;
    int error = 0;
    if (to.far)
        error = copy_far(pid, from.at, (uintptr_t)to.at, bytes, true);
    else if (from.far)
        error = copy_far(pid, to.at, (uintptr_t)from.at, bytes, false);
    else if (from.at != to.at && kernel->work.bytes >= HOST_PAST_CACHES_BYTES)
        host_copy_past(to.at, from.at, bytes);
    else if (from.at != to.at)
        memcpy(to.at, from.at, bytes);
    if (error != 0)
        fail(kernel, rank, error);
    return error == 0;
}

/* Process numbers differ between containers, so it is not enough that some process can be read: where this
 * one says that it keeps the segment's secret, the secret must be. */
static bool try_all(host_clique_t *clique) {
    uint8_t found[sizeof clique->secret];
    for (int rank = 0; rank < clique->ranks; rank++) {
        const host_area_t *area = host_segment_area(clique->head, rank);
        if (copy_far(area->pid, found, area->home, sizeof found, false) != 0 ||
            memcmp(found, clique->secret, sizeof found) != 0)
            return false;
    }
    return true;
}

bool host_attach_allowed(host_clique_t *clique) {
    int known = atomic_load_explicit(&clique->attach, memory_order_relaxed);
    if (known == HOST_ATTACH_UNKNOWN) {
        known = try_all(clique) ? HOST_ATTACH_ALLOWED : HOST_ATTACH_DENIED;
        int unknown = HOST_ATTACH_UNKNOWN;
        if (!atomic_compare_exchange_strong(&clique->attach, &unknown, known))
            known = unknown;
    }
    return known == HOST_ATTACH_ALLOWED;
}

void host_attach_deny(host_clique_t *clique) {
    atomic_store(&clique->attach, HOST_ATTACH_DENIED);
}
