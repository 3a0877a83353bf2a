/* What split, shrink and grow have in common: a communicator that is made from another one. */
#include "nccl_group.h"

/* Several calls on one parent in a group run on threads of their own; the ranks agree only on the order in
 * which they were made. */
ncclResult_t host_child_turn(host_job_t *job) {
    ncclComm_t parent = job->parent;
    for (;;) {
        uint32_t seen = host_bell_look(&parent->quiet);
        if (atomic_load(&parent->born) == job->number - 1)
            return ncclSuccess;
        ncclResult_t result = host_comm_nap(job->comm, &parent->quiet, seen);
        if (result != ncclSuccess)
            return result;
    }
}

void host_child_done(host_job_t *job) {
    atomic_fetch_add(&job->parent->born, 1);
    host_bell_ring(&job->parent->quiet);
}

ncclResult_t host_child_make(host_job_t *job, int ranks, int rank, const ncclUniqueId *id) {
    ncclComm_t parent = job->parent;
    ncclComm_t child = host_comm_new(ranks, rank, parent->device, &job->config, job->share ? parent : NULL);
    if (child == NULL)
        return ncclSystemError;
    child->parent = parent;
    ncclResult_t result = host_init_exchange(child, id, 0);
    child->parent = NULL;
    host_segment_withdraw(result == ncclSuccess ? NULL : id);
    if (result != ncclSuccess) {
        /* Not just detached: other ranks of this process may share what it has mapped, or be about to. */
        atomic_store(&child->aborted, true);
        host_comm_stop(child);
        host_comm_reclaim(child);
        return result;
    }
    atomic_store(&child->state, ncclSuccess);
    __atomic_store_n(job->out, child, __ATOMIC_RELEASE);
    return ncclSuccess;
}
