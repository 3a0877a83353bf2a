/* Suspend and resume: what a communicator could give back while nobody uses it; and what it takes. */
#include "nccl_group.h"

#include <stdlib.h>
#include <string.h>

/* NCCL_DISABLE_MEM_MANAGER, which it reads once. */
static bool disabled;
static pthread_once_t disabled_once = PTHREAD_ONCE_INIT;

static void read_disabled(void) {
    const char *text = getenv("NCCL_DISABLE_MEM_MANAGER");
    disabled = text != NULL && strtol(text, NULL, 0) != 0;
}

static ncclResult_t check_manager(const char *function) {
    pthread_once(&disabled_once, read_disabled);
    if (disabled)
        return host_fail(ncclInvalidUsage, "%s: NCCL_DISABLE_MEM_MANAGER is set", function);
    return ncclSuccess;
}

/* ---- suspend and resume -------------------------------------------------------------------------- */

static ncclResult_t change(host_job_t *job, bool suspend) {
    ncclComm_t comm = job->comm;
    if (comm->suspended == suspend)
        return host_fail(ncclInvalidUsage, "%s: the communicator is %s", job->function,
                         suspend ? "suspended already" : "not suspended");
    CUresult status = host_device_synchronize(comm->device);
    if (status != CUDA_SUCCESS)
        return host_fail(ncclUnhandledCudaError, "%s: device %d (CUDA error %d)", job->function, comm->device,
                         (int)status);
    ncclResult_t result = host_comm_barrier(comm);
    if (result == ncclSuccess)
        comm->suspended = suspend;
    return result;
}

static ncclResult_t run(host_job_t *job, bool suspend) {
    if (!host_comm_enter_call(job->comm))
        return host_fail(ncclInternalError, "%s: the communicator is aborted", job->function);
    ncclResult_t result = change(job, suspend);
    host_comm_leave_call(job->comm);
    return result;
}

static ncclResult_t run_suspend(host_job_t *job) {
    return run(job, true);
}

static ncclResult_t run_resume(host_job_t *job) {
    return run(job, false);
}

static ncclResult_t queue(const char *function, ncclComm_t comm, ncclResult_t (*body)(host_job_t *job)) {
    ncclResult_t result = check_manager(function);
    if (result == ncclSuccess && atomic_load(&comm->order->refs) > 1)
        result = host_fail(ncclInvalidUsage, "%s: the communicator shares its resources with another one",
                           function);
    host_job_t job = {.run = body, .comm = comm, .function = function};
    return result == ncclSuccess ? host_group_add_job(&job) : result;
}

static ncclResult_t perform(const char *function, ncclComm_t comm, bool nothing_to_do,
                            ncclResult_t (*body)(host_job_t *job)) {
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, function, comm);
    if (result == ncclSuccess)
        result = host_comm_pin(comm, function);
    if (result != ncclSuccess)
        return host_entry_end(&entry, result);
    result = host_comm_ready(comm, function);
    if (result == ncclSuccess && !nothing_to_do) {
        host_group_start();
        result = queue(function, comm, body);
        host_comm_unpin(comm);
        result = host_comm_progress(comm, host_group_close(result));
    } else {
        host_comm_unpin(comm);
    }
    return host_entry_end(&entry, result);
}

ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags) {
    return perform("ncclCommSuspend", comm, (flags & NCCL_SUSPEND_MEM) == 0, run_suspend);
}

ncclResult_t ncclCommResume(ncclComm_t comm) {
    return perform("ncclCommResume", comm, false, run_resume);
}

/* ---- statistics ---------------------------------------------------------------------------------- */

/* The rank's part of the shared memory. What only holds data under way could be given back. */
static ncclResult_t statistic(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t *value) {
    uint64_t total = host_segment_bytes(comm->ranks) / (uint64_t)comm->ranks;
    switch (stat) {
    case ncclStatGpuMemSuspend:
        *value = total - sizeof(host_area_t);
        return ncclSuccess;
    case ncclStatGpuMemSuspended:
        *value = comm->suspended;
        return ncclSuccess;
    case ncclStatGpuMemPersist:
        *value = sizeof(host_area_t);
        return ncclSuccess;
    case ncclStatGpuMemTotal:
        *value = total;
        return ncclSuccess;
    default:
        return host_fail(ncclInvalidArgument, "ncclCommMemStats: there is no statistic %d", (int)stat);
    }
}

ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t *value) {
    static const char name[] = "ncclCommMemStats";
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, name, comm);
    if (result == ncclSuccess)
        result = host_comm_pin(comm, name);
    if (result != ncclSuccess)
        return host_entry_end(&entry, result);
    result = host_comm_ready(comm, name);
    if (result == ncclSuccess && value == NULL)
        result = host_fail(ncclInvalidArgument, "%s: the pointer for the answer is NULL", name);
    if (result == ncclSuccess)
        result = check_manager(name);
    if (result == ncclSuccess)
        result = statistic(comm, stat, value);
    host_comm_unpin(comm);
    return host_entry_end(&entry, result);
}
