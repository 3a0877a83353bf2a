/* The waiter: one thread that polls the oldest event of each stream and the async error of each communicator
 * with pending work. It sleeps for good when nothing is pending, and never sits in a driver call that nothing
 * could wake.
 *
 * Its pace. Somebody waits: a nap of elapsed/16 between polls, 5 us to 0.5 ms; then, so that a long wait
 * costs next to nothing, elapsed/128 up to 10 ms. A new wait, and each completion, begin at 5 us again. Work
 * is pending, but nobody waits yet: naps of 10 ms, enough for the release of buffers. Nothing is pending: a
 * few more such naps, so that a loop that issues and awaits in turn does not wake it each time, and then a
 * sleep without end.
 */
#define _GNU_SOURCE
#include "bind.h"
#include "futex.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#define NAP_MIN_NS 5000
#define NAP_FINE_NS (500 * 1000)
#define NAP_COARSE_NS (10 * 1000 * 1000)
#define NAPS_BEFORE_SLEEP 4
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

/* ---- failure --------------------------------------------------------------------------------------------
 */

static bool open_state(const pn_comm_t *comm) {
    return comm->state == PN_READY || comm->state == PN_CLOSING;
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
        pn_track_leave(op, pn_now_ns());
        pn_link_remove(&op->in_comm);
        pn_op_put_back(op);
    }
    pthread_mutex_unlock(&device->lock);
    if (op) {
        pn_op_finish(op, why);
        pn_op_release(op);
    }
}

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
            pn_track_leave(op, pn_now_ns());
        pn_link_remove(&op->in_comm);
        pn_link_remove(&op->in_order);
        pn_link_append(&failed, &op->in_comm);
        pn_gates_open(op); /* nobody else would let the caller's stream go on */
    }
    pthread_mutex_unlock(&device->lock);
    bool parting = !pn_link_empty(&failed);
    while (!pn_link_empty(&failed)) {
        pn_op_t *op = PN_OWNER(failed.next, pn_op_t, in_comm);
        /* Told first: while it is in neither list, nobody can release it under us. */
        pn_op_finish(op, op == culprit ? why : (pn_outcome_t){PN_FROM_COMM, 0, NULL});
        pn_op_part(op);
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
    if (parting)
        pn_reaper_call();
    return true;
}

static void poll_error(pn_comm_t *comm) {
    ncclResult_t state = ncclSuccess;
    char detail[PN_DETAIL_BYTES] = "";
    if (pthread_mutex_trylock(&comm->handle_lock) != 0)
        return;
    ncclComm_t handle = pn_handle(comm);
    if (handle) {
        const pn_nccl_t *nccl = &comm->device->engine->nccl;
        if (nccl->ncclCommGetAsyncError(handle, &state) != ncclSuccess)
            state = ncclInternalError;
        /* One buffer for the whole process: copied at once, and it may still be another's text. */
        if (state != ncclSuccess && state != ncclInProgress)
            snprintf(detail, sizeof detail, "%s", nccl->ncclGetLastError(handle));
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
        nap = elapsed / 128 > NAP_FINE_NS ? elapsed / 128 : NAP_FINE_NS;
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
