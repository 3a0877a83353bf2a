/* Tracks: what is pending on a stream, oldest first, and how it is found to have ended. Anybody may poll: the
 * waiter, an await, an issue. Who finds an event complete completes all that came before it.
 */
#include "bind.h"

#include <sched.h>

#define POLLS_BEFORE_CLOCK 4
#define POLLS_BEFORE_YIELD 16
/* What so few polls never take: somebody else had the core meanwhile. */
#define OTHERS_RAN_NS 2000
/* How many times its budget an await may last where it shares its core. */
#define SHARED_CORE 10

void pn_track_append(pn_track_t *track, pn_op_t *op) {
    pn_device_t *device = track->device;
    op->track = track;
    pn_link_append(&track->ops, &op->in_track);
    if (track->count++ == 0)
        pn_link_append(&device->tracks, &track->active);
    if (op->awaited) {
        track->awaited++;
        device->awaited++;
        device->awaited_since = pn_now_ns();
    }
    /* A wait for an event puts nothing into the device's launch queue. */
    device->in_flight += op->kind != PN_EVENT;
    op->reached = ++device->issued_total;
}

void pn_track_leave(pn_op_t *op, int64_t now) {
    pn_track_t *track = op->track;
    pn_device_t *device = track->device;
    pn_link_remove(&op->in_track);
    if (--track->count == 0)
        pn_link_remove(&track->active);
    if (op->awaited) {
        track->awaited--;
        device->awaited--;
        device->awaited_since = now; /* progress: the next one may come soon */
    }
    device->in_flight -= op->kind != PN_EVENT;
}

void pn_op_put_back(pn_op_t *op) {
    pn_device_t *device = op->comm->device;
    if (op->event && !op->foreign_event)
        pn_event_put(device, op->event);
    if (op->from)
        pn_event_put(device, op->from);
    op->event = op->from = NULL;
    pn_gates_put(op);
}

void pn_op_recycle(pn_op_t *op) {
    pn_device_t *device = op->comm->device;
    pthread_mutex_lock(&device->lock);
    pn_op_put_back(op);
    pthread_mutex_unlock(&device->lock);
}

/* An operation that carries an event, as somebody saw it with the lock held: it may have ended meanwhile, and
 * its address may even serve another one. */
typedef struct {
    pn_op_t *op;
    uint64_t seq;
    CUevent event;
} mark_t;
typedef struct {
    mark_t first, last; /* from the head of a track, and the newest */
} ends_t;

static mark_t mark_of(pn_op_t *op) {
    return (mark_t){op, op->seq, op->event};
}

/* False if nothing in the track carries an event; device->lock held. */
static bool ends_of(pn_track_t *track, ends_t *ends) {
    pn_link_t *first = track->ops.next, *last = track->ops.prev;
    while (first != &track->ops && !PN_OWNER(first, pn_op_t, in_track)->event)
        first = first->next;
    if (first == &track->ops)
        return false;
    while (!PN_OWNER(last, pn_op_t, in_track)->event)
        last = last->prev;
    ends->first = mark_of(PN_OWNER(first, pn_op_t, in_track));
    ends->last = mark_of(PN_OWNER(last, pn_op_t, in_track));
    return true;
}

/* Complete everything in the track up to and including `mark`, whose event has ended; what is left then. */
static bool complete(pn_track_t *track, mark_t mark, ends_t *left) {
    pn_device_t *device = track->device;
    pn_op_t *oldest = NULL, **tail = &oldest;
    int64_t now = pn_now_ns();
    pthread_mutex_lock(&device->lock);
    bool there = false;
    for (pn_link_t *link = track->ops.next; link != &track->ops && !there; link = link->next)
        there = PN_OWNER(link, pn_op_t, in_track) == mark.op && mark.op->seq == mark.seq;
    for (pn_op_t *op = NULL; there && op != mark.op; tail = &op->next_done) {
        op = PN_OWNER(track->ops.next, pn_op_t, in_track);
        pn_track_leave(op, now);
        pn_link_remove(&op->in_comm);
        pn_op_put_back(op);
        *tail = op;
        op->next_done = NULL;
    }
    bool more = ends_of(track, left);
    pthread_mutex_unlock(&device->lock);
    while (oldest) {
        pn_op_t *op = oldest;
        oldest = op->next_done;
        pn_op_finish_at(op, (pn_outcome_t){PN_OK, 0, NULL}, now);
        pn_op_release(op);
    }
    return more;
}

