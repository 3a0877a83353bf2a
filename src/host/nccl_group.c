/* Groups. A group belongs to a thread: depth, sticky error, what each communicator has to do, jobs. */
#include "nccl_group.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    int depth;
    ncclResult_t error; /* the last one; nothing is launched then */
    int blocking;       /* UNDECIDED, or how the end is done */
    host_batch_t batch;
    host_job_t **last_job;
} group_t;
enum { UNDECIDED = -1 };
static _Thread_local group_t group = {.blocking = UNDECIDED};

int host_group_depth(void) {
    return group.depth;
}

void host_group_start(void) {
    if (group.depth++ == 0) {
        atomic_fetch_add_explicit(&host_live_groups_open, 1, memory_order_relaxed);
        if (host_misuse_watched())
            host_misuse_group();
    }
}

ncclResult_t host_group_poison(ncclResult_t result) {
    if (group.depth > 0 && result != ncclSuccess && result != ncclInProgress)
        group.error = result;
    return result;
}

/* ---- what a group holds -------------------------------------------------------------------------- */

/* A destroy or an abort waits for its end, whatever else is in the group. */
static ncclResult_t decide(const host_job_t *job) {
    int blocking = job->comm->config.blocking;
    if (job->ends || group.blocking == UNDECIDED) {
        group.blocking = job->ends ? 1 : blocking;
        return ncclSuccess;
    }
    if (group.blocking == blocking)
        return ncclSuccess;
    return host_fail(ncclInvalidArgument, "%s: blocking and non-blocking communicators in one group",
                     job->function);
}

ncclResult_t host_group_add_job(const host_job_t *wanted) {
    ncclResult_t result = decide(wanted);
    if (result != ncclSuccess)
        return result;
    host_job_t *job = malloc(sizeof *job);
    if (job == NULL)
        return host_fail(ncclSystemError, "out of memory");
    *job = *wanted;
    job->next = NULL;
    if (group.batch.jobs == NULL)
        group.last_job = &group.batch.jobs;
    *group.last_job = job;
    group.last_job = &job->next;
    host_comm_hold(job->comm);
    return ncclSuccess;
}

static host_plan_t *plan_of(ncclComm_t comm) {
    for (host_plan_t *plan = group.batch.plans; plan != NULL; plan = plan->next)
        if (plan->comm == comm)
            return plan;
    host_plan_t *plan = calloc(1, sizeof *plan);
    if (plan == NULL)
        return NULL;
    host_clique_t *clique = atomic_load(&comm->clique);
    plan->hash = clique != NULL ? clique->hash : 0;
    plan->comm = comm;
    plan->last_collective = &plan->collectives;
    plan->last_message = &plan->messages;
    host_comm_hold(comm);
    plan->next = group.batch.plans;
    group.batch.plans = plan;
    return plan;
}

static bool add_stream(host_plan_t *plan, CUstream stream) {
    for (int i = 0; i < plan->stream_count; i++)
        if (plan->streams[i] == stream)
            return true;
    CUstream *grown = realloc(plan->streams, (size_t)(plan->stream_count + 1) * sizeof(CUstream));
    if (grown == NULL)
        return false;
    plan->streams = grown;
    plan->streams[plan->stream_count++] = stream;
    return true;
}

ncclResult_t host_group_add_task(ncclComm_t comm, const host_task_t *task) {
    host_task_t *copy = malloc(sizeof *copy);
    host_plan_t *plan = plan_of(comm);
    if (copy == NULL || plan == NULL || !add_stream(plan, task->stream)) {
        free(copy);
        return host_fail(ncclSystemError, "out of memory");
    }
    *copy = *task;
    copy->next = NULL;
    host_task_t ***last = task->function < HOST_COLLECTIVES ? &plan->last_collective : &plan->last_message;
    **last = copy;
    *last = &copy->next;
    group.blocking = comm->config.blocking; /* the last one decides for all */
    return ncclSuccess;
}

ncclResult_t host_group_add_rma(ncclComm_t comm, host_rma_t *rma) {
    host_plan_t *plan = plan_of(comm);
    if (plan == NULL || !add_stream(plan, rma->stream)) {
        host_rma_free(rma);
        return host_fail(ncclSystemError, "out of memory");
    }
    host_rma_t **link = &plan->rma;
    while (*link != NULL && (*link)->context <= rma->context)
        link = &(*link)->next;
    rma->next = *link;
    *link = rma;
    group.blocking = comm->config.blocking;
    return ncclSuccess;
}

