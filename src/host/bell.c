/* Waiting: a futex word that any thread, or any process that maps it, may ring. */
#define _GNU_SOURCE
#include "host.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SPIN_NS = 2000, YIELDS = 100, NS_PER_S = 1000000000 };

int64_t host_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * NS_PER_S + now.tv_nsec;
}

void host_nap_ns(int64_t ns) {
    if (ns <= 0)
        return;
    struct timespec left = {.tv_sec = ns / NS_PER_S, .tv_nsec = ns % NS_PER_S};
    while (clock_nanosleep(CLOCK_MONOTONIC, 0, &left, &left) == EINTR)
        ;
}

/* Not the private kind of futex: the word may lie in memory shared with another process. */
static void futex(_Atomic uint32_t *word, int operation, uint32_t value, const struct timespec *timeout) {
    syscall(SYS_futex, word, operation, value, timeout, NULL, 0);
}

void host_bell_ring(host_bell_t *bell) {
    atomic_fetch_add_explicit(&bell->rung, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&bell->sleepers, memory_order_seq_cst) != 0)
        futex(&bell->rung, FUTEX_WAKE, INT_MAX, NULL);
}

void host_bell_call(host_bell_t *bell) {
    if (atomic_load_explicit(&bell->sleepers, memory_order_seq_cst) != 0)
        host_bell_ring(bell);
}

static bool rang(host_bell_t *bell, uint32_t seen) {
    return atomic_load_explicit(&bell->rung, memory_order_acquire) != seen;
}

/* ---- patience ------------------------------------------------------------------------------------ */

static _Atomic int crowds;

void host_crowd(int change) {
    atomic_fetch_add(&crowds, change);
}

bool host_be_patient(unsigned int tries, bool near) {
    if (tries >= HOST_PATIENCE)
        return false;
    if (near || tries >= HOST_PATIENCE - YIELDS)
        sched_yield();
    else
        host_pause();
    return true;
}

/* A ring that comes soon costs no system call (pause), and one that comes from a thread which waits for this
 * very core is let through (yield): with more threads than cores pausing alone collapses. */
static bool rang_soon(host_bell_t *bell, uint32_t seen, int64_t start, int64_t limit) {
    int64_t spin_end = start + (limit < SPIN_NS ? limit : SPIN_NS);
    if (atomic_load_explicit(&crowds, memory_order_relaxed) != 0)
        spin_end = start;
    do {
        for (int i = 0; i < 16; i++) {
            if (rang(bell, seen))
                return true;
            host_pause();
        }
    } while (host_now_ns() < spin_end);
    for (int i = 0; i < YIELDS && (limit == INT64_MAX || host_now_ns() - start < limit); i++) {
        sched_yield();
        if (rang(bell, seen))
            return true;
    }
    return false;
}

void host_bell_arm(host_bell_t *bell) {
    atomic_fetch_add_explicit(&bell->sleepers, 1, memory_order_seq_cst);
}

void host_bell_disarm(host_bell_t *bell) {
    atomic_fetch_sub_explicit(&bell->sleepers, 1, memory_order_seq_cst);
}

void host_bell_sleep(host_bell_t *bell, uint32_t seen, int64_t timeout_ns) {
    struct timespec timeout = {.tv_sec = timeout_ns / NS_PER_S, .tv_nsec = timeout_ns % NS_PER_S};
    futex(&bell->rung, FUTEX_WAIT, seen, timeout_ns >= 0 ? &timeout : NULL);
}

void host_bell_wait(host_bell_t *bell, uint32_t seen, int64_t timeout_ns) {
    if (timeout_ns == 0 || rang(bell, seen))
        return;
    int64_t start = host_now_ns();
    int64_t limit = timeout_ns < 0 ? INT64_MAX : timeout_ns;
    if (rang_soon(bell, seen, start, limit))
        return;
    int64_t left = -1;
    if (timeout_ns > 0) {
        left = start + timeout_ns - host_now_ns();
        if (left <= 0)
            return;
    }
    host_bell_arm(bell);
    host_bell_sleep(bell, seen, left);
    host_bell_disarm(bell);
}
