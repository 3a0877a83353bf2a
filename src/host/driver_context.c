/* Primary contexts: who keeps them, which one is current, and what ends them.
 *
 * A device has one context, as every client of ours uses it. It is alive while somebody retains it. A sticky
 * error stays until the last one lets go: from then on everything of the context is gone, and whoever retains
 * it again starts clean.
 */
#define _GNU_SOURCE
#include "driver.h"

static pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER; /* guards what follows, retained, runtime */
static uint64_t last_id;

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
            found->id = ++last_id;
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
        host_mempools_empty(device);
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

/* The context that a call names, or with NULL the thread's own. */
static CUresult named_context(CUcontext ctx, host_device_t **device) {
    if (ctx == NULL && host_thread.current == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    *device = ctx == NULL ? host_thread.current : host_device_of(ctx);
    return *device != NULL && host_device_alive(*device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult synchronize(const char *function, host_device_t *device) {
    CUresult result = host_capture_device(function, device);
    return result == CUDA_SUCCESS ? host_device_synchronize(device->ordinal) : result;
}

CUresult cuCtxPushCurrent_v2(CUcontext ctx) {
    CUresult result = host_enter("cuCtxPushCurrent_v2", HOST_NEEDS_INIT);
    host_device_t *device = NULL;
    if (result == CUDA_SUCCESS && ctx == NULL)
        result = CUDA_ERROR_INVALID_CONTEXT;
    if (result == CUDA_SUCCESS)
        result = named_context(ctx, &device);
    if (result == CUDA_SUCCESS && host_thread.depth == HOST_CONTEXT_DEPTH) {
        host_last_error("cuCtxPushCurrent: the host engine keeps %d contexts for a thread",
                        HOST_CONTEXT_DEPTH);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result == CUDA_SUCCESS) {
        host_thread.below[host_thread.depth++] = host_thread.current;
        host_thread.current = device;
    }
    return host_leave("cuCtxPushCurrent_v2", NULL, ctx, result);
}

CUresult cuCtxPopCurrent_v2(CUcontext *ctx) {
    CUresult result = host_enter("cuCtxPopCurrent_v2", HOST_NEEDS_INIT);
    host_device_t *device = host_thread.current;
    if (result == CUDA_SUCCESS && device == NULL)
        result = CUDA_ERROR_INVALID_CONTEXT;
    if (result == CUDA_SUCCESS) {
        if (ctx != NULL)
            *ctx = device;
        host_thread.current = host_thread.depth > 0 ? host_thread.below[--host_thread.depth] : NULL;
    }
    return host_leave("cuCtxPopCurrent_v2", NULL, device, result);
}

CUresult cuCtxGetId(CUcontext ctx, unsigned long long *id) {
    CUresult result = host_enter("cuCtxGetId", HOST_NEEDS_INIT);
    host_device_t *device = NULL;
    if (result == CUDA_SUCCESS)
        result = id != NULL ? named_context(ctx, &device) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *id = device->id;
    return host_leave("cuCtxGetId", NULL, ctx, result);
}

CUresult cuCtxGetFlags(unsigned int *flags) {
    CUresult result = host_enter("cuCtxGetFlags", HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS && flags == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *flags = 0;
    return host_leave("cuCtxGetFlags", NULL, NULL, result);
}

CUresult cuCtxGetApiVersion(CUcontext ctx, unsigned int *version) {
    CUresult result = host_enter("cuCtxGetApiVersion", HOST_NEEDS_INIT);
    host_device_t *device = NULL;
    if (result == CUDA_SUCCESS)
        result = version != NULL ? named_context(ctx, &device) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *version = 3020; /* the form of contexts that all drivers since 4.0 have */
    return host_leave("cuCtxGetApiVersion", NULL, ctx, result);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active) {
    CUresult result = host_enter("cuDevicePrimaryCtxGetState", HOST_NEEDS_INIT);
    if (result == CUDA_SUCCESS && (flags == NULL || active == NULL))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && (dev < 0 || dev >= host_config()->devices))
        result = CUDA_ERROR_INVALID_DEVICE;
    if (result == CUDA_SUCCESS) {
        *flags = 0;
        *active = host_device_alive(&host_devices[dev]);
    }
    return host_leave("cuDevicePrimaryCtxGetState", NULL, NULL, result);
}

CUresult cuCtxGetDevice_v2(CUdevice *dev, CUcontext ctx) {
    CUresult result = host_enter("cuCtxGetDevice_v2", HOST_NEEDS_INIT);
    host_device_t *device = NULL;
    if (result == CUDA_SUCCESS)
        result = dev != NULL ? named_context(ctx, &device) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *dev = device->ordinal;
    return host_leave("cuCtxGetDevice_v2", NULL, ctx, result);
}

CUresult cuCtxSynchronize_v2(CUcontext ctx) {
    CUresult result = host_enter("cuCtxSynchronize_v2", HOST_NEEDS_INIT);
    host_device_t *device = NULL;
    if (result == CUDA_SUCCESS)
        result = named_context(ctx, &device);
    if (result == CUDA_SUCCESS)
        result = synchronize("cuCtxSynchronize_v2", device);
    return host_leave("cuCtxSynchronize_v2", NULL, ctx, result);
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
        result = synchronize("cuCtxSynchronize", host_thread.current);
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
