/* Deadlines, on a thread that makes no native call: the waiter may be held up inside the driver, by another
 * thread that has its lock, for longer than a deadline may be late.
 *
 * A device's next_deadline is never later than the earliest deadline of its pending operations. It may be
 * earlier, when what it stood for has ended: then the thread wakes up once for nothing, and looks anew.
 */
#define _GNU_SOURCE
#include "bind.h"
#include "futex.h"

#include <sys/prctl.h>

static _Atomic uint32_t bell;
static _Atomic int64_t asleep_until = PN_NO_DEADLINE;
static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool started;

/* The first operation that is late, and the earliest deadline of the others. */
static pn_comm_t *find_late(pn_device_t *device, int64_t now, uint64_t *seq, bool *alone) {
    pn_comm_t *comm = NULL;
    int64_t next = PN_NO_DEADLINE;
    pthread_mutex_lock(&device->lock);
    if (device->next_deadline <= now) {
        for (pn_link_t *link = device->comms.next; link != &device->comms; link = link->next) {
            pn_comm_t *one = PN_OWNER(link, pn_comm_t, in_device);
            for (pn_link_t *at = one->pending.next; at != &one->pending; at = at->next) {
                const pn_op_t *op = PN_OWNER(at, pn_op_t, in_comm);
                if (op->deadline_ns <= now && !comm) {
                    comm = one;
                    *seq = op->seq;
                    *alone = op->kind == PN_EVENT;
                } else if (op->deadline_ns < next) {
                    next = op->deadline_ns;
                }
            }
        }
        device->next_deadline = next;
        if (comm)
            comm->references++; /* with its last operation, its owner may let it go */
    }
    pthread_mutex_unlock(&device->lock);
    return comm;
}

/* End what is late on a device; when to come back. */
static int64_t expire(pn_device_t *device, int64_t now) {
    uint64_t seq;
    bool alone;
    pn_comm_t *comm;
    while ((comm = find_late(device, now, &seq, &alone))) {
        pn_outcome_t why = {PN_FROM_DEADLINE, 0, NULL};
        if (alone)
            pn_end_alone(comm, seq, why);
        else
            pn_comm_fail(comm, seq, why, PN_FAILED, NULL);
        pn_comm_release(comm);
    }
    pthread_mutex_lock(&device->lock);
    int64_t next = device->next_deadline;
    pthread_mutex_unlock(&device->lock);
    return next;
}

static void *timer(void *nothing) {
    (void)nothing;
    prctl(PR_SET_NAME, "pynccl-timer");
    for (;;) {
        uint32_t seen = atomic_load(&bell);
        int64_t next = PN_NO_DEADLINE, now = pn_now_ns();
        for (pn_device_t *device = atomic_load(&pn_devices); device; device = device->next) {
            int64_t one = expire(device, now);
            if (one < next)
                next = one;
        }
        /* Until this is stored, everybody who has a deadline rings. */
        atomic_store(&asleep_until, next);
        int64_t nap = next == PN_NO_DEADLINE ? -1 : next - pn_now_ns();
        if (next == PN_NO_DEADLINE || nap > 0)
            pn_futex_wait(&bell, seen, nap);
        atomic_store(&asleep_until, PN_NO_DEADLINE);
    }
    return NULL;
}

void pn_deadline_set(pn_device_t *device, int64_t deadline_ns) {
    if (deadline_ns >= device->next_deadline)
        return;
    device->next_deadline = deadline_ns;
    if (!atomic_load_explicit(&started, memory_order_acquire)) {
        pthread_mutex_lock(&starting);
        pthread_t thread;
        if (!atomic_load(&started) && pthread_create(&thread, NULL, timer, NULL) == 0) {
            pthread_detach(thread);
            atomic_store(&started, true);
        }
        pthread_mutex_unlock(&starting);
    }
    if (deadline_ns < atomic_load(&asleep_until)) {
        atomic_fetch_add(&bell, 1);
        pn_futex_wake(&bell);
    }
}
