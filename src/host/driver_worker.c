/* The threads behind the streams.
 *
 * A worker belongs to one stream, is started when the stream first needs it, and sleeps without a wake-up
 * while the stream is idle. In the quick temper small items are left to whoever polls; the janitor, one
 * thread for the process, hands a stream that nobody polls to its worker, and sleeps too once nothing is
 * pending.
 */
#define _GNU_SOURCE
#include "driver.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>

enum { NAP_NS_MIN = 100 * 1000, NAP_NS_MAX = 500 * 1000, LINGER_NS = 10 * 1000 * 1000 };
enum { TIMER_SLACK_NS = 1000 }; /* the default of 50 us would be most of a short nap */

/* ---- threads -------------------------------------------------------------------------------------- */

typedef struct {
    void *(*body)(void *);
    void *argument;
    const char *name;
} thread_start_t;

static void *begin(void *argument) {
    thread_start_t start = *(thread_start_t *)argument;
    free(argument);
    prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0);
    pthread_setname_np(pthread_self(), start.name);
    return start.body(start.argument);
}

CUresult host_thread_start(void *(*body)(void *), void *argument, const char *name) {
    thread_start_t *start = malloc(sizeof *start);
    if (start == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *start = (thread_start_t){body, argument, name};
    sigset_t all, before;
    sigfillset(&all); /* signals are for the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    atomic_fetch_add(&host_live_threads, 1);
    pthread_t thread;
    int failed = pthread_create(&thread, NULL, begin, start);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        host_thread_end();
        free(start);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_detach(thread);
    return CUDA_SUCCESS;
}

void host_thread_end(void) {
    atomic_fetch_sub(&host_live_threads, 1);
}

/* ---- a stream's worker ---------------------------------------------------------------------------- */

static void run_until_empty(CUstream stream) {
    uint64_t finished = 0;
    int64_t waiting_since = 0;
    while (host_stream_run(stream, HOST_RUNNER_WORKER, UINT64_MAX) == HOST_RUN_BLOCKED) {
        uint64_t now_finished = atomic_load_explicit(&stream->finished, memory_order_relaxed);
        if (waiting_since == 0 || finished != now_finished)
            waiting_since = host_now_ns();
        finished = now_finished;
        host_stream_sleep(stream, waiting_since);
    }
    host_run_unlock(stream);
}

static void *worker(void *argument) {
    CUstream stream = argument;
    for (;;) {
        uint32_t seen = host_bell_look(&stream->call);
        if (!host_run_lock(stream, true)) {
            host_bell_wait(&stream->call, seen, -1);
            continue;
        }
        run_until_empty(stream);
        pthread_mutex_lock(&stream->lock);
        bool idle = host_stream_idle(stream);
        bool dying = stream->state == HOST_SLOT_DYING;
        if (idle) {
            stream->worker_active = false;
            stream->worker = !dying;
        }
        pthread_mutex_unlock(&stream->lock);
        if (idle && dying)
            break;
        if (idle)
            host_bell_wait(&stream->call, seen, -1);
    }
    host_thread_end();
    host_stream_retire(stream);
    return NULL;
}

/* Under the stream's lock. */
static CUresult ensure(CUstream stream) {
    if (stream->worker)
        return CUDA_SUCCESS;
    CUresult result = host_thread_start(worker, stream, "pynccl-stream");
    stream->worker = stream->worker_active = result == CUDA_SUCCESS;
    return result;
}

CUresult host_worker_ensure(CUstream stream) {
    pthread_mutex_lock(&stream->lock);
    CUresult result = ensure(stream);
    pthread_mutex_unlock(&stream->lock);
    return result;
}

CUresult host_worker_call(CUstream stream) {
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&stream->lock);
    if (stream->state != HOST_SLOT_FREE && !host_stream_idle(stream)) {
        result = ensure(stream);
        stream->worker_active = result == CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&stream->lock);
    host_bell_ring(&stream->call);
    return result;
}

/* ---- the janitor ---------------------------------------------------------------------------------- */

enum { JANITOR_ABSENT, JANITOR_ASLEEP, JANITOR_AWAKE };
static _Atomic int janitor_state = JANITOR_ABSENT;
static pthread_mutex_t janitor_lock = PTHREAD_MUTEX_INITIALIZER;
static host_bell_t janitor_bell;

/* Is the stream's work left to pollers? */
static bool is_unattended(CUstream stream) {
    return !host_stream_idle(stream) && !atomic_load_explicit(&stream->worker_active, memory_order_acquire);
}

/* Has anybody touched it since the last round, or is somebody at it now? */
static bool is_tended(CUstream stream) {
    uint32_t polls = atomic_load_explicit(&stream->polls, memory_order_relaxed);
    uint64_t finished = atomic_load_explicit(&stream->finished, memory_order_relaxed);
    bool tended = stream->seen_polls != polls || stream->seen_finished != finished;
    stream->seen_polls = polls;
    stream->seen_finished = finished;
    return tended || host_run_locked(stream);
}

typedef struct {
    bool pending; /* work that is left to pollers */
    bool urgent;  /* of which some has found none, or was handed over just now */
} round_t;

static round_t go_round(bool hand_over) {
    round_t round = {false, false};
    for (uint32_t i = 0; i < host_streams_used(); i++) {
        CUstream stream = host_stream_slot(i);
        bool unattended = is_unattended(stream), was_there = stream->seen_pending;
        bool tended = is_tended(stream);
        bool handed =
            unattended && hand_over && !tended && was_there && host_worker_call(stream) == CUDA_SUCCESS;
        round.pending |= unattended && !handed;
        round.urgent |= unattended && !tended;
        stream->seen_pending = unattended;
    }
    return round;
}

static void *janitor(void *unused) {
    (void)unused;
    int64_t nap = NAP_NS_MIN, idle_since = 0;
    for (;;) {
        host_nap_ns(nap);
        round_t round = go_round(true);
        /* While what is pending is polled, nobody needs this thread: each wake-up takes a core from somebody.
         */
        nap = round.urgent ? NAP_NS_MIN : nap < NAP_NS_MAX ? nap + nap / 4 : nap;
        if (round.pending || round.urgent) {
            idle_since = 0;
            continue;
        }
        int64_t now = host_now_ns();
        if (idle_since == 0)
            idle_since = now;
        /* a while awake, so that a stream of small launches does not wake this thread at each one */
        if (now - idle_since < LINGER_NS)
            continue;
        uint32_t seen = host_bell_look(&janitor_bell);
        atomic_store(&janitor_state, JANITOR_ASLEEP);
        atomic_thread_fence(memory_order_seq_cst);
        if (!go_round(false).pending)
            host_bell_wait(&janitor_bell, seen, -1);
        atomic_store(&janitor_state, JANITOR_AWAKE);
        idle_since = 0;
        nap = NAP_NS_MIN;
    }
    return NULL;
}

void host_janitor_notice(void) {
    /* the item was counted before: either it is seen by the janitor's last round, or this sees it asleep */
    if (HOST_LIKELY(atomic_load(&janitor_state) == JANITOR_AWAKE))
        return;
    pthread_mutex_lock(&janitor_lock);
    if (atomic_load(&janitor_state) == JANITOR_ABSENT) {
        atomic_store(&janitor_state, JANITOR_AWAKE); /* first: from then on the state is the janitor's own */
        if (host_thread_start(janitor, NULL, "pynccl-janitor") != CUDA_SUCCESS)
            atomic_store(&janitor_state, JANITOR_ABSENT);
    }
    pthread_mutex_unlock(&janitor_lock);
    host_bell_ring(&janitor_bell);
}