/* A CUDA error is the context's: it never heals, and everything pending on the communicator is lost. */
static void broken(pn_track_t *track, pn_op_t *op, uint64_t seq, CUresult rc) {
    pn_device_t *device = track->device;
    pn_comm_t *comm = NULL;
    bool alone = false;
    pthread_mutex_lock(&device->lock);
    for (pn_link_t *link = track->ops.next; link != &track->ops && !comm; link = link->next)
        if (PN_OWNER(link, pn_op_t, in_track) == op && op->seq == seq)
            comm = op->comm;
    if (comm) {
        alone = op->kind == PN_EVENT;
        comm->references++; /* with its last operation, its owner may let it go */
    }
    pthread_mutex_unlock(&device->lock);
    if (!comm)
        return;
    pn_outcome_t why = {PN_FROM_CUDA, (int)rc, "cuEventQuery"};
    if (alone)
        pn_end_alone(comm, seq, why);
    else
        pn_comm_fail(comm, seq, why, PN_FAILED, NULL);
    pn_comm_release(comm);
}

/* Entered; no lock held. */
static void poll(pn_track_t *track, ends_t ends) {
    const pn_cuda_t *cuda = &track->device->engine->cuda;
    bool more = true;
    while (more) {
        CUresult rc = cuda->cuEventQuery(ends.first.event);
        if (rc == CUDA_ERROR_NOT_READY)
            return;
        if (rc != CUDA_SUCCESS) {
            broken(track, ends.first.op, ends.first.seq, rc);
            return;
        }
        /* The oldest is done; if the newest is too, so is all between, at the price of one more query. */
        bool all = ends.last.op == ends.first.op || cuda->cuEventQuery(ends.last.event) == CUDA_SUCCESS;
        more = complete(track, all ? ends.last : ends.first, &ends);
    }
}

static void enter_and_poll(pn_track_t *track, ends_t ends) {
    pn_enter_t saved;
    if (pn_enter(track->device, &saved) != CUDA_SUCCESS) {
        broken(track, ends.first.op, ends.first.seq, CUDA_ERROR_INVALID_CONTEXT);
        return;
    }
    poll(track, ends);
    pn_leave(track->device, &saved);
}

void pn_track_poll(pn_track_t *track) {
    ends_t ends;
    pthread_mutex_lock(&track->device->lock);
    bool some = ends_of(track, &ends);
    pthread_mutex_unlock(&track->device->lock);
    if (some)
        enter_and_poll(track, ends);
}

/* The track in which an operation is pending on the device, if it is, and that track's ends. */
static pn_track_t *track_of(pn_op_t *op, ends_t *ends) {
    pn_device_t *device = op->comm->device;
    pthread_mutex_lock(&device->lock);
    pn_track_t *track = pn_link_empty(&op->in_track) ? NULL : op->track;
    if (track && !ends_of(track, ends))
        track = NULL;
    pthread_mutex_unlock(&device->lock);
    return track;
}

bool pn_op_poll(pn_op_t *op) {
    ends_t ends;
    pn_track_t *track = pn_op_finished(op) ? NULL : track_of(op, &ends);
    if (track)
        enter_and_poll(track, ends);
    return pn_op_finished(op);
}

bool pn_op_spin(pn_op_t *op, int64_t budget_ns) {
    pn_enter_t saved;
    ends_t ends;
    int64_t now = pn_now_ns(), end = now + budget_ns, latest = now + SHARED_CORE * budget_ns;
    if (pn_enter(op->comm->device, &saved) != CUDA_SUCCESS)
        return pn_op_poll(op);
    int polls = 0;
    do {
        pn_track_t *track = track_of(op, &ends);
        if (track)
            poll(track, ends);
        if (pn_op_finished(op))
            break;
        if (++polls % POLLS_BEFORE_CLOCK)
            continue;
        /* The peers may share our core, and the library may know that they do and give way to them. */
        if (polls % POLLS_BEFORE_YIELD == 0)
            sched_yield();
        int64_t before = now;
        now = pn_now_ns();
        /* While others use the core, the budget lasts. */
        if (now - before > OTHERS_RAN_NS)
            end += now - before;
    } while (now < end && now < latest);
    pn_leave(op->comm->device, &saved);
    return pn_op_poll(op);
}
