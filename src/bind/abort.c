/* Abort: the one way out of a call or a kernel that waits for a peer who will not come.
 *
 * In one native group, on a thread of its own: raise the abort flags of all the communicators (one after
 * another alone they can wait for each other), wait until no thread of ours is inside a call on them, then
 * close the group, which reclaims them. If a thread does not come out within the bound, or the abort itself
 * does not return, nobody waits any longer: the handles are abandoned, never freed under a running call, and
 * counted. The helper stays with them, so that what comes out later is reclaimed after all.
 */
#define _GNU_SOURCE
#include "bind.h"

#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#define NAP_NS 200000
#define NAP_OVERDUE_NS (20 * 1000 * 1000)
/* An abort that sits in a native call is given up by its deadline; the helper's own word comes first. */
#define GRACE_NS (50 * 1000 * 1000)

typedef struct job {
    struct job *next;
    int count;
    pn_comm_t *home; /* in whose pending list the abort's operation lies, and its number there; or NULL */
    uint64_t seq;
    int64_t until;
    pn_comm_t *comms[];
} job_t;

static pthread_mutex_t jobs_lock = PTHREAD_MUTEX_INITIALIZER;
static job_t *jobs;

static void note(job_t *job) {
    pthread_mutex_lock(&jobs_lock);
    job->next = jobs;
    jobs = job;
    pthread_mutex_unlock(&jobs_lock);
}

static void forget(job_t *job) {
    pthread_mutex_lock(&jobs_lock);
    job_t **at = &jobs;
    while (*at != job)
        at = &(*at)->next;
    *at = job->next;
    pthread_mutex_unlock(&jobs_lock);
}

void pn_abort_overdue(long *communicators, long *threads) {
    *communicators = *threads = 0;
    int64_t now = pn_now_ns();
    pthread_mutex_lock(&jobs_lock);
    for (job_t *job = jobs; job; job = job->next) {
        if (job->until > now)
            continue;
        *communicators += job->count;
        *threads += 1;
        for (int i = 0; i < job->count; i++) {
            pthread_mutex_lock(&job->comms[i]->device->lock);
            *threads += job->comms[i]->inside > 0 || job->comms[i]->lane_busy;
            pthread_mutex_unlock(&job->comms[i]->device->lock);
        }
    }
    pthread_mutex_unlock(&jobs_lock);
}

/* Raise the flags of those whose handle is published; true when nobody is inside any more. A result other
 * than success is kept in *result. */
static bool raise_flags(job_t *job, bool *raised, ncclResult_t *result) {
    bool out = true;
    for (int i = 0; i < job->count; i++) {
        pn_comm_t *comm = job->comms[i];
        /* Asked first: who comes out after this question may just have published a handle. */
        pthread_mutex_lock(&comm->device->lock);
        /* A lane that is still at work on a task may refer to the task's operation. */
        out = out && comm->inside == 0 && !comm->lane_busy;
        pthread_mutex_unlock(&comm->device->lock);
        pthread_mutex_lock(&comm->handle_lock);
        ncclComm_t handle = pn_handle(comm);
        if (handle && !raised[i]) {
            ncclResult_t one = comm->device->engine->nccl.ncclCommAbort(handle);
            *result = one != ncclSuccess ? one : *result;
            raised[i] = true;
        }
        pthread_mutex_unlock(&comm->handle_lock);
    }
    return out;
}

/* The abort is itself a pending operation, so that it has a deadline. Who takes it out of the list ends it;
 * one whose deadline has passed lies in limbo, and goes with the communicator. */
static pn_op_t *claim(const job_t *job) {
    pn_op_t *found = NULL;
    if (!job->home)
        return NULL;
    pthread_mutex_lock(&job->home->device->lock);
    for (pn_link_t *at = job->home->pending.next; at != &job->home->pending && !found; at = at->next)
        if (PN_OWNER(at, pn_op_t, in_comm)->seq == job->seq)
            found = PN_OWNER(at, pn_op_t, in_comm);
    if (found)
        pn_link_remove(&found->in_comm);
    pthread_mutex_unlock(&job->home->device->lock);
    return found;
}

static void finish(pn_op_t *op, pn_outcome_t outcome) {
    if (!op)
        return;
    pn_op_finish(op, outcome);
    pn_op_release(op);
}

static void enlist(job_t *job, pn_op_t *op) {
    pn_comm_t *comm = job->home = op->comm;
    pthread_mutex_lock(&comm->device->lock);
    comm->references++;
    job->seq = op->seq = PN_CONTROL | ++comm->controls;
    pn_link_append(&comm->pending, &op->in_comm);
    pn_deadline_set(comm->device, op->deadline_ns);
    pthread_mutex_unlock(&comm->device->lock);
}

