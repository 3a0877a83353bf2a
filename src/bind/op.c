/* Operations: from finished to released, and how those who wait are told. */
#define _GNU_SOURCE
#include "bind.h"
#include "uneven.h"
#include "futex.h"

#include <stdlib.h>
#include <sys/eventfd.h>

pn_wait_t pn_wait_closed;

/* Released operations, newest first. Pushed by any thread; taken whole by whoever holds the GIL. */
static _Atomic(pn_op_t *) done_head;
static _Atomic int64_t done_since;
static _Atomic uint32_t reaper_word;
static atomic_bool reaper_stopped;

void pn_op_start(pn_op_t *op) {
    pn_link_init(&op->in_track);
    pn_link_init(&op->in_comm);
    pn_link_init(&op->in_order);
    atomic_store_explicit(&op->waiters, NULL, memory_order_relaxed);
    atomic_fetch_add_explicit(&pn_counts.operations, 1, memory_order_relaxed);
}

void pn_op_finish(pn_op_t *op, pn_outcome_t outcome) {
    pn_op_finish_at(op, outcome, pn_now_ns());
}

void pn_op_finish_at(pn_op_t *op, pn_outcome_t outcome, int64_t now) {
    op->outcome = outcome;
    op->ended_ns = now;
    /* The outcome is published by this exchange, and it alone decides whether a new wait comes too late. */
    pn_wait_t *wait = atomic_exchange_explicit(&op->waiters, PN_CLOSED, memory_order_acq_rel);
    while (wait) {
        pn_wait_t *next = wait->next;
        pn_mailbox_t *box = wait->box;
        wait->next = atomic_load_explicit(&box->head, memory_order_relaxed);
        while (!atomic_compare_exchange_weak_explicit(&box->head, &wait->next, wait, memory_order_release,
                                                      memory_order_relaxed))
            ;
        if (!atomic_exchange(&box->signalled, 1))
            eventfd_write(box->fd, 1);
        wait = next;
    }
}

bool pn_op_wait(pn_op_t *op, pn_wait_t *wait) {
    pn_wait_t *head = atomic_load_explicit(&op->waiters, memory_order_acquire);
    do {
        if (head == PN_CLOSED)
            return false;
        wait->next = head;
    } while (!atomic_compare_exchange_weak_explicit(&op->waiters, &head, wait, memory_order_release,
                                                    memory_order_acquire));
    pn_device_t *device = op->comm->device;
    pthread_mutex_lock(&device->lock);
    if (!op->awaited && !pn_op_finished(op)) {
        op->awaited = true;
        if (op->track && !pn_link_empty(&op->in_track)) {
            op->track->awaited++;
            device->awaited++;
            device->awaited_since = pn_now_ns();
        }
    }
    pthread_mutex_unlock(&device->lock);
    pn_waiter_ring(true);
    return true;
}

void pn_op_give(pn_op_t *op) {
    /* Once pushed, the operation may be taken and freed at any moment: nothing reads it after the exchange.
     */
    pn_op_t *head = atomic_load_explicit(&done_head, memory_order_relaxed);
    do {
        if (!head)
            atomic_store_explicit(&done_since, op->ended_ns, memory_order_relaxed);
        op->next_done = head;
    } while (!atomic_compare_exchange_weak_explicit(&done_head, &head, op, memory_order_seq_cst,
                                                    memory_order_relaxed));
    /* The first of a list: the waiter, who sees to it that the list is drained, may be asleep for good. */
    if (!head)
        pn_waiter_ring(false);
}

void pn_op_release(pn_op_t *op) {
    pn_op_give(op);
    atomic_fetch_sub_explicit(&pn_counts.operations, 1, memory_order_relaxed);
}

/* Operations of failed communicators. Each is here before it can be on the list above. */
static _Atomic(pn_op_t *) parting;

void pn_op_part(pn_op_t *op) {
    op->next_parting = atomic_load_explicit(&parting, memory_order_relaxed);
    while (!atomic_compare_exchange_weak(&parting, &op->next_parting, op))
        ;
}

static bool parting_some(void) {
    return atomic_load_explicit(&parting, memory_order_relaxed) != NULL;
}

pn_op_t *pn_parting_take(void) {
    return atomic_exchange_explicit(&parting, NULL, memory_order_acquire);
}

bool pn_done_some(void) {
    return atomic_load_explicit(&done_head, memory_order_relaxed) != NULL || pn_asking_some() ||
           parting_some();
}

pn_op_t *pn_done_take(void) {
    pn_op_t *op = atomic_exchange_explicit(&done_head, NULL, memory_order_acquire);
    pn_op_t *oldest = NULL;
    while (op) {
        pn_op_t *next = op->next_done;
        op->next_done = oldest;
        oldest = op;
        op = next;
    }
    return oldest;
}

