/* What the misuse detector knows of NCCL's rules: one thread at a time in a communicator, which is used with
 * its device current and not after its end; groups that end before their thread does. */
#define _GNU_SOURCE
#include "nccl_group.h"

#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The calls that NCCL allows beside another thread's. */
static bool may_be_beside(const char *function) {
    static const char *const names[] = {"ncclCommGetAsyncError", "ncclCommAbort",    "ncclCommRevoke",
                                        "ncclCommCount",         "ncclCommCuDevice", "ncclCommUserRank",
                                        "ncclGetLastError"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strcmp(function, names[i]) == 0)
            return true;
    return false;
}

bool host_misuse_claim(ncclComm_t comm, const char *function) {
    if (may_be_beside(function))
        return false;
    int32_t own = (int32_t)syscall(SYS_gettid), other = 0;
    if (atomic_compare_exchange_strong(&comm->inside, &other, own))
        return true;
    if (other != own)
        host_misuse("%s: thread %d is in a call on the communicator of rank %d, and thread %d enters another",
                    function, (int)other, comm->rank, (int)own);
    return false;
}

/* Without a reference: the call may have been the handle's last, whose memory is kept for a while. */
void host_misuse_unclaim(ncclComm_t comm) {
    atomic_store(&comm->inside, 0);
}

/* In a group NCCL goes to each communicator's device by itself, but not for one that has one rank. */
void host_misuse_device(ncclComm_t comm, const char *function) {
    int device = -1;
    if (host_group_depth() > 0 && comm->ranks > 1)
        return;
    if (host_current_device(&device, false) != CUDA_SUCCESS)
        device = -1;
    if (device != comm->device)
        host_misuse("%s: the thread's device is %d, the communicator of rank %d is on device %d", function,
                    device, comm->rank, comm->device);
}

/* ---- threads that end inside a group --------------------------------------------------------------- */

static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool usable;

static void at_thread_end(void *set) {
    (void)set;
    if (host_group_depth() > 0)
        host_misuse("a thread has ended inside a group: its depth is %d", host_group_depth());
}

static void make_key(void) {
    usable = pthread_key_create(&key, at_thread_end) == 0;
}

void host_misuse_group(void) {
    pthread_once(&once, make_key);
    if (usable)
        pthread_setspecific(key, &key);
}