/* For the misuse detector: the thread is inside every communicator that has something to do. */
static void claim_plans(host_plan_t *plan, bool take) {
    for (; plan != NULL; plan = plan->next) {
        if (take)
            plan->claimed = host_misuse_claim(plan->comm, "ncclGroupEnd");
        else if (plan->claimed)
            host_misuse_unclaim(plan->comm);
    }
}

/* ---- the end ------------------------------------------------------------------------------------- */

/* What a simulated end reads and writes of the caller's struct: no more of it than its size says. */
static ncclResult_t check_simulation(const ncclSimInfo_t *info) {
    ncclSimInfo_t copy = {0};
    memcpy(&copy.size, info, sizeof copy.size);
    memcpy(&copy, info, copy.size < sizeof copy ? copy.size : sizeof copy);
    if (copy.magic == NCCL_SIM_INFO_MAGIC)
        return ncclSuccess;
    return host_fail(ncclInvalidArgument,
                     "ncclGroupSimulateEnd: the magic number is %#x; was the struct initialised?",
                     copy.magic);
}

static void write_estimate(ncclSimInfo_t *info, float microseconds) {
    if (info->size >= offsetof(ncclSimInfo_t, estimatedTime) + sizeof microseconds)
        info->estimatedTime = microseconds;
}

static ncclResult_t simulate(host_plan_t **plans, ncclSimInfo_t *info) {
    float microseconds = -1.0f;
    ncclResult_t result = host_launch_simulated(plans, &microseconds);
    if (result == ncclSuccess && microseconds >= 0.0f)
        write_estimate(info, microseconds);
    return result;
}

/* Whatever the work does to the thread's device is undone. */
static ncclResult_t run_here(host_batch_t *batch, ncclSimInfo_t *info) {
    int before = -1, now = -1;
    if (host_current_device(&before, false) != CUDA_SUCCESS)
        before = -1;
    ncclResult_t result = host_jobs_run(batch->jobs);
    if (result == ncclSuccess)
        result = info != NULL ? simulate(&batch->plans, info) : host_launch_group(&batch->plans);
    if (host_current_device(&now, false) != CUDA_SUCCESS)
        now = -1;
    if (now != before)
        host_set_current_device(before);
    return result;
}

static ncclResult_t end_group(ncclSimInfo_t *info) {
    if (group.depth == 0)
        return host_fail(ncclInvalidUsage, "ncclGroupEnd: not in a group call");
    if (--group.depth > 0)
        return ncclSuccess;
    atomic_fetch_sub_explicit(&host_live_groups_open, 1, memory_order_relaxed);
    group_t ended = group;
    group = (group_t){.blocking = UNDECIDED};
    ncclResult_t result = ended.error;
    if (result == ncclSuccess && info != NULL)
        result = check_simulation(info);
    if (result == ncclSuccess && ended.batch.jobs == NULL && ended.batch.plans == NULL)
        return ncclSuccess;
    /* In the background a simulated end is a real one, as with NCCL. */
    if (result == ncclSuccess && ended.blocking == 0)
        return host_batch_run_behind(&ended.batch);
    if (host_misuse_watched())
        claim_plans(ended.batch.plans, true);
    if (result == ncclSuccess)
        result = run_here(&ended.batch, info);
    claim_plans(ended.batch.plans, false);
    host_batch_drop(&ended.batch, result);
    return result;
}

ncclResult_t host_group_end(void) {
    return end_group(NULL);
}

ncclResult_t host_group_close(ncclResult_t result) {
    host_group_poison(result);
    ncclResult_t end = host_group_end();
    return result != ncclSuccess ? result : end;
}

ncclResult_t ncclGroupStart(void) {
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, "ncclGroupStart", NULL);
    if (result == ncclSuccess)
        host_group_start();
    return host_entry_end(&entry, result);
}

ncclResult_t ncclGroupEnd(void) {
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, "ncclGroupEnd", NULL);
    if (result == ncclSuccess)
        result = host_group_end();
    return host_entry_end(&entry, result);
}

ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *simInfo) {
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, "ncclGroupSimulateEnd", NULL);
    if (result == ncclSuccess)
        result = end_group(simInfo);
    return host_entry_end(&entry, result);
}
