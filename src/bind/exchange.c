/* Order between the streams of arrays' producers and those on which operations run. */
#include "bind.h"

CUresult pn_order_streams(pn_device_t *device, CUstream first, CUstream later) {
    const pn_cuda_t *cuda = &device->engine->cuda;
    pn_enter_t saved;
    CUevent event;
    CUresult rc = pn_enter(device, &saved);
    if (rc != CUDA_SUCCESS)
        return rc;
    if ((rc = pn_event_take(device, &event)) == CUDA_SUCCESS) {
        if ((rc = cuda->cuEventRecord(event, first)) == CUDA_SUCCESS)
            rc = cuda->cuStreamWaitEvent(later, event, 0);
        /* The wait has taken the event's present state: a later record does not move it. */
        pthread_mutex_lock(&device->lock);
        pn_event_put(device, event);
        pthread_mutex_unlock(&device->lock);
    }
    pn_leave(device, &saved);
    return rc;
}

CUresult pn_aside(pn_comm_t *comm, CUstream *stream) {
    pn_device_t *device = comm->device;
    pn_enter_t saved;
    CUstream made = NULL;
    pthread_mutex_lock(&device->lock);
    *stream = comm->aside;
    pthread_mutex_unlock(&device->lock);
    if (*stream)
        return CUDA_SUCCESS;
    CUresult rc = pn_enter(device, &saved);
    if (rc != CUDA_SUCCESS)
        return rc;
    const pn_cuda_t *cuda = &device->engine->cuda;
    if ((rc = cuda->cuStreamCreateWithPriority(&made, CU_STREAM_NON_BLOCKING, 0)) == CUDA_SUCCESS) {
        pthread_mutex_lock(&device->lock);
        bool late = comm->aside || !comm->stream; /* another thread was faster, or has closed it */
        if (!late)
            comm->aside = made;
        *stream = comm->aside;
        pthread_mutex_unlock(&device->lock);
        if (late)
            cuda->cuStreamDestroy_v2(made);
        else
            atomic_fetch_add(&pn_counts.streams, 1);
        if (!*stream)
            rc = CUDA_ERROR_INVALID_HANDLE;
    }
    pn_leave(device, &saved);
    return rc;
}

CUresult pn_told_stream(pn_comm_t *comm, CUstream *stream) {
    pthread_mutex_lock(&comm->device->lock);
    bool deferred = comm->queue_head || comm->lane_busy;
    *stream = comm->stream;
    pthread_mutex_unlock(&comm->device->lock);
    return deferred ? pn_aside(comm, stream) : CUDA_SUCCESS;
}
