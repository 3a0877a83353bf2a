/* Events. An event is a place in a stream and needs no item in its queue, with two exceptions that a mark
 * carries: an event with timing wants to know when it was reached, and in the gpulike temper nothing is done
 * at the moment it is asked for. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>

enum { EVENT_BYTES = 64, COUNT_BITS = 48, EVENT_FLAGS = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING };

struct CUevent_st {
    _Atomic uint32_t magic;
    unsigned int flags;
    host_device_t *device;
    _Atomic uint64_t place;  /* the stream's slot and its count, in one word; 0: never recorded */
    _Atomic uint64_t serial; /* of the last record; under times_lock where it is set */
    int64_t reached_ns;      /* 0: not yet; under times_lock */
    host_captured_t captured;
};
_Static_assert(sizeof(struct CUevent_st) <= EVENT_BYTES, "an event fits in its slot");
_Static_assert(HOST_MAX_STREAMS <= 1 << (64 - COUNT_BITS), "a stream's slot fits in a place");

host_pool_t host_event_pool = {
    .capacity = HOST_MAX_EVENTS, .slot_bytes = EVENT_BYTES, .lock = PTHREAD_MUTEX_INITIALIZER};
static pthread_mutex_t times_lock = PTHREAD_MUTEX_INITIALIZER;

