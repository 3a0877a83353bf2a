/* What the end of a group does: its jobs, a thread each; then its launches; all of it on the caller's thread,
 * or for non-blocking communicators on one in the background. */
#define _GNU_SOURCE
#include "nccl_group.h"

#include <signal.h>
#include <stdlib.h>

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

ncclResult_t host_jobs_run(host_job_t *jobs) {
    if (jobs == NULL)
        return ncclSuccess;
    if (jobs->next == NULL) {
        jobs->ran = true;
        return jobs->run(jobs);
    }
    return run_crew(jobs);
}

/* ---- a group that has ended ---------------------------------------------------------------------- */

static void free_tasks(host_task_t *task) {
    while (task != NULL) {
        host_task_t *next = task->next;
        free(task);
        task = next;
    }
}

/* `entered`: the communicator was put into the background. */
static void let_go(ncclComm_t comm, ncclResult_t result, bool entered) {
    host_comm_spoil(comm, result);
    if (entered) {
        atomic_fetch_sub(&comm->background, 1);
        host_bell_ring(&comm->quiet);
    }
    host_comm_release(comm);
}

static void drop(host_batch_t *batch, ncclResult_t result, bool entered) {
    host_job_t *job = batch->jobs;
    while (job != NULL) {
        host_job_t *next = job->next;
        if (!job->ran && job->undo != NULL) {
            job->result = result;
            job->undo(job);
        }
        let_go(job->comm, job->ends ? ncclSuccess : result, entered);
        free(job);
        job = next;
    }
    host_plan_t *plan = batch->plans;
    while (plan != NULL) {
        host_plan_t *next = plan->next;
        free_tasks(plan->collectives);
        free_tasks(plan->messages);
        host_rma_free(plan->rma);
        free(plan->streams);
        let_go(plan->comm, result, entered);
        free(plan);
        plan = next;
    }
}

void host_batch_drop(host_batch_t *batch, ncclResult_t result) {
    drop(batch, result, false);
}

/* ---- in the background --------------------------------------------------------------------------- */

static _Thread_local const host_batch_t *behind;

bool host_background(void) {
    return behind != NULL;
}

bool host_background_stopped(void) {
    for (const host_plan_t *plan = behind != NULL ? behind->plans : NULL; plan != NULL; plan = plan->next)
        if (host_comm_stopped(plan->comm))
            return true;
    return false;
}

/* A blocking communicator that got into a non-blocking group is in progress for good, as with NCCL: nothing
 * ever says otherwise of one. */
static void enter(const host_batch_t *batch) {
    for (const host_job_t *job = batch->jobs; job != NULL; job = job->next)
        atomic_fetch_add(&job->comm->background, 1);
    for (const host_plan_t *plan = batch->plans; plan != NULL; plan = plan->next) {
        atomic_fetch_add(&plan->comm->background, 1);
        if (plan->comm->config.blocking != 0)
            host_comm_set_state(plan->comm, ncclInProgress);
    }
}

/* On a GPU the thread needs its time until something is launched, and what the caller puts on the stream
 * meanwhile comes first. */
static ncclResult_t begin(const host_batch_t *batch) {
    ncclComm_t comm = batch->jobs != NULL ? batch->jobs->comm : batch->plans->comm;
    if (host_config()->temper == HOST_GPULIKE)
        host_nap_ns(host_config()->read_delay_ns);
    return host_comm_fault(comm, "background", "ncclGroupEnd");
}

static void *run_behind(void *argument) {
    host_batch_t *batch = argument;
    behind = batch;
    ncclResult_t result = begin(batch);
    if (result == ncclSuccess)
        result = host_jobs_run(batch->jobs);
    if (result == ncclSuccess)
        result = host_launch_group(&batch->plans);
    drop(batch, result, true);
    free(batch);
    host_thread_end();
    return NULL;
}

ncclResult_t host_batch_run_behind(const host_batch_t *batch) {
    host_batch_t *moved = malloc(sizeof *moved);
    ncclResult_t result = ncclInProgress;
    if (moved != NULL) {
        *moved = *batch;
        enter(moved);
        if (host_thread_start(run_behind, moved, "pynccl-group") == CUDA_SUCCESS)
            return result;
        result = host_fail(ncclSystemError, "a thread for a non-blocking group cannot be made");
        drop(moved, result, true);
        free(moved);
        return result;
    }
    host_batch_t lost = *batch;
    result = host_fail(ncclSystemError, "out of memory");
    drop(&lost, result, false);
    return result;
}
