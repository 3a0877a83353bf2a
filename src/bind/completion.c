/* The waiter: one thread that polls the oldest event of each stream and the async error of each communicator
 * with pending work. It sleeps for good when nothing is pending, and never sits in a driver call that nothing
 * could wake.
 *
 * Its pace. Somebody waits: a nap of elapsed/16 between polls, 5 us to 0.5 ms; then, so that a long wait
 * costs next to nothing, elapsed/256 up to 5 ms. A new wait, and each completion, begin at 5 us again. Work
 * is pending, but nobody waits yet: naps of 5 ms, enough for the release of buffers. Nothing is pending: a
 * few more such naps, so that a loop that issues and awaits in turn does not wake it each time, and then a
 * sleep without end.
 */
#define _GNU_SOURCE
#include "bind.h"
#include "futex.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#define NAP_MIN_NS 5000
#define NAP_FINE_NS (500 * 1000)
#define NAP_COARSE_NS (5 * 1000 * 1000)
#define NAPS_BEFORE_SLEEP 4
#define POLLS_BEFORE_YIELD 4
#define ERROR_PERIOD_MIN_NS (1000 * 1000)
#define ERROR_PERIOD_MAX_NS (100 * 1000 * 1000)

enum { ASLEEP, NAPPING, AWAKE };
static _Atomic uint32_t bell;
static atomic_int pace = ASLEEP;
static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool started;

static void *waiter(void *nothing);

static void start(void) {
    pthread_mutex_lock(&starting);
    if (!atomic_load(&started)) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, waiter, NULL) == 0) {
            pthread_detach(thread);
            atomic_store(&started, true);
        }
    }
    pthread_mutex_unlock(&starting);
}

void pn_waiter_ring(bool now) {
    if (!atomic_load_explicit(&started, memory_order_acquire))
        start();
    int seen = atomic_load_explicit(&pace, memory_order_seq_cst);
    if (seen == ASLEEP || now) {
        atomic_fetch_add(&bell, 1);
        if (seen != AWAKE)
            pn_futex_wake(&bell);
    }
}

/* ---- polling a track ------------------------------------------------------------------------------------
 */

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

