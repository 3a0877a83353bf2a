/* What makes a launch cost something: the gpulike temper's launch lock, cost and depth, and the rule that one
 * collective kernel at a time runs on a device. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>
#include <string.h>

static CUresult take_room(host_device_t *device, host_work_t *work, uint32_t depth) {
    for (;;) {
        CUresult error = host_device_error(device);
        if (error != CUDA_SUCCESS)
            return error;
        uint32_t seen = host_bell_look(&device->room);
        uint32_t queued = atomic_load(&device->queued);
        if (queued >= depth) {
            host_bell_wait(&device->room, seen, -1);
        } else if (atomic_compare_exchange_weak(&device->queued, &queued, queued + 1)) {
            work->counted = true;
            return CUDA_SUCCESS;
        }
    }
}

CUresult host_gate_launch(host_device_t *device, host_work_t *work) {
    const host_config_t *config = host_config();
    CUresult result = host_device_error(device);
    if (result == CUDA_SUCCESS && config->launch_depth != 0)
        result = take_room(device, work, config->launch_depth);
    if (result != CUDA_SUCCESS)
        return result;
    uint32_t cost = work->kind == HOST_WORK_MARK ? 0 : config->launch_cost_ns;
    if (cost != 0 || config->temper == HOST_GPULIKE) {
        pthread_mutex_lock(&device->launch_lock);
        int64_t end = host_now_ns() + cost;
        while (cost != 0 && host_now_ns() < end)
            host_pause();
        pthread_mutex_unlock(&device->launch_lock);
    }
    return CUDA_SUCCESS;
}

void host_gate_done(host_device_t *device, host_work_t *work) {
    if (work->counted) {
        work->counted = false;
        atomic_fetch_sub(&device->queued, 1);
        host_bell_ring(&device->room);
    }
    if (work->kind == HOST_WORK_KERNEL && atomic_load_explicit(&device->turn_used, memory_order_relaxed))
        host_device_leave(device->ordinal, work);
}

/* An event query waits for a launch that is on its way into the device, as it does in the real driver. */
void host_gate_query(host_device_t *device) {
    pthread_mutex_lock(&device->launch_lock);
    pthread_mutex_unlock(&device->launch_lock);
}

/* ---- one collective at a time --------------------------------------------------------------------- */

static size_t place_in_line(const host_device_t *device, const host_work_t *kernel) {
    size_t at = 0;
    while (at < device->turn_length && device->turn_line[at] != kernel)
        at++;
    return at;
}

static bool join_line(host_device_t *device, host_work_t *kernel) {
    if (device->turn_length == device->turn_capacity) {
        size_t capacity = device->turn_capacity == 0 ? 16 : device->turn_capacity * 2;
        host_work_t **line = realloc(device->turn_line, capacity * sizeof(host_work_t *));
        if (line == NULL)
            return false; /* it asks again */
        device->turn_line = line;
        device->turn_capacity = capacity;
    }
    device->turn_line[device->turn_length++] = kernel;
    return true;
}

static void leave_line(host_device_t *device, size_t at) {
    device->turn_length--;
    memmove(&device->turn_line[at], &device->turn_line[at + 1],
            (device->turn_length - at) * sizeof(host_work_t *));
}

bool host_device_enter(int ordinal, host_work_t *kernel) {
    if (host_config()->temper != HOST_GPULIKE)
        return true;
    host_device_t *device = &host_devices[ordinal];
    kernel->bell = &device->turn;
    pthread_mutex_lock(&device->turn_lock);
    atomic_store_explicit(&device->turn_used, true, memory_order_relaxed);
    if (device->turn_owner != kernel) {
        size_t at = place_in_line(device, kernel);
        if (at == device->turn_length && !join_line(device, kernel))
            kernel->bell = NULL;
        if (device->turn_owner == NULL && at == 0 && device->turn_length > 0) {
            device->turn_owner = kernel;
            leave_line(device, 0);
        }
    }
    bool entered = device->turn_owner == kernel;
    pthread_mutex_unlock(&device->turn_lock);
    return entered;
}

void host_device_leave(int ordinal, host_work_t *kernel) {
    host_device_t *device = &host_devices[ordinal];
    pthread_mutex_lock(&device->turn_lock);
    size_t at = place_in_line(device, kernel);
    bool changed = device->turn_owner == kernel || at < device->turn_length;
    if (device->turn_owner == kernel)
        device->turn_owner = NULL;
    else if (at < device->turn_length)
        leave_line(device, at);
    pthread_mutex_unlock(&device->turn_lock);
    if (changed)
        host_bell_ring(&device->turn);
}
