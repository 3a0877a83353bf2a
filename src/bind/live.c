#include "bind.h"

#include <time.h>

pn_counts_t pn_counts;
atomic_bool pn_forked;

void pn_live_read(pn_live_t *live) {
#define READ(field) live->field = atomic_load_explicit(&pn_counts.field, memory_order_relaxed)
    READ(operations);
    READ(communicators);
    READ(streams);
    READ(events);
    READ(gates);
    READ(lanes);
    READ(helpers);
    READ(mailboxes);
    READ(memory);
    READ(registrations);
    READ(operators);
#undef READ
    pn_abort_overdue(&live->abandoned_communicators, &live->stuck_threads);
    live->abandoned_communicators += atomic_load(&pn_counts.abandoned);
}

static void in_child(void) {
    atomic_store(&pn_forked, true);
}

static void watch(void) {
    pthread_atfork(NULL, NULL, in_child);
}

void pn_live_watch_fork(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch);
}

int64_t pn_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}
