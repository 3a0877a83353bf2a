/* Issuing one operation: inline where nothing can make it wait, through the lane otherwise. */
#include "bind.h"
#include "memory.h"
#include "uneven.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

bool pn_launch_blocking;

/* ---- the pieces that a single operation and a group share ------------------------------------------------
 */

bool pn_enlist(pn_op_t *op) {
    pn_comm_t *comm = op->comm;
    if (comm->state != PN_READY)
        return false;
    op->seq = ++comm->seq;
    pn_link_append(&comm->pending, &op->in_comm);
    if (op->kind < PN_COLLECTIVES)
        pn_link_append(&comm->device->called, &op->in_order);
    pn_deadline_set(comm->device, op->deadline_ns);
    return true;
}

void pn_refuse(pn_op_t *op) {
    pthread_mutex_lock(&op->comm->device->lock);
    pn_gates_open(op);
    pthread_mutex_unlock(&op->comm->device->lock);
    pn_op_recycle(op);
    pn_op_finish(op, (pn_outcome_t){PN_FROM_CLOSED, 0, NULL});
    pn_op_release(op);
}

static CUresult mark(pn_op_t *op, CUstream stream) {
    pn_device_t *device = op->comm->device;
    CUresult rc = pn_event_take(device, &op->from);
    return rc == CUDA_SUCCESS ? device->engine->cuda.cuEventRecord(op->from, stream) : rc;
}

CUresult pn_hand_off(pn_op_t *op, CUstream producer) {
    pn_device_t *device = op->comm->device;
    pn_enter_t saved;
    CUresult rc = pn_enter(device, &saved);
    if (rc != CUDA_SUCCESS)
        return rc;
    rc = mark(op, producer);
    pn_leave(device, &saved);
    if (rc != CUDA_SUCCESS)
        pn_op_recycle(op);
    return rc;
}

CUresult pn_prepare_deferred(pn_op_t *op) {
    CUresult rc = mark(op, op->stream);
    return rc == CUDA_SUCCESS ? pn_gate_add(op, op->stream) : rc;
}

CUresult pn_choose_stream(pn_op_t *op, CUstream *stream, pn_track_t **track) {
    pn_comm_t *comm = op->comm;
    CUresult rc = CUDA_SUCCESS;
    *stream = comm->stream;
    *track = &comm->track;
    if (op->from)
        rc = comm->device->engine->cuda.cuStreamWaitEvent(comm->stream, op->from, 0);
    else if (op->has_stream) {
        *stream = op->stream;
        *track = pn_track_find(comm->device, op->stream, &rc);
    }
    return rc;
}

void pn_issued(pn_op_t *op, pn_track_t *track, CUevent event) {
    pn_comm_t *comm = op->comm;
    pn_device_t *device = comm->device;
    pthread_mutex_lock(&device->lock);
    op->event = event;
    op->in_lane = false;
    pn_link_remove(&op->in_order);
    /* Failed while we were in the call: it is in limbo, and its event is put back when the abort has ended.
     */
    if (comm->state == PN_READY || comm->state == PN_CLOSING) {
        pn_mark_contacted(op);
        pn_track_append(track, op);
    }
    comm->inside--;
    pthread_mutex_unlock(&device->lock);
}

/* Results after which the communicator itself is as it was. */
bool pn_harmless(pn_outcome_t why) {
    return why.source == PN_FROM_MISSING || why.source == PN_FROM_CLOSED ||
           (why.source == PN_FROM_NCCL && (why.code == ncclInvalidArgument || why.code == ncclInvalidUsage));
}

void pn_not_issued(pn_op_t *op, pn_outcome_t why, const char *detail) {
    pn_comm_t *comm = op->comm;
    pn_device_t *device = comm->device;
    if (!pn_harmless(why))
        pn_comm_fail(comm, op->seq, why, PN_FAILED, detail);
    pthread_mutex_lock(&device->lock);
    bool mine = pn_take_pending(op);
    if (mine) {
        op->detail = detail && *detail ? strdup(detail) : NULL;
        pn_link_remove(&op->in_order);
        pn_gates_open(op);
    }
    comm->inside--;
    pthread_mutex_unlock(&device->lock);
    if (mine) {
        pn_op_recycle(op);
        pn_op_finish(op, why);
        pn_op_release(op);
    }
}

void pn_back_pressure(pn_comm_t *comm) {
    pn_device_t *device = comm->device;
    for (int64_t nap = 5000;; nap = nap < 500000 ? 2 * nap : nap) {
        pthread_mutex_lock(&device->lock);
        bool room = device->in_flight < PN_IN_FLIGHT_LIMIT || comm->state > PN_CLOSING;
        pthread_mutex_unlock(&device->lock);
        if (room)
            return;
        pn_waiter_ring(true);
        nanosleep(&(struct timespec){0, nap}, NULL);
    }
}

/* Two communicators of one device that run at once, in another order on another rank, can wait for each other
 * for ever; the ordered ones wait for each other on the device, in the order of their calls. */
