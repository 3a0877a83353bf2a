/* ncclCommRevoke: what runs is stopped, and what is left can be split, shrunk and destroyed. */
#include "nccl_group.h"

static const char name[] = "ncclCommRevoke";

/* An init that was stopped leaves nothing that could be healthy. */
static ncclResult_t run_revoke(host_job_t *job) {
    ncclComm_t comm = job->comm;
    ncclResult_t result = host_comm_cut(comm);
    if (result != ncclSuccess)
        return result;
    if (atomic_load(&comm->clique) == NULL || atomic_load(&comm->area->presence) != HOST_READY)
        return (ncclResult_t)atomic_load(&comm->state);
    atomic_store(&comm->state, ncclSuccess);
    return ncclSuccess;
}

/* Also of a group that fails nothing is left running, or stopped for good. */
static void undo_revoke(host_job_t *job) {
    host_comm_cut(job->comm);
}

static ncclResult_t queue_revoke(ncclComm_t comm) {
    host_comm_stop(comm);
    host_comm_await_background(comm);
    comm->finalize_called = true;
    host_job_t job = {.run = run_revoke, .undo = undo_revoke, .comm = comm, .function = name};
    ncclResult_t result = host_group_add_job(&job);
    if (result != ncclSuccess)
        undo_revoke(&job);
    return result;
}

static ncclResult_t check(ncclComm_t comm, int flags) {
    if (flags != NCCL_REVOKE_DEFAULT)
        return host_fail(ncclInvalidArgument, "%s: flags are %#x", name, (unsigned int)flags);
    ncclResult_t result = host_comm_check(comm, name);
    if (result != ncclSuccess)
        return result;
    if (comm->finalize_called || atomic_load(&comm->reclaim_queued))
        return host_fail(ncclInvalidArgument, "%s: the communicator was %s before", name,
                         atomic_load(&comm->revoked) ? "revoked" : "finalized");
    if (atomic_exchange(&comm->revoked, true))
        return host_fail(ncclInvalidArgument, "%s: the communicator was revoked before", name);
    return ncclSuccess;
}

ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags) {
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, name, comm);
    if (result != ncclSuccess || comm == NULL)
        return host_entry_end(&entry, result);
    result = check(comm, revokeFlags);
    if (result == ncclSuccess) {
        host_comm_hold(comm);
        host_group_start();
        result = host_comm_progress(comm, host_group_close(queue_revoke(comm)));
        host_comm_release(comm);
    }
    return host_entry_end(&entry, result);
}
