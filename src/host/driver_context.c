/* Primary contexts: who keeps them, which one is current, and what ends them.
 *
 * A device has one context, as every client of ours uses it. It is alive while somebody retains it. A sticky
 * error stays until the last one lets go: from then on everything of the context is gone, and whoever retains
 * it again starts clean.
 */
#define _GNU_SOURCE
#include "driver.h"

static pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER; /* guards retained, runtime */

host_device_t *host_device_of(CUcontext context) {
    uintptr_t offset = (uintptr_t)context - (uintptr_t)host_devices;
    if (offset >= sizeof host_devices || offset % sizeof host_devices[0] != 0)
        return NULL;
    return context;
}

static CUresult retain(int ordinal, bool runtime, host_device_t **device) {
    if (ordinal < 0 || ordinal >= host_config()->devices)
        return CUDA_ERROR_INVALID_DEVICE;
    host_device_t *found = &host_devices[ordinal];
    pthread_mutex_lock(&contexts_lock);
    if (!(runtime && found->runtime)) {
        if (runtime)
            found->runtime = true;
        if (found->retained++ == 0) {
            found->ordinal = ordinal;
            atomic_store(&found->error, CUDA_SUCCESS);
            atomic_store(&found->magic, HOST_MAGIC_CONTEXT);
        }
    }
    pthread_mutex_unlock(&contexts_lock);
    *device = found;
    return CUDA_SUCCESS;
}

/* Everything of the context goes with it; what is queued is dropped, as by a fault. */
static CUresult release(int ordinal) {
    if (ordinal < 0 || ordinal >= host_config()->devices)
        return CUDA_ERROR_INVALID_DEVICE;
    host_device_t *device = &host_devices[ordinal];
    pthread_mutex_lock(&contexts_lock);
    if (device->retained == 0) {
        pthread_mutex_unlock(&contexts_lock);
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    bool last = --device->retained == 0;
    if (last) {
        atomic_store(&device->magic, HOST_MAGIC_DEAD);
        host_device_fail(ordinal, CUDA_ERROR_CONTEXT_IS_DESTROYED);
        host_streams_close_all(device);
        host_events_close_all(device);
        host_memory_free_all(device);
    }
    pthread_mutex_unlock(&contexts_lock);
    return CUDA_SUCCESS;
}

CUresult host_device_status(int ordinal) {
    return host_device_error(&host_devices[ordinal]);
}

void host_device_fail(int ordinal, CUresult error) {
    host_device_t *device = &host_devices[ordinal];
    int none = CUDA_SUCCESS;
    if (!atomic_compare_exchange_strong(&device->error, &none, (int)error) &&
        error != CUDA_ERROR_CONTEXT_IS_DESTROYED)
        return;
    host_bell_ring(&device->room);
    for (uint32_t i = 0; i < host_streams_used(); i++)
        host_stream_fail(host_stream_slot(i), device);
}

CUresult host_current_device(int *ordinal, bool create) {
    host_device_t *current = host_thread.current;
    if (current == NULL && create) {
        CUresult result = host_set_current_device(0);
        if (result != CUDA_SUCCESS)
            return result;
        current = host_thread.current;
    }
    if (current == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    *ordinal = current->ordinal;
    return host_device_alive(current) ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

CUresult host_set_current_device(int ordinal) {
    if (ordinal == -1) {
        host_thread.current = NULL;
        return CUDA_SUCCESS;
    }
    host_device_t *device = host_thread.current;
    if (device != NULL && device->ordinal == ordinal && device->runtime)
        return CUDA_SUCCESS;
    CUresult result = host_driver_initialise();
    if (result == CUDA_SUCCESS)
        result = retain(ordinal, true, &device);
    if (result == CUDA_SUCCESS)
        host_thread.current = device;
    return result;
}

/* ---- exported ------------------------------------------------------------------------------------- */

CUresult cuDevicePrimaryCtxRetain(CUcontext *ctx, CUdevice dev) {
    CUresult result = host_enter("cuDevicePrimaryCtxRetain", HOST_NEEDS_INIT);
    if (result == CUDA_SUCCESS && ctx == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        result = retain(dev, false, ctx);
    return host_leave("cuDevicePrimaryCtxRetain", NULL, NULL, result);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev) {
    CUresult result = host_enter("cuDevicePrimaryCtxRelease_v2", HOST_NEEDS_INIT);
    if (result == CUDA_SUCCESS)
        result = release(dev);
    return host_leave("cuDevicePrimaryCtxRelease_v2", NULL, NULL, result);
}

CUresult cuCtxGetCurrent(CUcontext *ctx) {
    CUresult result = host_enter("cuCtxGetCurrent", HOST_NEEDS_INIT);
    if (result == CUDA_SUCCESS && ctx == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *ctx = host_thread.current;
    return host_leave("cuCtxGetCurrent", NULL, host_thread.current, result);
}

CUresult cuCtxSetCurrent(CUcontext ctx) {
    CUresult result = host_enter("cuCtxSetCurrent", HOST_NEEDS_INIT);
    if (result == CUDA_SUCCESS && ctx != NULL) {
        host_device_t *device = host_device_of(ctx);
        if (device == NULL || !host_device_alive(device))
            result = CUDA_ERROR_INVALID_CONTEXT;
    }
    if (result == CUDA_SUCCESS)
        host_thread.current = ctx;
    return host_leave("cuCtxSetCurrent", NULL, ctx, result);
}

CUresult cuCtxGetDevice(CUdevice *dev) {
    CUresult result = host_enter("cuCtxGetDevice", HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS && dev == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *dev = host_thread.current->ordinal;
    return host_leave("cuCtxGetDevice", NULL, NULL, result);
}

CUresult cuCtxSynchronize(void) {
    CUresult result = host_enter("cuCtxSynchronize", HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS)
        result = host_device_synchronize(host_thread.current->ordinal);
    return host_leave("cuCtxSynchronize", NULL, NULL, result);
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    CUresult result = host_enter("cuCtxGetStreamPriorityRange", HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS && least != NULL)
        *least = HOST_PRIORITY_LEAST;
    if (result == CUDA_SUCCESS && greatest != NULL)
        *greatest = HOST_PRIORITY_GREATEST;
    return host_leave("cuCtxGetStreamPriorityRange", NULL, NULL, result);
}