CUresult pn_before_call(pn_op_t *op, CUstream stream) {
    const pn_comm_t *comm = op->comm;
    const pn_cuda_t *cuda = &comm->device->engine->cuda;
    CUresult rc = CUDA_SUCCESS;
    if (comm->ordered && comm->device->chain)
        rc = cuda->cuStreamWaitEvent(stream, comm->device->chain, 0);
    if (rc == CUDA_SUCCESS && op->timed[0])
        rc = cuda->cuEventRecord(op->timed[0], stream);
    return rc;
}

CUresult pn_after_call(pn_op_t *op, CUstream stream) {
    pn_device_t *device = op->comm->device;
    const pn_cuda_t *cuda = &device->engine->cuda;
    CUresult rc = CUDA_SUCCESS;
    if (op->timed[1])
        rc = cuda->cuEventRecord(op->timed[1], stream);
    if (rc == CUDA_SUCCESS && op->comm->ordered && !device->chain)
        rc = pn_event_take(device, &device->chain);
    if (rc == CUDA_SUCCESS && op->comm->ordered)
        rc = cuda->cuEventRecord(device->chain, stream);
    return rc;
}

/* ---- one operation ---------------------------------------------------------------------------------------
 */

/* The native calls of one operation, with an idle event or NULL. `comm->inside` is counted already;
 * device->issue is held where the call cannot wait for peers. */
static void issue_now(pn_op_t *op, CUevent event) {
    pn_comm_t *comm = op->comm;
    pn_device_t *device = comm->device;
    const pn_cuda_t *cuda = &device->engine->cuda;
    pn_outcome_t why = {PN_FROM_CUDA, 0, "cuCtxSetCurrent"};
    char detail[PN_DETAIL_BYTES];
    pn_enter_t saved;
    CUstream stream;
    pn_track_t *track;
    *detail = '\0';
    if ((why.code = (int)pn_enter(device, &saved)) == CUDA_SUCCESS) {
        why.function = op->from ? "cuStreamWaitEvent" : "cuStreamGetId";
        if ((why.code = (int)pn_choose_stream(op, &stream, &track)) == CUDA_SUCCESS && !event) {
            why.function = "cuEventCreate";
            why.code = (int)pn_event_take(device, &event);
        }
        if (why.code == CUDA_SUCCESS && (op->timed[0] || comm->ordered)) {
            why.function = "cuEventRecord";
            why.code = (int)pn_before_call(op, stream);
        }
        if (why.code == CUDA_SUCCESS) {
            ncclResult_t rc = pn_call(op, stream, &why.function);
            if (rc == ncclSuccess && (op->timed[1] || comm->ordered))
                why.code = (int)pn_after_call(op, stream);
            if (rc == ncclSuccess && why.code == 0) {
                why.function = "cuStreamWriteValue32";
                if (!op->in_lane || (why.code = (int)pn_gates_release(op, stream)) == CUDA_SUCCESS) {
                    why.function = "cuEventRecord";
                    why.code = (int)cuda->cuEventRecord(event, stream);
                }
            } else if (rc != ncclSuccess) {
                why.source = PN_FROM_NCCL;
                why.code = (int)rc;
                snprintf(detail, sizeof detail, "%s", device->engine->nccl.ncclGetLastError(comm->handle));
                pn_repair_depth(comm);
            }
        }
        pn_leave(device, &saved);
    }
    if (why.code == 0) {
        pn_issued(op, track, event);
        return;
    }
    if (event) {
        pthread_mutex_lock(&device->lock);
        pn_event_put(device, event);
        pthread_mutex_unlock(&device->lock);
    }
    pn_not_issued(op, why, detail);
}

bool pn_its_turn(const pn_op_t *op) {
    const pn_link_t *called = &op->comm->device->called;
    for (const pn_link_t *link = called->next; link != called && link != &op->in_order; link = link->next)
        if (PN_OWNER(link, const pn_op_t, in_order)->comm->clique != op->comm->clique)
            return false;
    return true;
}

static void run_in_lane(pn_task_t *task, pn_comm_t *comm) {
    pn_op_t *op = (pn_op_t *)task;
    pn_device_t *device = comm->device;
    pn_back_pressure(comm);
    pthread_mutex_lock(&device->lock);
    bool go;
    for (int64_t nap = 10000;
         (go = comm->state == PN_READY || comm->state == PN_CLOSING) && (comm->inside || !pn_its_turn(op));
         nap = nap < 500000 ? 2 * nap : nap) {
        /* A call that was made before it is still inside, inline; or one of another communicator of the
         * device is still in its lane. */
        pthread_mutex_unlock(&device->lock);
        nanosleep(&(struct timespec){0, nap}, NULL);
        pthread_mutex_lock(&device->lock);
    }
    bool waits = go && (op->may_wait || pn_on_registered(op) || !pn_contacted(op) || pn_launch_blocking);
    if (go)
        comm->inside++;
    pthread_mutex_unlock(&device->lock);
    if (!go)
        return; /* failed with the rest; it is in limbo */
    if (op->uneven && op->uneven->asks && !pn_uneven_ask(op))
        return;
    if (!waits)
        pthread_mutex_lock(&device->issue);
    issue_now(op, NULL);
    if (!waits)
        pthread_mutex_unlock(&device->issue);
}

