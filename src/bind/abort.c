/* Abort: the one way out of a call or a kernel that waits for a peer who will not come.
 *
 * In one native group, on a thread of its own: raise the abort flags of all the communicators (one after
 * another alone they can wait for each other), wait until no thread of ours is inside a call on them, then
 * close the group, which reclaims them. If a thread does not come out within the bound, or the group's end
 * does not return, the handles are abandoned: never freed under a running call, and counted.
 */
#define _GNU_SOURCE
#include "bind.h"

#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

typedef struct {
    int count;
    pn_op_t *op;
    int64_t bound_ns;
    pn_comm_t *comms[];
} job_t;

/* Raise the flags of those whose handle is published; true when nobody is inside any more. */
static bool raise_flags(job_t *job, bool *raised) {
    bool out = true;
    for (int i = 0; i < job->count; i++) {
        pn_comm_t *comm = job->comms[i];
        pthread_mutex_lock(&comm->handle_lock);
        if (comm->handle && !raised[i]) {
            comm->device->engine->nccl.ncclCommAbort(comm->handle);
            raised[i] = true;
        }
        pthread_mutex_unlock(&comm->handle_lock);
        pthread_mutex_lock(&comm->device->lock);
        /* A lane that is still at work on a task may refer to the task's operation. */
        out = out && comm->inside == 0 && !comm->lane_busy;
        pthread_mutex_unlock(&comm->device->lock);
    }
    return out;
}

static int stuck(const job_t *job) {
    int threads = 0;
    for (int i = 0; i < job->count; i++) {
        pthread_mutex_lock(&job->comms[i]->device->lock);
        threads += job->comms[i]->inside > 0 || job->comms[i]->lane_busy;
        pthread_mutex_unlock(&job->comms[i]->device->lock);
    }
    return threads;
}

/* The abort is itself a pending operation of the first communicator, so that it has a deadline. */
static void finish(job_t *job, pn_outcome_t outcome) {
    pn_op_t *op = job->op;
    if (!op)
        return;
    pthread_mutex_lock(&op->comm->device->lock);
    /* A deadline that is striking just now has taken it out of the list before it fixes the outcome. */
    bool mine = pn_take_pending(op);
    pthread_mutex_unlock(&op->comm->device->lock);
    if (mine) {
        pn_op_finish(op, outcome);
        pn_op_release(op);
    }
    job->op = NULL;
}

static void enlist(pn_op_t *op) {
    pn_comm_t *comm = op->comm;
    pthread_mutex_lock(&comm->device->lock);
    op->seq = ++comm->seq;
    pn_link_append(&comm->pending, &op->in_comm);
    if (op->deadline_ns < comm->device->next_deadline)
        comm->device->next_deadline = op->deadline_ns;
    pthread_mutex_unlock(&comm->device->lock);
}

static void *helper(void *argument) {
    job_t *job = argument;
    pn_device_t *device = job->comms[0]->device;
    const pn_nccl_t *nccl = &device->engine->nccl;
    bool *raised = calloc((size_t)job->count, sizeof *raised);
    prctl(PR_SET_NAME, "pynccl-abort");
    device->engine->cuda.cuCtxSetCurrent(device->context);
    nccl->ncclGroupStart();
    int64_t until = pn_now_ns() + job->bound_ns;
    bool out;
    while (!(out = raise_flags(job, raised)) && pn_now_ns() < until)
        nanosleep(&(struct timespec){0, 200000}, NULL);
    if (!out) {
        /* The open group dies with this thread. */
        atomic_fetch_add(&pn_counts.abandoned_communicators, job->count);
        atomic_fetch_add(&pn_counts.stuck_threads, stuck(job));
        finish(job, (pn_outcome_t){PN_FROM_ABORT, 0, "ncclCommAbort"});
        goto leave;
    }
    /* Before the group's end reclaims them, so that nobody polls a handle that is going. */
    for (int i = 0; i < job->count; i++) {
        pthread_mutex_lock(&job->comms[i]->handle_lock);
        job->comms[i]->handle = NULL;
        pthread_mutex_unlock(&job->comms[i]->handle_lock);
    }
    nccl->ncclGroupEnd();
    /* Gone before the abort is told to have ended: who awaited it finds the communicator closed. */
    for (int i = 0; i < job->count; i++)
        pn_comm_gone(job->comms[i]);
    finish(job, (pn_outcome_t){PN_OK, 0, NULL});
leave:
    for (int i = 0; i < job->count; i++)
        pn_comm_release(job->comms[i]);
    free(raised);
    free(job);
    atomic_fetch_sub(&pn_counts.helpers, 1);
    return NULL;
}

void pn_abort(pn_comm_t *const *comms, int count, pn_op_t *op, int64_t bound_ns) {
    if (op)
        pn_op_start(op);
    job_t *job = calloc(1, sizeof *job + (size_t)count * sizeof *comms);
    pthread_t thread;
    if (job) {
        job->op = op;
        job->bound_ns = bound_ns;
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
        if (job->count && op)
            enlist(op);
        if (job->count && pthread_create(&thread, NULL, helper, job) == 0) {
            pthread_detach(thread);
            atomic_fetch_add(&pn_counts.helpers, 1);
            pn_waiter_ring(true);
            return;
        }
        for (int i = 0; i < job->count; i++)
            pn_comm_release(job->comms[i]);
    }
    if (op) {
        bool nothing = job && job->count == 0;
        pthread_mutex_lock(&op->comm->device->lock);
        pn_link_remove(&op->in_comm);
        pthread_mutex_unlock(&op->comm->device->lock);
        pn_op_finish(op, (pn_outcome_t){nothing ? PN_OK : PN_FROM_ABORT, 0, "pthread_create"});
        pn_op_release(op);
    }
    free(job);
}
