/* Waiting for a place in a stream. In the quick temper the waiter runs the stream itself. */
#define _GNU_SOURCE
#include "driver.h"

/* Bring the stream nearer to the place, or sleep until something may have changed. */
static void help_or_sleep(host_place_t place, int64_t waiting_since, bool may_run) {
    CUstream stream = place.stream;
    uint32_t seen = host_bell_look(&stream->done);
    if (host_place_reached(place))
        return;
    if (may_run && host_run_lock(stream, false)) {
        host_run_t outcome = host_stream_run(stream, HOST_RUNNER_WAITER, place.count);
        if (outcome == HOST_RUN_BLOCKED)
            host_stream_sleep(stream, waiting_since);
        host_run_unlock(stream);
        if (outcome != HOST_RUN_WORKER || host_worker_call(stream) != CUDA_SUCCESS)
            return;
    }
    host_bell_wait(&stream->done, seen, -1);
}

CUresult host_place_wait(host_place_t place, host_device_t *device) {
    int64_t waiting_since = 0;
    for (;;) {
        CUresult error = host_device_error(device);
        if (error != CUDA_SUCCESS)
            return error;
        if (host_place_reached(place))
            return CUDA_SUCCESS;
        if (waiting_since == 0)
            waiting_since = host_now_ns();
        help_or_sleep(place, waiting_since, host_config()->temper == HOST_QUICK);
    }
}

void host_place_drain(host_place_t place) {
    int64_t waiting_since = host_now_ns();
    while (!host_place_reached(place))
        help_or_sleep(place, waiting_since, true);
}

static CUresult wait_for_all(host_device_t *device, unsigned int unwanted_flags) {
    CUresult result = host_device_error(device);
    for (uint32_t i = 0; i < host_streams_used() && result == CUDA_SUCCESS; i++) {
        CUstream stream = host_stream_slot(i);
        if (!host_stream_idle(stream) && host_stream_of(stream, device, unwanted_flags))
            result = host_place_wait(host_stream_end(stream), device);
    }
    return result;
}

CUresult host_device_synchronize(int ordinal) {
    return wait_for_all(&host_devices[ordinal], 0);
}

/* The legacy default stream is behind all that the blocking streams were given. */
CUresult host_stream_synchronize(CUstream stream) {
    if (stream->flags & HOST_STREAM_LEGACY)
        return wait_for_all(stream->device, CU_STREAM_NON_BLOCKING);
    return host_place_wait(host_stream_end(stream), stream->device);
}