/* Take an operation out of its track; device->lock is held. */
static void detach(pn_op_t *op, int64_t now) {
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

static void recycle(pn_op_t *op) {
    pn_device_t *device = op->comm->device;
    if (op->event && !op->foreign_event)
        pn_event_put(device, op->event);
    if (op->from)
        pn_event_put(device, op->from);
    op->event = op->from = NULL;
    pn_gates_put(op);
}

static bool open_state(const pn_comm_t *comm) {
    return comm->state == PN_READY || comm->state == PN_CLOSING;
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
        detach(op, now);
        pn_link_remove(&op->in_comm);
        recycle(op);
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

static pn_op_t *pending_with(pn_comm_t *comm, uint64_t seq) {
    for (pn_link_t *link = comm->pending.next; link != &comm->pending; link = link->next)
        if (PN_OWNER(link, pn_op_t, in_comm)->seq == seq)
            return PN_OWNER(link, pn_op_t, in_comm);
    return NULL;
}

void pn_end_alone(pn_comm_t *watcher, uint64_t seq, pn_outcome_t why) {
    pn_device_t *device = watcher->device;
    pthread_mutex_lock(&device->lock);
    pn_op_t *op = pending_with(watcher, seq);
    if (op) {
        detach(op, pn_now_ns());
        pn_link_remove(&op->in_comm);
        recycle(op);
    }
    pthread_mutex_unlock(&device->lock);
    if (op) {
        pn_op_finish(op, why);
        pn_op_release(op);
    }
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
    int64_t end = pn_now_ns() + budget_ns;
    if (pn_enter(op->comm->device, &saved) != CUDA_SUCCESS)
        return pn_op_poll(op);
    do {
        for (int i = 0; i < POLLS_BEFORE_YIELD && !pn_op_finished(op); i++) {
            pn_track_t *track = track_of(op, &ends);
            if (track)
                poll(track, ends);
        }
        /* The peers may share our core. */
        if (!pn_op_finished(op))
            sched_yield();
    } while (!pn_op_finished(op) && pn_now_ns() < end);
    pn_leave(op->comm->device, &saved);
    return pn_op_poll(op);
}

/* ---- failure --------------------------------------------------------------------------------------------
 */

bool pn_take_pending(pn_op_t *op) {
    if (pending_with(op->comm, op->seq) != op)
        return false;
    pn_link_remove(&op->in_comm);
    return true;
}

bool pn_comm_fail(pn_comm_t *comm, uint64_t culprit_seq, pn_outcome_t why, pn_state_t state,
                  const char *detail) {
    pn_device_t *device = comm->device;
    pn_link_t failed;
    pn_link_init(&failed);
    pthread_mutex_lock(&device->lock);
    /* By number and not by address: it may have ended, and be gone, since somebody looked at it. */
    pn_op_t *culprit = culprit_seq ? pending_with(comm, culprit_seq) : NULL;
    if (culprit_seq && !culprit) {
        pthread_mutex_unlock(&device->lock);
        return false;
    }
    if (culprit)
        culprit->detail = detail && *detail ? strdup(detail) : NULL;
    if (comm->failure.source == PN_OK) {
        comm->failure = why;
        comm->culprit = culprit_seq;
        comm->culprit_kind = culprit ? culprit->kind : 0;
        comm->failed_ns = pn_now_ns();
        snprintf(comm->detail, sizeof comm->detail, "%s", detail ? detail : "");
    }
    if (comm->state < state)
        comm->state = state;
    for (pn_link_t *link = comm->pending.next; link != &comm->pending;) {
        pn_op_t *op = PN_OWNER(link, pn_op_t, in_comm);
        link = link->next;
        /* An abort is not undone by the calls that it has driven out. */
        if (op->kind == PN_ABORT && op != culprit)
            continue;
        if (!pn_link_empty(&op->in_track))
            detach(op, pn_now_ns());
        pn_link_remove(&op->in_comm);
        pn_link_remove(&op->in_order);
        pn_link_append(&failed, &op->in_comm);
        pn_gates_open(op); /* nobody else would let the caller's stream go on */
    }
    pthread_mutex_unlock(&device->lock);
    while (!pn_link_empty(&failed)) {
        pn_op_t *op = PN_OWNER(failed.next, pn_op_t, in_comm);
        /* Told first: while it is in neither list, nobody can release it under us. */
        pn_op_finish(op, op == culprit ? why : (pn_outcome_t){PN_FROM_COMM, 0, NULL});
        pthread_mutex_lock(&device->lock);
        pn_link_remove(&op->in_comm);
        bool gone = comm->state == PN_GONE;
        if (!gone)
            pn_link_append(&comm->limbo, &op->in_comm);
        pthread_mutex_unlock(&device->lock);
        if (gone) {
            pn_op_recycle(op);
            pn_op_release(op);
        }
    }
    return true;
}

void pn_op_recycle(pn_op_t *op) {
    pn_device_t *device = op->comm->device;
    pthread_mutex_lock(&device->lock);
    recycle(op);
    pthread_mutex_unlock(&device->lock);
}

static void poll_error(pn_comm_t *comm) {
    ncclResult_t state = ncclSuccess;
    char detail[PN_DETAIL_BYTES] = "";
    if (pthread_mutex_trylock(&comm->handle_lock) != 0)
        return;
    if (comm->handle) {
        const pn_nccl_t *nccl = &comm->device->engine->nccl;
        if (nccl->ncclCommGetAsyncError(comm->handle, &state) != ncclSuccess)
            state = ncclInternalError;
        /* One buffer for the whole process: copied at once, and it may still be another's text. */
        if (state != ncclSuccess && state != ncclInProgress)
            snprintf(detail, sizeof detail, "%s", nccl->ncclGetLastError(comm->handle));
    }
    pthread_mutex_unlock(&comm->handle_lock);
    if (state != ncclSuccess && state != ncclInProgress)
        pn_comm_fail(comm, 0, (pn_outcome_t){PN_FROM_NCCL, (int)state, "ncclCommGetAsyncError"}, PN_FAILED,
                     detail);
}

/* ---- the walk ---------------------------------------------------------------------------------------------
 */

typedef struct {
    bool pending;
    int64_t next; /* when the waiter must look again at the latest */
} look_t;

static void look_earlier(look_t *look, int64_t when) {
    if (when < look->next)
        look->next = when;
}

static int64_t nap_after(int64_t elapsed) {
    int64_t nap = elapsed / 16;
    if (nap < NAP_MIN_NS)
        return NAP_MIN_NS;
    if (nap > NAP_FINE_NS)
        nap = elapsed / 256 > NAP_FINE_NS ? elapsed / 256 : NAP_FINE_NS;
    return nap < NAP_COARSE_NS ? nap : NAP_COARSE_NS;
}

static void walk_device(pn_device_t *device, int64_t now, look_t *look) {
    pn_link_t *track_at, *comm_at;
    /* Tracks and communicators are freed by this thread alone, so what is copied here stays. */
    pn_track_t *tracks[64];
    int count = 0;
    pthread_mutex_lock(&device->lock);
    for (track_at = device->tracks.next; track_at != &device->tracks && count < 64; track_at = track_at->next)
        tracks[count++] = PN_OWNER(track_at, pn_track_t, active);
    /* The next walk begins with those that found no place in this one. */
    if (count == 64) {
        pn_link_t *first = device->tracks.next;
        pn_link_remove(first);
        pn_link_append(&device->tracks, first);
    }
    pthread_mutex_unlock(&device->lock);
    for (int i = 0; i < count; i++)
        pn_track_poll(tracks[i]);

    pn_comm_t *poll[64];
    count = 0;
    pthread_mutex_lock(&device->lock);
    for (comm_at = device->comms.next; comm_at != &device->comms; comm_at = comm_at->next) {
        pn_comm_t *comm = PN_OWNER(comm_at, pn_comm_t, in_device);
        if (pn_link_empty(&comm->pending)) {
            comm->error_period = 0;
            continue;
        }
        look->pending = true;
        if (!open_state(comm))
            continue;
        if (!comm->error_period) {
            comm->error_period = ERROR_PERIOD_MIN_NS;
            comm->next_error_poll = now + comm->error_period;
        } else if (now >= comm->next_error_poll && count < 64) {
            poll[count++] = comm;
            comm->error_period *= 2;
            if (comm->error_period > ERROR_PERIOD_MAX_NS)
                comm->error_period = ERROR_PERIOD_MAX_NS;
            comm->next_error_poll = now + comm->error_period;
        }
        look_earlier(look, comm->next_error_poll);
    }
    if (device->awaited)
        look_earlier(look, now + nap_after(now - device->awaited_since));
    pthread_mutex_unlock(&device->lock);
    for (int i = 0; i < count; i++)
        poll_error(poll[i]);
}

static bool anything(void) {
    atomic_thread_fence(memory_order_seq_cst); /* after our word that we sleep, and before we look */
    bool found = pn_done_some();
    for (pn_device_t *device = atomic_load(&pn_devices); device && !found; device = device->next) {
        pthread_mutex_lock(&device->lock);
        for (pn_link_t *at = device->comms.next; at != &device->comms && !found; at = at->next)
            found = !pn_link_empty(&PN_OWNER(at, pn_comm_t, in_device)->pending) ||
                    PN_OWNER(at, pn_comm_t, in_device)->references == 0;
        pthread_mutex_unlock(&device->lock);
    }
    return found;
}

/* Communicators whose last reference is gone: freed here, so that nobody else needs to wait for the walk. */
static void bury(pn_device_t *device) {
    for (;;) {
        pn_comm_t *dead = NULL;
        pthread_mutex_lock(&device->lock);
        for (pn_link_t *at = device->comms.next; at != &device->comms && !dead; at = at->next)
            if (PN_OWNER(at, pn_comm_t, in_device)->references == 0)
                dead = PN_OWNER(at, pn_comm_t, in_device);
        if (dead)
            pn_link_remove(&dead->in_device);
        pthread_mutex_unlock(&device->lock);
        if (!dead)
            return;
        pn_comm_free(dead);
    }
}

static void *waiter(void *nothing) {
    (void)nothing;
    prctl(PR_SET_NAME, "pynccl-waiter");
    prctl(PR_SET_TIMERSLACK, 1000);
    int quiet = 0;
    for (;;) {
        uint32_t seen = atomic_load(&bell);
        atomic_store(&pace, AWAKE);
        int64_t now = pn_now_ns();
        look_t look = {false, now + NAP_COARSE_NS};
        for (pn_device_t *device = atomic_load(&pn_devices); device; device = device->next) {
            walk_device(device, now, &look);
            bury(device);
        }
        if (pn_done_nudge(now))
            look.pending = true;
        quiet = look.pending ? 0 : quiet + 1;
        bool sleep = quiet > NAPS_BEFORE_SLEEP;
        atomic_store(&pace, sleep ? ASLEEP : NAPPING);
        /* A ring between the walk and here has changed the word, and the wait returns at once. */
        int64_t nap = look.next - pn_now_ns();
        /* An issuer that still saw us awake did not ring: what it left is seen here, or it sees ASLEEP. */
        if (sleep && !anything())
            pn_futex_wait(&bell, seen, -1);
        else if (nap > 0)
            pn_futex_wait(&bell, seen, nap);
    }
    return NULL;
}