static CUresult check(CUevent event) {
    bool live = host_pool_holds(&host_event_pool, event) &&
                atomic_load_explicit(&event->magic, memory_order_acquire) == HOST_MAGIC_EVENT;
    return HOST_LIKELY(live) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static bool has_timing(CUevent event) {
    return !(event->flags & CU_EVENT_DISABLE_TIMING);
}

static bool is_captured(CUevent event) {
    return atomic_load_explicit(&event->captured.id, memory_order_acquire) != 0;
}

static void set_place(CUevent event, host_place_t place) {
    uint64_t slot = host_pool_index(&host_stream_pool, place.stream);
    atomic_store_explicit(&event->place, slot << COUNT_BITS | place.count, memory_order_release);
}

/* False for an event that was never recorded. */
static bool get_place(CUevent event, host_place_t *place) {
    uint64_t packed = atomic_load_explicit(&event->place, memory_order_acquire);
    place->stream = host_stream_slot((uint32_t)(packed >> COUNT_BITS));
    place->count = packed & ((UINT64_C(1) << COUNT_BITS) - 1);
    return packed != 0;
}

static void end(CUevent event) {
    uint32_t live = HOST_MAGIC_EVENT;
    if (!atomic_compare_exchange_strong(&event->magic, &live, HOST_MAGIC_DEAD))
        return;
    pthread_mutex_lock(&times_lock);
    atomic_fetch_add(&event->serial, 1); /* a mark that is still on its way finds nobody */
    pthread_mutex_unlock(&times_lock);
    atomic_store(&event->place, 0);
    if (is_captured(event))
        host_capture_forget(&event->captured);
    atomic_fetch_sub(&host_live_events, 1);
    host_pool_give(&host_event_pool, event);
}

void host_events_close_all(host_device_t *device) {
    uint32_t used = atomic_load(&host_event_pool.used);
    for (uint32_t i = 0; i < used; i++) {
        CUevent event = host_pool_at(&host_event_pool, i);
        if (check(event) == CUDA_SUCCESS && event->device == device)
            end(event);
    }
}

/* ---- marks ---------------------------------------------------------------------------------------- */

typedef struct {
    host_work_t work;
    CUevent event;
    uint64_t serial;
    host_fault_t fault;
    uint32_t fault_seen;
    int64_t due_ns; /* 0: no such limit */
} mark_t;

/* An injected fault holds the mark up, or makes it fail, as the work before it would. */
static host_progress_t fault_step(mark_t *mark) {
    if (mark->fault.kind == HOST_FAULT_CUDA_ERROR) {
        mark->work.status = (CUresult)mark->fault.code;
        return HOST_DONE;
    }
    mark->work.bell = &host_fault_bell;
    bool due = mark->due_ns != 0 && host_now_ns() >= mark->due_ns;
    bool lifted =
        mark->fault.kind == HOST_FAULT_STUCK && host_bell_look(&host_fault_bell) != mark->fault_seen;
    return due || lifted ? HOST_DONE : HOST_BLOCKED;
}

static host_progress_t mark_step(host_work_t *work) {
    mark_t *mark = (mark_t *)work;
    if (mark->fault.kind != HOST_FAULT_NONE && fault_step(mark) == HOST_BLOCKED)
        return HOST_BLOCKED;
    pthread_mutex_lock(&times_lock);
    if (atomic_load(&mark->event->serial) == mark->serial)
        mark->event->reached_ns = host_now_ns();
    pthread_mutex_unlock(&times_lock);
    return HOST_DONE;
}

static void mark_release(host_work_t *work) {
    free(work);
}

static CUresult push_mark(CUevent event, CUstream stream, host_fault_t fault) {
    mark_t *mark = calloc(1, sizeof *mark);
    if (mark == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    mark->work = (host_work_t){.step = mark_step, .release = mark_release, .kind = HOST_WORK_MARK};
    mark->work.unrung = fault.kind != HOST_FAULT_NONE;
    mark->event = event;
    mark->fault = fault;
    mark->fault_seen = host_bell_look(&host_fault_bell);
    mark->due_ns = fault.ns != 0 ? host_now_ns() + fault.ns : 0;
    pthread_mutex_lock(&times_lock);
    mark->serial = atomic_fetch_add(&event->serial, 1) + 1;
    event->reached_ns = 0;
    pthread_mutex_unlock(&times_lock);
    host_device_t *device = stream->device;
    host_place_t place = {stream, 0};
    CUresult result = host_gate_launch(device, &mark->work);
    if (result == CUDA_SUCCESS) {
        result = host_stream_push(stream, &mark->work, &place.count);
        if (result == CUDA_SUCCESS)
            set_place(event, place);
        else
            host_gate_done(device, &mark->work);
    }
    if (result != CUDA_SUCCESS)
        free(mark);
    return result;
}

/* quick, and the stream is idle: the event is reached now. */
static void reach_now(CUevent event, host_place_t place) {
    pthread_mutex_lock(&times_lock);
    atomic_fetch_add(&event->serial, 1);
    event->reached_ns = host_now_ns();
    pthread_mutex_unlock(&times_lock);
    set_place(event, place);
}

static CUresult record(CUevent event, CUstream stream) {
    if (event->device != stream->device)
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = host_device_error(event->device);
    if (result == CUDA_SUCCESS && (host_capturing() || is_captured(event)))
        result = host_capture_record(stream, &event->captured);
    if (result != CUDA_SUCCESS || is_captured(event))
        return result;
    host_fault_t fault = host_fault_take("event", "cuEventRecord", -1);
    if (fault.kind == HOST_FAULT_FAIL)
        return (CUresult)fault.code;
    result = host_stream_barrier(stream);
    if (result != CUDA_SUCCESS)
        return result;
    host_place_t place = host_stream_end(stream);
    if (host_config()->temper == HOST_GPULIKE || fault.kind != HOST_FAULT_NONE || place.count == 0)
        return push_mark(event, stream, fault);
    if (!has_timing(event))
        set_place(event, place);
    else if (host_place_reached(place))
        reach_now(event, place);
    else
        return push_mark(event, stream, fault);
    return CUDA_SUCCESS;
}

static CUresult query(CUevent event) {
    host_device_t *device = event->device;
    CUresult result = host_device_error(device);
    if (result == CUDA_SUCCESS)
        result =
            is_captured(event) ? host_capture_asked(&event->captured) : host_capture_unsafe("cuEventQuery");
    if (result != CUDA_SUCCESS)
        return result;
    bool quick = host_config()->temper == HOST_QUICK;
    if (!quick)
        host_gate_query(device);
    host_place_t place;
    if (!get_place(event, &place) || host_place_reached(place))
        return CUDA_SUCCESS;
    if (quick)
        host_stream_poll(place.stream);
    result = host_device_error(device);
    if (result != CUDA_SUCCESS)
        return result;
    return host_place_reached(place) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static CUresult synchronize(CUevent event) {
    host_place_t place;
    CUresult result =
        is_captured(event) ? host_capture_asked(&event->captured) : host_capture_unsafe("cuEventSynchronize");
    if (result != CUDA_SUCCESS)
        return result;
    if (!get_place(event, &place))
        return host_device_error(event->device);
    return host_place_wait(place, event->device);
}

static CUresult elapsed(CUevent start, CUevent finish, float *milliseconds) {
    host_place_t first, last;
    if (milliseconds == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (is_captured(start) || is_captured(finish))
        return host_capture_asked(is_captured(start) ? &start->captured : &finish->captured);
    if (start->device != finish->device || !has_timing(start) || !has_timing(finish) ||
        !get_place(start, &first) || !get_place(finish, &last))
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = host_device_error(start->device);
    if (result != CUDA_SUCCESS)
        return result;
    if (!host_place_reached(first) || !host_place_reached(last))
        return CUDA_ERROR_NOT_READY;
    pthread_mutex_lock(&times_lock);
    *milliseconds = (float)((double)(finish->reached_ns - start->reached_ns) / 1e6);
    pthread_mutex_unlock(&times_lock);
    return CUDA_SUCCESS;
}

/* ---- exported ------------------------------------------------------------------------------------- */

static CUresult create(CUevent *made, unsigned int flags) {
    if (made == NULL || (flags & ~(unsigned int)EVENT_FLAGS) != 0)
        return CUDA_ERROR_INVALID_VALUE; /* no events between processes here */
    CUresult result = host_device_error(host_thread.current);
    if (result != CUDA_SUCCESS)
        return result;
    CUevent event = host_pool_take(&host_event_pool);
    if (event == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    event->flags = flags;
    event->device = host_thread.current;
    atomic_store_explicit(&event->magic, HOST_MAGIC_EVENT, memory_order_release);
    atomic_fetch_add(&host_live_events, 1);
    *made = event;
    return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent *event, unsigned int flags) {
    CUresult result = host_enter("cuEventCreate", HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS)
        result = create(event, flags);
    return host_leave("cuEventCreate", NULL, result == CUDA_SUCCESS ? *event : NULL, result);
}

CUresult cuEventDestroy_v2(CUevent event) {
    CUresult result = host_enter("cuEventDestroy_v2", HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS)
        result = check(event);
    if (result == CUDA_SUCCESS) {
        result = host_device_error(event->device);
        end(event);
    }
    return host_leave("cuEventDestroy_v2", NULL, event, result);
}

CUresult host_event_record(CUevent event, CUstream stream) {
    CUstream found;
    CUresult result = check(event);
    if (result == CUDA_SUCCESS)
        result = host_stream_resolve(stream, &found);
    return result == CUDA_SUCCESS ? record(event, found) : result;
}

static CUresult record_call(const char *function, CUevent event, CUstream stream, unsigned int flags) {
    CUresult result = host_enter(function, HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS && flags != CU_EVENT_RECORD_DEFAULT) {
        host_last_error("%s: the host engine has no nodes for events in a graph (flags 0x%x)", function,
                        flags);
        result = flags == CU_EVENT_RECORD_EXTERNAL ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
    }
    if (result == CUDA_SUCCESS)
        result = host_event_record(event, stream);
    return host_leave(function, stream, event, result);
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    return record_call("cuEventRecord", event, stream, CU_EVENT_RECORD_DEFAULT);
}

CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int flags) {
    return record_call("cuEventRecordWithFlags", event, stream, flags);
}

CUresult cuEventQuery(CUevent event) {
    CUresult result = host_enter("cuEventQuery", HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS)
        result = check(event);
    if (result == CUDA_SUCCESS)
        result = query(event);
    return host_leave("cuEventQuery", NULL, event, result);
}

CUresult cuEventSynchronize(CUevent event) {
    CUresult result = host_enter("cuEventSynchronize", HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS)
        result = check(event);
    if (result == CUDA_SUCCESS)
        result = synchronize(event);
    return host_leave("cuEventSynchronize", NULL, event, result);
}

static CUresult elapsed_call(const char *function, float *milliseconds, CUevent start, CUevent finish) {
    CUresult result = host_enter(function, HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS)
        result = check(start);
    if (result == CUDA_SUCCESS)
        result = check(finish);
    if (result == CUDA_SUCCESS)
        result = elapsed(start, finish, milliseconds);
    return host_leave(function, NULL, finish, result);
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end_event) {
    return elapsed_call("cuEventElapsedTime", milliseconds, start, end_event);
}

CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end_event) {
    return elapsed_call("cuEventElapsedTime_v2", milliseconds, start, end_event);
}

static CUresult wait_for(CUstream stream, CUevent event) {
    host_place_t place;
    bool captured = false;
    CUresult result = host_device_error(stream->device);
    if (result == CUDA_SUCCESS && (host_capturing() || is_captured(event)))
        result = host_capture_wait(stream, &event->captured, &captured);
    if (result == CUDA_SUCCESS && !captured)
        result = host_stream_barrier(stream);
    if (result == CUDA_SUCCESS && !captured && get_place(event, &place))
        result = host_stream_wait_place(stream, place);
    return result;
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
    CUresult result = host_enter("cuStreamWaitEvent", HOST_NEEDS_CONTEXT);
    CUstream found;
    if (result == CUDA_SUCCESS && flags != CU_EVENT_WAIT_DEFAULT) {
        host_last_error("cuStreamWaitEvent: the host engine has no nodes for events in a graph (flags 0x%x)",
                        flags);
        result = flags == CU_EVENT_WAIT_EXTERNAL ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
    }
    if (result == CUDA_SUCCESS)
        result = check(event);
    if (result == CUDA_SUCCESS)
        result = host_stream_resolve(stream, &found);
    if (result == CUDA_SUCCESS)
        result = wait_for(found, event);
    return host_leave("cuStreamWaitEvent", stream, event, result);
}
