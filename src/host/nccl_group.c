/* Groups. A group belongs to a thread: depth, sticky error, what each communicator has to do, jobs. */
#define _GNU_SOURCE
#include "nccl.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int depth;
    ncclResult_t error; /* the last one; nothing is launched then */
    host_plan_t *plans;
    host_job_t *jobs, **last_job;
} group_t;
static _Thread_local group_t group;

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

ncclResult_t host_group_add_job(const host_job_t *wanted) {
    host_job_t *job = malloc(sizeof *job);
    if (job == NULL)
        return host_fail(ncclSystemError, "out of memory");
    *job = *wanted;
    job->next = NULL;
    if (group.jobs == NULL)
        group.last_job = &group.jobs;
    *group.last_job = job;
    group.last_job = &job->next;
    host_comm_hold(job->comm);
    return ncclSuccess;
}

static host_plan_t *plan_of(ncclComm_t comm) {
    for (host_plan_t *plan = group.plans; plan != NULL; plan = plan->next)
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
    plan->next = group.plans;
    group.plans = plan;
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
    return ncclSuccess;
}

static void free_tasks(host_task_t *task) {
    while (task != NULL) {
        host_task_t *next = task->next;
        free(task);
        task = next;
    }
}

static void free_plans(host_plan_t *plan) {
    while (plan != NULL) {
        host_plan_t *next = plan->next;
        free_tasks(plan->collectives);
        free_tasks(plan->messages);
        host_rma_free(plan->rma);
        free(plan->streams);
        host_comm_release(plan->comm);
        free(plan);
        plan = next;
    }
}

static void free_jobs(host_job_t *job, ncclResult_t result) {
    while (job != NULL) {
        host_job_t *next = job->next;
        if (!job->ran && job->undo != NULL) {
            job->result = result;
            job->undo(job);
        }
        host_comm_release(job->comm);
        free(job);
        job = next;
    }
}

/* ---- jobs ---------------------------------------------------------------------------------------- */

/* The jobs of one group while they run, a thread each. */
typedef struct host_crew {
    host_bell_t bell;
    _Atomic int running;
    _Atomic int error; /* the first one */
} host_crew_t;

static void *run_job(void *argument) {
    host_job_t *job = argument;
    host_crew_t *crew = job->crew;
    job->ran = true;
    job->result = job->run(job);
    int none = ncclSuccess;
    if (job->result != ncclSuccess)
        atomic_compare_exchange_strong(&crew->error, &none, (int)job->result);
    atomic_fetch_sub(&host_live_threads, 1);
    atomic_fetch_sub(&crew->running, 1);
    host_bell_ring(&crew->bell);
    return NULL;
}

/* A signal is for the program's own threads. */
static int start_thread(host_job_t *job) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    atomic_fetch_add(&host_live_threads, 1);
    atomic_fetch_add(&job->crew->running, 1);
    int error = pthread_create(&job->thread, NULL, run_job, job);
    if (error != 0) {
        atomic_fetch_sub(&host_live_threads, 1);
        atomic_fetch_sub(&job->crew->running, 1);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

static void stop_all(host_job_t *jobs) {
    for (host_job_t *job = jobs; job != NULL; job = job->next)
        host_comm_stop(job->comm);
}

static ncclResult_t run_crew(host_job_t *jobs) {
    host_crew_t crew = {.error = ncclSuccess};
    host_job_t *unstarted = jobs;
    for (; unstarted != NULL; unstarted = unstarted->next) {
        unstarted->crew = &crew;
        if (start_thread(unstarted) != 0) {
            host_last_error("a thread for a job of a group cannot be made");
            atomic_store(&crew.error, ncclSystemError);
            break;
        }
    }
    bool stopped = false;
    while (atomic_load(&crew.running) != 0) {
        uint32_t seen = host_bell_look(&crew.bell);
        if (!stopped && atomic_load(&crew.error) != ncclSuccess) {
            stopped = true; /* one that failed will not be waited for by the others */
            stop_all(jobs);
        }
        if (atomic_load(&crew.running) != 0)
            host_bell_wait(&crew.bell, seen, -1);
    }
    for (host_job_t *job = jobs; job != unstarted; job = job->next)
        pthread_join(job->thread, NULL);
    return (ncclResult_t)atomic_load(&crew.error);
}

static ncclResult_t run_jobs(host_job_t *jobs) {
    if (jobs == NULL)
        return ncclSuccess;
    if (jobs->next == NULL) {
        jobs->ran = true;
        return jobs->run(jobs);
    }
    return run_crew(jobs);
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

static ncclResult_t end_group(ncclSimInfo_t *info) {
    if (group.depth == 0)
        return host_fail(ncclInvalidUsage, "ncclGroupEnd: not in a group call");
    if (--group.depth > 0)
        return ncclSuccess;
    atomic_fetch_sub_explicit(&host_live_groups_open, 1, memory_order_relaxed);
    group_t ended = group;
    group = (group_t){0};
    ncclResult_t result = ended.error;
    if (result == ncclSuccess && info != NULL)
        result = check_simulation(info);
    if (host_misuse_watched())
        claim_plans(ended.plans, true);
    if (result == ncclSuccess && (ended.jobs != NULL || ended.plans != NULL)) {
        int device = -1; /* whatever the work does to the thread's device is undone */
        if (host_current_device(&device, false) != CUDA_SUCCESS)
            device = -1;
        result = run_jobs(ended.jobs);
        if (result == ncclSuccess)
            result = info != NULL ? simulate(&ended.plans, info) : host_launch_group(&ended.plans);
        int now = -1;
        if (host_current_device(&now, false) != CUDA_SUCCESS)
            now = -1;
        if (now != device)
            host_set_current_device(device);
    }
    claim_plans(ended.plans, false);
    free_jobs(ended.jobs, result);
    free_plans(ended.plans);
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
