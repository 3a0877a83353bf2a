/* Streams: making and ending them, what a handle means, and the exported functions. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>

host_pool_t host_stream_pool = {
    .capacity = HOST_MAX_STREAMS, .slot_bytes = HOST_STREAM_BYTES, .lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- making and ending ---------------------------------------------------------------------------- */

CUresult host_stream_make(host_device_t *device, unsigned int flags, int priority, CUstream *made) {
    static _Atomic uint64_t last_id;
    CUstream stream = host_pool_take(&host_stream_pool);
    if (stream == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&stream->lock);
    stream->device = device;
    stream->flags = flags;
    stream->priority = priority;
    stream->id = atomic_fetch_add(&last_id, 1) + 1;
    stream->state = HOST_SLOT_LIVE;
    pthread_mutex_unlock(&stream->lock);
    atomic_store_explicit(&stream->magic, HOST_MAGIC_STREAM, memory_order_release);
    if (!(flags & (HOST_STREAM_LEGACY | HOST_STREAM_PER_THREAD)))
        atomic_fetch_add(&host_live_streams, 1);
    *made = stream;
    return CUDA_SUCCESS;
}

void host_stream_close(CUstream stream) {
    uint32_t live = HOST_MAGIC_STREAM;
    if (!atomic_compare_exchange_strong(&stream->magic, &live, HOST_MAGIC_DEAD))
        return;
    if (atomic_load(&stream->capture) != 0)
        host_capture_abandon(stream);
    pthread_mutex_lock(&stream->lock);
    if (!(stream->flags & (HOST_STREAM_LEGACY | HOST_STREAM_PER_THREAD)))
        atomic_fetch_sub(&host_live_streams, 1);
    stream->state = HOST_SLOT_DYING;
    pthread_mutex_unlock(&stream->lock);
    host_bell_ring(&stream->call);
    host_stream_retire(stream);
}

/* Give the slot back, once the last item is done and the worker is gone: each of them calls this. */
void host_stream_retire(CUstream stream) {
    pthread_mutex_lock(&stream->lock);
    bool over = stream->state == HOST_SLOT_DYING && host_stream_idle(stream) && !stream->worker;
    if (over)
        stream->state = HOST_SLOT_FREE;
    pthread_mutex_unlock(&stream->lock);
    if (over)
        host_pool_give(&host_stream_pool, stream);
}

bool host_stream_of(CUstream stream, host_device_t *device, unsigned int unwanted_flags) {
    pthread_mutex_lock(&stream->lock);
    bool is =
        stream->state != HOST_SLOT_FREE && stream->device == device && !(stream->flags & unwanted_flags);
    pthread_mutex_unlock(&stream->lock);
    return is;
}

void host_stream_fail(CUstream stream, host_device_t *device) {
    if (!host_stream_of(stream, device, 0))
        return;
    pthread_mutex_lock(&stream->lock);
    if (stream->sleeping_on != NULL)
        host_bell_ring(stream->sleeping_on);
    pthread_mutex_unlock(&stream->lock);
    host_bell_ring(&stream->done);
    if (!host_stream_idle(stream))
        host_worker_call(stream);
}

void host_streams_close_all(host_device_t *device) {
    atomic_store(&device->legacy, NULL);
    for (uint32_t i = 0; i < host_streams_used(); i++) {
        CUstream stream = host_stream_slot(i);
        if (host_stream_of(stream, device, 0)) {
            host_stream_close(stream);
            host_place_drain(host_stream_end(stream));
        }
    }
}

/* ---- handles -------------------------------------------------------------------------------------- */

