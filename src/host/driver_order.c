/* The order of work between streams, and the way of a launch into its stream. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>

typedef struct {
    host_work_t work;
    host_place_t place;
} place_wait_t;

static host_progress_t place_wait_step(host_work_t *work) {
    place_wait_t *wait = (place_wait_t *)work;
    CUstream other = wait->place.stream;
    work->bell = &other->done;
    if (host_place_reached(wait->place))
        return HOST_DONE;
    if (host_config()->temper == HOST_QUICK)
        host_stream_poll(other); /* who polls this stream polls what it waits for */
    return host_place_reached(wait->place) ? HOST_DONE : HOST_BLOCKED;
}

static void place_wait_release(host_work_t *work) {
    free(work);
}

CUresult host_stream_wait_place(CUstream stream, host_place_t place) {
    if (place.stream == stream || host_place_reached(place))
        return CUDA_SUCCESS;
    place_wait_t *wait = calloc(1, sizeof *wait);
    if (wait == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    wait->work =
        (host_work_t){.step = place_wait_step, .release = place_wait_release, .kind = HOST_WORK_MARK};
    wait->place = place;
    CUresult result = host_stream_push(stream, &wait->work, NULL);
    if (result != CUDA_SUCCESS)
        free(wait);
    return result;
}

/* The legacy default stream and the blocking streams of its device wait for each other. No two waits can be
 * for each other, since each is for what was queued before it. */
CUresult host_stream_barrier(CUstream stream) {
    if (HOST_LIKELY(stream->flags & CU_STREAM_NON_BLOCKING))
        return CUDA_SUCCESS;
    if (!(stream->flags & HOST_STREAM_LEGACY)) {
        CUstream legacy = atomic_load(&stream->device->legacy);
        return legacy == NULL ? CUDA_SUCCESS : host_stream_wait_place(stream, host_stream_end(legacy));
    }
    CUresult result = CUDA_SUCCESS;
    for (uint32_t i = 0; i < host_streams_used() && result == CUDA_SUCCESS; i++) {
        CUstream other = host_stream_slot(i);
        if (!host_stream_idle(other) && host_stream_of(other, stream->device, CU_STREAM_NON_BLOCKING))
            result = host_stream_wait_place(stream, host_stream_end(other));
    }
    return result;
}

bool host_stream_legacy_ready(CUstream legacy) {
    for (uint32_t i = 0; i < host_streams_used(); i++) {
        CUstream other = host_stream_slot(i);
        if (!host_stream_idle(other) && host_stream_of(other, legacy->device, CU_STREAM_NON_BLOCKING)) {
            if (host_config()->temper == HOST_QUICK)
                host_stream_poll(other);
            if (!host_stream_idle(other))
                return false;
        }
    }
    return true;
}

CUresult host_stream_follow(CUstream waiter, CUstream signaller) {
    CUstream behind, ahead;
    CUresult result = host_stream_resolve(waiter, &behind);
    if (result == CUDA_SUCCESS)
        result = host_stream_resolve(signaller, &ahead);
    bool captured = false;
    if (result == CUDA_SUCCESS && host_capturing())
        result = host_capture_follow(behind, ahead, &captured);
    if (captured)
        return result;
    if (result == CUDA_SUCCESS)
        result = host_stream_barrier(ahead);
    if (result == CUDA_SUCCESS)
        result = host_stream_barrier(behind);
    return result == CUDA_SUCCESS ? host_stream_wait_place(behind, host_stream_end(ahead)) : result;
}

CUresult host_stream_submit(CUstream handle, host_work_t *work) {
    CUstream stream;
    CUresult result = host_stream_resolve(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (atomic_load_explicit(&host_attention, memory_order_relaxed) & HOST_ATTEND_LOCK)
        host_driver_pass();
    host_device_t *device = stream->device;
    bool captured = false;
    if (host_capturing()) {
        result = host_capture_work(stream, work, &captured);
        if (captured || result != CUDA_SUCCESS)
            return result;
    }
    bool synchronous = host_config()->launch_blocking && work->kind != HOST_WORK_MARK;
    result = host_gate_launch(device, work);
    if (result != CUDA_SUCCESS)
        return result;
    result = host_stream_barrier(stream);
    if (result == CUDA_SUCCESS)
        result = host_stream_push(stream, work, NULL);
    if (result != CUDA_SUCCESS) {
        host_gate_done(device, work);
        return result;
    }
    if (synchronous) /* what goes wrong there is sticky: the next call says so */
        host_place_wait(host_stream_end(stream), device);
    return CUDA_SUCCESS;
}
