/* What a test reads: the journal of exported calls, the counts of live objects, the last error. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static pthread_mutex_t journal_lock = PTHREAD_MUTEX_INITIALIZER;
static host_call_t *journal;
static size_t journal_length, journal_capacity;
static _Atomic bool journal_active;

bool host_journal_on(void) {
    return atomic_load_explicit(&journal_active, memory_order_relaxed);
}

void host_journal_add(const host_call_t *call) {
    host_call_t stamped = *call;
    if (stamped.time_ns == 0)
        stamped.time_ns = (uint64_t)host_now_ns();
    if (stamped.thread == 0)
        stamped.thread = (uint64_t)syscall(SYS_gettid);
    pthread_mutex_lock(&journal_lock);
    if (journal_length < journal_capacity)
        journal[journal_length++] = stamped;
    pthread_mutex_unlock(&journal_lock);
}

void pn_host_journal_start(size_t capacity) {
    host_call_t *calls = capacity != 0 ? calloc(capacity, sizeof *calls) : NULL;
    pthread_mutex_lock(&journal_lock);
    free(journal);
    journal = calls;
    journal_length = 0;
    journal_capacity = calls != NULL ? capacity : 0;
    pthread_mutex_unlock(&journal_lock);
    atomic_store(&journal_active, true);
    host_attend(HOST_ATTEND_JOURNAL, true);
}

size_t pn_host_journal_read(host_call_t *calls, size_t capacity) {
    pthread_mutex_lock(&journal_lock);
    size_t length = journal_length;
    size_t copied = length < capacity ? length : capacity;
    if (copied != 0)
        memcpy(calls, journal, copied * sizeof *calls);
    pthread_mutex_unlock(&journal_lock);
    return length;
}

/* What was recorded can still be read, until the journal starts anew. */
void pn_host_journal_stop(void) {
    atomic_store(&journal_active, false);
    host_attend(HOST_ATTEND_JOURNAL, false);
}

/* ---- live objects --------------------------------------------------------------------------------- */

_Atomic int64_t host_live_streams, host_live_events, host_live_communicators, host_live_segments,
    host_live_threads, host_live_allocations, host_live_work_items, host_live_groups_open;

static int64_t queued_items(void) {
    int64_t items = 0;
    for (uint32_t i = 0; i < host_streams_used(); i++) {
        CUstream stream = host_stream_slot(i);
        uint64_t finished =
            atomic_load(&stream->finished); /* first, so that the difference is not negative */
        items += (int64_t)(atomic_load(&stream->submitted) - finished);
    }
    return items;
}

void pn_host_live(host_live_t *live) {
    *live = (host_live_t){
        .streams = host_live_streams,
        .events = host_live_events,
        .communicators = host_live_communicators,
        .segments = host_live_segments,
        .threads = host_live_threads,
        .allocations = host_live_allocations,
        .work_items = host_live_work_items + queued_items(),
        .groups_open = host_live_groups_open,
    };
}

/* ---- the last error ------------------------------------------------------------------------------- */

enum { TEXT_BYTES = 1024 };
static pthread_mutex_t text_lock = PTHREAD_MUTEX_INITIALIZER;
static char last_text[TEXT_BYTES];

void host_last_error(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&text_lock);
    vsnprintf(last_text, sizeof last_text, format, arguments);
    pthread_mutex_unlock(&text_lock);
    va_end(arguments);
}

const char *host_last_error_text(void) {
    static _Thread_local char copy[TEXT_BYTES];
    pthread_mutex_lock(&text_lock);
    memcpy(copy, last_text, sizeof copy);
    pthread_mutex_unlock(&text_lock);
    return copy;
}