static CUresult legacy_stream(host_device_t *device, CUstream *stream) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    CUresult result = CUDA_SUCCESS;
    *stream = atomic_load(&device->legacy);
    if (*stream != NULL)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    *stream = atomic_load(&device->legacy);
    if (*stream == NULL) {
        result = host_stream_make(device, HOST_STREAM_LEGACY, HOST_PRIORITY_LEAST, stream);
        if (result == CUDA_SUCCESS)
            atomic_store(&device->legacy, *stream);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static pthread_key_t thread_key;
static pthread_once_t thread_key_once = PTHREAD_ONCE_INIT;

static void close_thread_streams(void *argument) {
    CUstream *streams = argument;
    host_thread.per_thread = NULL;
    for (int i = 0; i < HOST_MAX_DEVICES && host_driver_initialised(); i++) /* not in a forked child */
        if (streams[i] != NULL)
            host_stream_close(streams[i]);
    free(streams);
}

static void make_thread_key(void) {
    pthread_key_create(&thread_key, close_thread_streams);
}

static bool is_live(CUstream stream) {
    return atomic_load_explicit(&stream->magic, memory_order_acquire) == HOST_MAGIC_STREAM;
}

static CUresult thread_stream(host_device_t *device, CUstream *stream) {
    if (host_thread.per_thread == NULL) {
        pthread_once(&thread_key_once, make_thread_key);
        host_thread.per_thread = calloc(HOST_MAX_DEVICES, sizeof(CUstream));
        if (host_thread.per_thread == NULL)
            return CUDA_ERROR_OUT_OF_MEMORY;
        pthread_setspecific(thread_key, host_thread.per_thread);
    }
    CUstream *mine = &host_thread.per_thread[device->ordinal];
    /* the context may have ended since, and its streams with it */
    if (*mine == NULL || !is_live(*mine)) {
        CUresult result = host_stream_make(device, HOST_STREAM_PER_THREAD, HOST_PRIORITY_LEAST, mine);
        if (result != CUDA_SUCCESS)
            return result;
    }
    *stream = *mine;
    return CUDA_SUCCESS;
}

CUresult host_stream_resolve(CUstream handle, CUstream *stream) {
    if (HOST_LIKELY(host_pool_holds(&host_stream_pool, handle))) {
        *stream = handle;
        return is_live(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    }
    if (handle != NULL && handle != CU_STREAM_LEGACY && handle != CU_STREAM_PER_THREAD)
        return CUDA_ERROR_INVALID_HANDLE;
    host_device_t *device = host_thread.current;
    if (device == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!host_device_alive(device))
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return handle == CU_STREAM_PER_THREAD ? thread_stream(device, stream) : legacy_stream(device, stream);
}

CUresult host_stream_device(CUstream handle, int *device) {
    CUstream stream;
    CUresult result = host_stream_resolve(handle, &stream);
    if (result == CUDA_SUCCESS)
        *device = stream->device->ordinal;
    return result;
}

/* ---- exported ------------------------------------------------------------------------------------- */

static CUresult create(CUstream *stream, unsigned int flags, int priority) {
    if (stream == NULL || (flags & ~(unsigned int)CU_STREAM_NON_BLOCKING) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = host_device_error(host_thread.current);
    if (result != CUDA_SUCCESS)
        return result;
    if (priority > HOST_PRIORITY_LEAST)
        priority = HOST_PRIORITY_LEAST;
    if (priority < HOST_PRIORITY_GREATEST)
        priority = HOST_PRIORITY_GREATEST;
    return host_stream_make(host_thread.current, flags, priority, stream);
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority) {
    CUresult result = host_enter("cuStreamCreateWithPriority", HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS)
        result = create(stream, flags, priority);
    return host_leave("cuStreamCreateWithPriority", result == CUDA_SUCCESS ? *stream : NULL, NULL, result);
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags) {
    CUresult result = host_enter("cuStreamCreate", HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS)
        result = create(stream, flags, HOST_PRIORITY_LEAST);
    return host_leave("cuStreamCreate", result == CUDA_SUCCESS ? *stream : NULL, NULL, result);
}

CUresult cuStreamDestroy_v2(CUstream stream) {
    CUresult result = host_enter("cuStreamDestroy_v2", HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS && !host_pool_holds(&host_stream_pool, stream))
        result = CUDA_ERROR_INVALID_HANDLE; /* the special handles are not to be destroyed either */
    if (result == CUDA_SUCCESS && !is_live(stream))
        result = CUDA_ERROR_INVALID_HANDLE;
    if (result == CUDA_SUCCESS) {
        result = host_device_error(stream->device);
        host_stream_close(stream);
    }
    return host_leave("cuStreamDestroy_v2", stream, NULL, result);
}

static CUresult query(CUstream stream) {
    CUresult result = host_device_error(stream->device);
    if (result != CUDA_SUCCESS)
        return result;
    if (host_config()->temper == HOST_GPULIKE)
        host_gate_query(stream->device);
    else
        host_stream_poll(stream);
    bool ready = host_stream_idle(stream);
    if (ready && stream->flags & HOST_STREAM_LEGACY)
        ready = host_stream_legacy_ready(stream);
    result = host_device_error(stream->device);
    return result == CUDA_SUCCESS && !ready ? CUDA_ERROR_NOT_READY : result;
}

CUresult cuStreamQuery(CUstream stream) {
    CUresult result = host_enter("cuStreamQuery", HOST_NEEDS_CONTEXT);
    CUstream found;
    if (result == CUDA_SUCCESS)
        result = host_stream_resolve(stream, &found);
    if (result == CUDA_SUCCESS)
        result = host_capture_ask("cuStreamQuery", found);
    if (result == CUDA_SUCCESS)
        result = query(found);
    return host_leave("cuStreamQuery", stream, NULL, result);
}

CUresult cuStreamSynchronize(CUstream stream) {
    CUresult result = host_enter("cuStreamSynchronize", HOST_NEEDS_CONTEXT);
    CUstream found;
    if (result == CUDA_SUCCESS)
        result = host_stream_resolve(stream, &found);
    if (result == CUDA_SUCCESS)
        result = host_capture_ask("cuStreamSynchronize", found);
    if (result == CUDA_SUCCESS)
        result = host_stream_synchronize(found);
    return host_leave("cuStreamSynchronize", stream, NULL, result);
}

/* In and out of a call that only reads what a stream is. */
static CUresult look_at(const char *function, CUstream handle, const void *out, CUstream *stream) {
    CUresult result = host_enter(function, HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS)
        result = out != NULL ? host_stream_resolve(handle, stream) : CUDA_ERROR_INVALID_VALUE;
    return host_leave(function, handle, NULL, result);
}

CUresult cuStreamGetId(CUstream stream, unsigned long long *id) {
    CUstream found;
    CUresult result = look_at("cuStreamGetId", stream, id, &found);
    if (result == CUDA_SUCCESS)
        *id = found->id;
    return result;
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext *ctx) {
    CUstream found;
    CUresult result = look_at("cuStreamGetCtx", stream, ctx, &found);
    if (result == CUDA_SUCCESS)
        *ctx = found->device;
    return result;
}

CUresult cuStreamGetCtx_v2(CUstream stream, CUcontext *ctx, CUgreenCtx *greenCtx) {
    CUstream found;
    CUresult result = look_at("cuStreamGetCtx_v2", stream, ctx, &found);
    if (result == CUDA_SUCCESS)
        *ctx = found->device;
    if (result == CUDA_SUCCESS && greenCtx != NULL)
        *greenCtx = NULL; /* there are none */
    return result;
}

CUresult cuStreamGetDevice(CUstream stream, CUdevice *dev) {
    CUstream found;
    CUresult result = look_at("cuStreamGetDevice", stream, dev, &found);
    if (result == CUDA_SUCCESS)
        *dev = found->device->ordinal;
    return result;
}

CUresult cuStreamGetFlags(CUstream stream, unsigned int *flags) {
    CUstream found;
    CUresult result = look_at("cuStreamGetFlags", stream, flags, &found);
    if (result == CUDA_SUCCESS)
        *flags = found->flags & CU_STREAM_NON_BLOCKING;
    return result;
}

CUresult cuStreamGetPriority(CUstream stream, int *priority) {
    CUstream found;
    CUresult result = look_at("cuStreamGetPriority", stream, priority, &found);
    if (result == CUDA_SUCCESS)
        *priority = found->priority;
    return result;
}
