/* A stream's queue: how an item gets in, who runs it, how a faulting context empties it.
 *
 * Any thread pushes. One thread at a time runs: the holder of the run lock, which takes the queued items over
 * as a batch. A runner that stays (a worker, a synchronising thread) keeps the run lock while it sleeps on a
 * blocked item's bell, since otherwise another runner could finish the item and the bell be unmapped.
 */
#define _GNU_SOURCE
#include "driver.h"

#include <sched.h>

enum { RUN_FREE, RUN_HELD, RUN_WANTED }; /* wanted: the worker must be rung when it comes free */
enum { POLL_NS_MIN = 30 * 1000, POLL_NS_MAX = 1000 * 1000, LOOK_AGAIN_NS = 100 * 1000 * 1000 };
enum { CLOCK_EVERY = 4 }; /* a poller looks at the clock after so many items */

bool host_run_lock(CUstream stream, bool want) {
    uint32_t held = RUN_FREE;
    while (!atomic_compare_exchange_weak_explicit(&stream->run, &held, RUN_HELD, memory_order_acquire,
                                                  memory_order_relaxed)) {
        if (held == RUN_FREE)
            continue;
        if (!want)
            return false;
        if (held == RUN_WANTED || atomic_compare_exchange_weak(&stream->run, &held, RUN_WANTED))
            return false;
        held = RUN_FREE;
    }
    return true;
}

void host_run_unlock(CUstream stream) {
    if (atomic_exchange_explicit(&stream->run, RUN_FREE, memory_order_seq_cst) == RUN_WANTED)
        host_bell_ring(&stream->call);
    if (atomic_load_explicit(&stream->state, memory_order_acquire) == HOST_SLOT_DYING)
        host_stream_retire(stream);
}

static host_work_t *next_item(CUstream stream) {
    if (stream->batch == NULL && !host_stream_idle(stream)) {
        pthread_mutex_lock(&stream->lock);
        stream->batch = stream->head;
        stream->head = stream->tail = NULL;
        pthread_mutex_unlock(&stream->lock);
    }
    return stream->batch;
}

static void finish(CUstream stream, host_work_t *work) {
    stream->batch = work->next;
    host_gate_done(stream->device, work);
    work->release(work);
    uint64_t finished = atomic_load_explicit(&stream->finished, memory_order_relaxed);
    atomic_store_explicit(&stream->finished, finished + 1, memory_order_release);
    host_bell_ring(&stream->done);
}

/* gpulike: a kernel reads its buffers some time after it was launched, never at once. */
static void linger(CUstream stream, const host_work_t *work) {
    const host_config_t *config = host_config();
    uint32_t most = config->read_delay_ns;
    if (HOST_LIKELY(config->temper == HOST_QUICK) || most == 0 || work->kind != HOST_WORK_KERNEL)
        return;
    uint64_t state = config->seed ^ (stream->id << 32) ^ atomic_load(&stream->finished);
    host_nap_ns((int64_t)(host_random(&state) % ((uint64_t)most + 1)));
}

/* What a passer-by may not run: it would hold up its own thread, or call foreign code on it. */
static bool is_for_worker(const host_work_t *work, host_runner_t runner) {
    if (runner == HOST_RUNNER_WORKER)
        return false;
    return work->kind == HOST_WORK_HOST_FUNCTION ||
           (runner == HOST_RUNNER_POLLER && work->bytes > HOST_POLL_BYTES);
}

/* The item is done, or it is dropped. */
static void end_item(CUstream stream, host_work_t *work) {
    if (work->status != CUDA_SUCCESS)
        host_device_fail(stream->device->ordinal, work->status);
    finish(stream, work);
}

/* Whether a runner that stays should step a blocked item again at once. What only time or a store without a
 * ring can free is not worth it. */
static bool is_worth_a_try(host_work_t *work) {
    if (work->bell == NULL || work->unrung)
        return false;
    if (work->moves != work->moves_seen) {
        work->moves_seen = work->moves;
        work->tries = 0;
    }
    if (!host_be_patient(work->tries, work->near))
        return false;
    work->tries++;
    return true;
}

host_run_t host_stream_run(CUstream stream, host_runner_t runner, uint64_t until) {
    int64_t end = 0;
    for (int count = 1; atomic_load_explicit(&stream->finished, memory_order_relaxed) < until; count++) {
        host_work_t *work = next_item(stream);
        if (work == NULL)
            return HOST_RUN_EMPTY;
        if (host_device_error(stream->device) == CUDA_SUCCESS) {
            if (is_for_worker(work, runner))
                return HOST_RUN_WORKER;
            if (!work->started) {
                work->started = true;
                linger(stream, work);
            }
            if (work->step(work) == HOST_BLOCKED) {
                if (runner != HOST_RUNNER_POLLER && is_worth_a_try(work))
                    continue;
                return HOST_RUN_BLOCKED;
            }
        }
        end_item(stream, work);
        if (runner == HOST_RUNNER_POLLER && count % CLOCK_EVERY == 0) {
            int64_t now = host_now_ns();
            if (end == 0)
                end = now + HOST_POLL_NS;
            else if (now >= end)
                break;
        }
    }
    return HOST_RUN_PAUSED;
}