static void end(job_t *job) {
    for (int i = 0; i < job->count; i++)
        pn_comm_release(job->comms[i]);
    if (job->home)
        pn_comm_release(job->home);
    free(job);
}

/* The library refused: nobody knows whether the device still works for them, so what it may use stays. */
static void give_up(job_t *job) {
    for (int i = 0; i < job->count; i++) {
        pn_comm_t *comm = job->comms[i];
        pthread_mutex_lock(&comm->device->lock);
        comm->queue_head = comm->queue_tail = NULL;
        comm->lane_stop = true;
        pthread_cond_broadcast(&comm->lane_wake);
        pthread_mutex_unlock(&comm->device->lock);
    }
    atomic_fetch_add(&pn_counts.abandoned, job->count);
    atomic_fetch_sub(&pn_counts.helpers, 1);
    forget(job);
    finish(claim(job), (pn_outcome_t){PN_FROM_ABORT, 0, "ncclCommAbort"});
    job->count = 0; /* their references are kept */
    end(job);
}

static void *helper(void *argument) {
    job_t *job = argument;
    pn_device_t *device = job->comms[0]->device;
    const pn_nccl_t *nccl = &device->engine->nccl;
    bool *raised = calloc((size_t)job->count, sizeof *raised);
    prctl(PR_SET_NAME, "pynccl-abort");
    device->engine->cuda.cuCtxSetCurrent(device->context);
    nccl->ncclGroupStart();
    ncclResult_t result = ncclSuccess;
    while (!raise_flags(job, raised, &result)) {
        bool overdue = pn_now_ns() >= job->until;
        if (overdue)
            finish(claim(job), (pn_outcome_t){PN_FROM_ABORT, 0, "ncclCommAbort"});
        nanosleep(&(struct timespec){0, overdue ? NAP_OVERDUE_NS : NAP_NS}, NULL);
    }
    /* Before the group's end reclaims them, so that nobody polls a handle that is going. */
    for (int i = 0; i < job->count; i++) {
        pthread_mutex_lock(&job->comms[i]->handle_lock);
        job->comms[i]->handle = NULL;
        pthread_mutex_unlock(&job->comms[i]->handle_lock);
    }
    ncclResult_t ended = nccl->ncclGroupEnd();
    if (result != ncclSuccess || ended != ncclSuccess) {
        give_up(job);
        free(raised);
        return NULL;
    }
    /* Gone before the abort is told to have ended: who awaited it finds the communicator closed. */
    pn_op_t *op = claim(job);
    for (int i = 0; i < job->count; i++)
        pn_comm_gone(job->comms[i]);
    forget(job);
    finish(op, (pn_outcome_t){PN_OK, 0, NULL});
    end(job);
    free(raised);
    atomic_fetch_sub(&pn_counts.helpers, 1);
    return NULL;
}

void pn_abort(pn_comm_t *const *comms, int count, pn_op_t *op, int64_t bound_ns) {
    if (op)
        pn_op_start(op);
    job_t *job = calloc(1, sizeof *job + (size_t)count * sizeof *comms);
    pthread_t thread;
    if (job) {
        job->until = pn_now_ns() + bound_ns;
        if (op && op->deadline_ns > job->until + GRACE_NS)
            op->deadline_ns = job->until + GRACE_NS;
        for (int i = 0; i < count; i++) {
            pn_comm_t *comm = comms[i];
            pthread_mutex_lock(&comm->device->lock);
            bool wanted = comm->state < PN_ABORTING;
            if (wanted)
                comm->references++;
            pthread_mutex_unlock(&comm->device->lock);
            if (wanted) {
                pn_comm_fail(comm, 0, (pn_outcome_t){PN_FROM_ABORT, 0, NULL}, PN_ABORTING, NULL);
                job->comms[job->count++] = comm;
            }
        }
        if (job->count) {
            if (op)
                enlist(job, op);
            note(job);
            atomic_fetch_add(&pn_counts.helpers, 1);
            if (pthread_create(&thread, NULL, helper, job) == 0) {
                pthread_detach(thread);
                pn_waiter_ring(true);
                return;
            }
            atomic_fetch_sub(&pn_counts.helpers, 1);
            forget(job);
            finish(claim(job), (pn_outcome_t){PN_FROM_ABORT, 0, "pthread_create"});
        } else {
            finish(op, (pn_outcome_t){PN_OK, 0, NULL});
        }
        end(job);
    } else {
        finish(op, (pn_outcome_t){PN_FROM_ABORT, 0, "calloc"});
    }
}