/* ---- fairness ------------------------------------------------------------------------------------- */

#define BURST_AWAITS 128
#define BURST_NS (500 * 1000)
/* What later bursts of the same turn may take: a part each of that; and after a while, one await at a time.
 */
#define LATER_SHARE 8
#define LATER_NS (2 * 1000 * 1000)
#define LEAST_SHARE (BURST_AWAITS / 2)
#define TURN_LOST_NS (100 * 1000 * 1000) /* its loop was closed, and will not tell */

static _Thread_local int burst_count;
static _Thread_local int64_t burst_start;
static _Thread_local int64_t burst_ended; /* when the turn's first one did; 0: none has */
static _Thread_local int suspended;       /* awaits of this thread's loop that wait for its mailbox */

pn_burst_t pn_burst_await(int64_t now) {
    if (now - burst_ended > TURN_LOST_NS)
        burst_ended = 0;
    int share = !burst_ended ? 1 : now - burst_ended < LATER_NS ? LATER_SHARE : LEAST_SHARE;
    if (burst_count++ == 0)
        burst_start = now;
    if (burst_count < BURST_AWAITS / share && now - burst_start < BURST_NS / share)
        return PN_BURST_GOES_ON;
    burst_count = 0;
    if (burst_ended)
        return PN_BURST_ENDS;
    burst_ended = now;
    return PN_BURST_ENDS_TURN;
}

void pn_burst_reset(void) {
    burst_count = 0;
}

void pn_burst_turn(void) {
    burst_ended = 0;
}

void pn_suspended(int change) {
    suspended += change;
}

bool pn_may_spin(void) {
    return suspended == 0;
}

/* ---- mailboxes ------------------------------------------------------------------------------------ */

pn_mailbox_t *pn_mailbox_new(void) {
    pn_mailbox_t *box = calloc(1, sizeof *box);
    if (!box)
        return NULL;
    box->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (box->fd < 0) {
        free(box);
        return NULL;
    }
    atomic_fetch_add(&pn_counts.mailboxes, 1);
    return box;
}

pn_wait_t *pn_mailbox_take(pn_mailbox_t *box) {
    eventfd_t ignored;
    (void)eventfd_read(box->fd, &ignored);
    /* The flag goes down before the list is taken: a push from now on either is in the list or writes anew.
     */
    atomic_store(&box->signalled, 0);
    pn_wait_t *wait = atomic_exchange_explicit(&box->head, NULL, memory_order_acquire);
    pn_wait_t *oldest = NULL;
    while (wait) {
        pn_wait_t *next = wait->next;
        wait->next = oldest;
        oldest = wait;
        wait = next;
    }
    return oldest;
}

void pn_mailbox_free(pn_mailbox_t *box) {
    close(box->fd);
    free(box);
    atomic_fetch_sub(&pn_counts.mailboxes, 1);
}

/* ---- the reaper: for finished operations that no issue, poll or loop has come to drain --------------- */

#define STALE_NS (10 * 1000 * 1000)

bool pn_done_nudge(int64_t now) {
    if (!pn_done_some())
        return false;
    if (now - atomic_load_explicit(&done_since, memory_order_relaxed) >= STALE_NS)
        pn_reaper_call();
    return true;
}

bool pn_reaper_wait(void) {
    for (;;) {
        uint32_t seen = atomic_load(&reaper_word);
        if (atomic_load(&reaper_stopped))
            return false;
        if (pn_asking_some() || parting_some() ||
            (pn_done_some() && pn_now_ns() - atomic_load(&done_since) >= STALE_NS))
            return true;
        pn_futex_wait(&reaper_word, seen, -1);
    }
}

void pn_reaper_call(void) {
    atomic_fetch_add(&reaper_word, 1);
    pn_futex_wake(&reaper_word);
}

void pn_reaper_stop(void) {
    atomic_store(&reaper_stopped, true);
    pn_reaper_call();
}

/* ---- polling on behalf of one operation --------------------------------------------------------------- */

bool pn_op_block(pn_op_t *op, int64_t until_ns) {
    int64_t start = pn_now_ns();
    if (pn_op_spin(op, 20 * 1000))
        return true;
    for (;;) {
        int64_t now = pn_now_ns(), nap = (now - start) / 16;
        if (now >= until_ns)
            return pn_op_poll(op);
        nap = nap < 5000 ? 5000 : nap > 1000000 ? 1000000 : nap;
        struct timespec pause = {0, nap < until_ns - now ? nap : until_ns - now};
        nanosleep(&pause, NULL);
        if (pn_op_poll(op))
            return true;
    }
}