bool pn_submit(pn_op_t *op) {
    pn_comm_t *comm = op->comm;
    pn_device_t *device = comm->device;
    bool tried = !op->may_wait && !pn_launch_blocking && pthread_mutex_trylock(&device->issue) == 0;
    pn_op_start(op);
    op->task.run = run_in_lane;
    for (bool prepared = false;; prepared = true) {
        pthread_mutex_lock(&device->lock);
        bool open = comm->state == PN_READY;
        bool now = open && tried && !pn_on_registered(op) && !prepared && !comm->queue_head &&
                   !comm->lane_busy && comm->clique->members == 1 && device->in_flight < PN_IN_FLIGHT_LIMIT &&
                   pn_contacted(op) && pn_link_empty(&device->called);
        if (open && (now || prepared || !op->has_stream)) {
            CUevent event = NULL; /* an idle one, where there is one */
            pn_enlist(op);
            if (now) {
                comm->inside++;
                event = device->event_count ? device->events[--device->event_count] : NULL;
            } else {
                op->in_lane = true;
                pn_lane_push(comm, &op->task);
            }
            bool batch = now && comm->track.count >= PN_POLL_BATCH;
            pthread_mutex_unlock(&device->lock);
            if (now)
                issue_now(op, event);
            if (tried)
                pthread_mutex_unlock(&device->issue);
            /* For callers who never wait: what is done is let go of, a batch at a time. */
            if (batch)
                pn_track_poll(&comm->track);
            pn_waiter_ring(false);
            return true;
        }
        pthread_mutex_unlock(&device->lock);
        if (tried)
            pthread_mutex_unlock(&device->issue);
        tried = false;
        if (!open) {
            pn_refuse(op);
            return false;
        }
        /* Deferred, on the caller's stream: that stream is held back before the call returns. */
        pn_enter_t saved;
        CUresult rc = pn_enter(device, &saved);
        if (rc == CUDA_SUCCESS) {
            rc = pn_prepare_deferred(op);
            pn_leave(device, &saved);
        }
        if (rc != CUDA_SUCCESS) {
            pthread_mutex_lock(&device->lock);
            pn_gates_open(op);
            pthread_mutex_unlock(&device->lock);
            pn_op_recycle(op);
            pn_op_finish(op, (pn_outcome_t){PN_FROM_CUDA, (int)rc, "cuStreamWaitValue32"});
            pn_op_release(op);
            return true;
        }
    }
}

/* ---- stream order without a host wait ---------------------------------------------------------------------
 */

CUresult pn_op_order(pn_op_t *op, CUstream stream) {
    pn_comm_t *comm = op->comm;
    pn_device_t *device = comm->device;
    const pn_cuda_t *cuda = &device->engine->cuda;
    pn_enter_t saved;
    CUresult rc = pn_enter(device, &saved);
    if (rc != CUDA_SUCCESS)
        return rc;
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    rc = cuda->cuStreamIsCapturing(stream, &status);
    if (rc == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE)
        rc = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED; /* a wait for what is not captured would break it */
    if (rc != CUDA_SUCCESS) {
        pn_leave(device, &saved);
        return rc;
    }
    /* A fresh event on the operation's own stream: it covers the operation, and nobody recycles it under us.
     * A stream that is ordered behind a little more than it asked for is still in order. */
    for (;;) {
        pthread_mutex_lock(&device->lock);
        pn_track_t *track = pn_link_empty(&op->in_track) ? NULL : op->track;
        CUstream from = track ? track->stream : NULL;
        if (track && op->foreign_event) {
            CUevent own = op->event;
            pthread_mutex_unlock(&device->lock);
            rc = cuda->cuStreamWaitEvent(stream, own, 0);
            break;
        }
        bool queued = op->in_lane;
        pthread_mutex_unlock(&device->lock);
        if (track) {
            CUevent event;
            if ((rc = pn_event_take(device, &event)) != CUDA_SUCCESS)
                break;
            if ((rc = cuda->cuEventRecord(event, from)) == CUDA_SUCCESS)
                rc = cuda->cuStreamWaitEvent(stream, event, 0);
            /* The wait has taken the event's present state: a later record does not move it. */
            pthread_mutex_lock(&device->lock);
            pn_event_put(device, event);
            pthread_mutex_unlock(&device->lock);
            break;
        }
        if (!queued || pn_op_finished(op))
            break;
        rc = pn_gate_add(op, stream);
        if (rc != CUDA_ERROR_NOT_READY)
            break;
        rc = CUDA_SUCCESS; /* the lane is between the call and the record: the track comes at once */
        sched_yield();
    }
    pn_leave(device, &saved);
    return rc;
}