void host_stream_sleep(CUstream stream, int64_t waiting_since) {
    host_work_t *work = stream->batch;
    host_bell_t *bell = work->bell;
    int64_t limit = LOOK_AGAIN_NS;
    if (bell == NULL || work->unrung) {
        limit = (host_now_ns() - waiting_since) / 16;
        limit = limit < POLL_NS_MIN ? POLL_NS_MIN : limit > POLL_NS_MAX ? POLL_NS_MAX : limit;
    }
    if (bell == NULL) {
        host_nap_ns(limit);
        return;
    }
    pthread_mutex_lock(&stream->lock);
    stream->sleeping_on = bell;
    pthread_mutex_unlock(&stream->lock);
    host_bell_arm(bell);
    uint32_t seen = host_bell_look(bell);
    bool failed = host_device_error(stream->device) != CUDA_SUCCESS;
    bool done = !failed && work->step(work) == HOST_DONE;
    if (!failed && !done && work->bell == bell)
        host_bell_sleep(bell, seen, limit);
    host_bell_disarm(bell);
    pthread_mutex_lock(&stream->lock);
    stream->sleeping_on = NULL;
    pthread_mutex_unlock(&stream->lock);
    if (done)
        end_item(stream, work);
}

void host_stream_poll(CUstream stream) {
    /* lost increments are fine: the janitor asks only whether the number has changed */
    uint32_t polls = atomic_load_explicit(&stream->polls, memory_order_relaxed);
    atomic_store_explicit(&stream->polls, polls + 1, memory_order_relaxed);
    if (host_stream_idle(stream) || !host_run_lock(stream, false))
        return;
    host_run_t outcome = host_stream_run(stream, HOST_RUNNER_POLLER, UINT64_MAX);
    bool near = outcome == HOST_RUN_BLOCKED && stream->batch->near;
    host_run_unlock(stream);
    if (outcome == HOST_RUN_WORKER)
        host_worker_call(stream);
    else if (near)
        sched_yield(); /* whom it waits for, who cannot run beside it */
}

static bool is_heavy(const host_work_t *work) {
    return work->bytes > HOST_POLL_BYTES;
}

CUresult host_stream_push(CUstream stream, host_work_t *work, uint64_t *count) {
    /* In the quick temper whoever polls, waits or looks after neglected streams finds what is heavy: a worker
     * that is woken for it now would only be in the way of a caller who waits at once. */
    bool call_worker = host_config()->temper != HOST_QUICK || work->kind == HOST_WORK_HOST_FUNCTION;
    if (call_worker) {
        CUresult result = host_worker_ensure(stream);
        if (result != CUDA_SUCCESS)
            return result;
    }
    work->next = NULL;
    work->device = stream->device->ordinal;
    pthread_mutex_lock(&stream->lock);
    if (atomic_load_explicit(&stream->state, memory_order_relaxed) != HOST_SLOT_LIVE) {
        pthread_mutex_unlock(&stream->lock);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    uint64_t submitted = atomic_load_explicit(&stream->submitted, memory_order_relaxed);
    bool alone = submitted == atomic_load_explicit(&stream->finished, memory_order_acquire);
    bool attended = atomic_load_explicit(&stream->worker_active, memory_order_relaxed);
    /* the usual case: nothing is queued and nobody runs, so that this thread is the runner */
    bool mine = alone && !call_worker && !attended && !is_heavy(work) && host_run_lock(stream, false);
    if (mine) {
        stream->batch = work;
    } else if (stream->tail != NULL) {
        stream->tail->next = work;
        stream->tail = work;
    } else {
        stream->head = stream->tail = work;
    }
    atomic_store_explicit(&stream->submitted, submitted + 1, memory_order_seq_cst);
    pthread_mutex_unlock(&stream->lock);
    if (count != NULL)
        *count = submitted + 1;
    if (mine) {
        host_stream_run(stream, HOST_RUNNER_POLLER, UINT64_MAX);
        host_run_unlock(stream);
    }
    if (call_worker)
        host_worker_call(stream);
    else if (!attended && !host_stream_idle(stream))
        host_janitor_notice();
    return CUDA_SUCCESS;
}
