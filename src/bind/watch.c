/* Waits for streams and events: operations without a native call, on the same tracks and under the same
 * waiter. */
#include "bind.h"

/* It takes part in no abort and is never failed: it only lends its device and its pending list. */
static pn_comm_t *watcher_of(pn_device_t *device) {
    pthread_mutex_lock(&device->lock);
    pn_comm_t *watcher = device->watcher;
    pthread_mutex_unlock(&device->lock);
    if (watcher)
        return watcher;
    pn_comm_t *made = pn_comm_new(device, 0, 1);
    if (!made)
        return NULL;
    made->state = PN_READY;
    pthread_mutex_lock(&device->lock);
    if (!device->watcher)
        device->watcher = made;
    watcher = device->watcher;
    pthread_mutex_unlock(&device->lock);
    if (watcher != made)
        pn_comm_release(made);
    else
        atomic_fetch_sub(&pn_counts.communicators, 1); /* it is nobody's */
    return watcher;
}

static void enlist(pn_op_t *op, pn_track_t *track, CUevent event) {
    pn_device_t *device = track->device;
    pthread_mutex_lock(&device->lock);
    op->event = event;
    pn_enlist(op);
    pn_track_append(track, op);
    pthread_mutex_unlock(&device->lock);
    pn_waiter_ring(false);
}

CUresult pn_watch_stream(pn_op_t *op, pn_device_t *device, CUstream stream) {
    pn_enter_t saved;
    CUevent event = NULL;
    op->kind = PN_EVENT;
    if (!(op->comm = watcher_of(device)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = pn_enter(device, &saved);
    if (rc != CUDA_SUCCESS)
        return rc;
    pn_track_t *track = pn_track_find(device, stream, &rc);
    if (track && (rc = pn_event_take(device, &event)) == CUDA_SUCCESS) {
        if ((rc = device->engine->cuda.cuEventRecord(event, stream)) == CUDA_SUCCESS) {
            pn_op_start(op);
            enlist(op, track, event);
        } else {
            pthread_mutex_lock(&device->lock);
            pn_event_put(device, event);
            pthread_mutex_unlock(&device->lock);
        }
    }
    pn_leave(device, &saved);
    return rc;
}

CUresult pn_watch_event(pn_op_t *op, pn_device_t *device, CUevent event) {
    op->kind = PN_EVENT;
    op->foreign_event = true;
    pn_track_t *track = pn_track_alone(device);
    if (!(op->comm = watcher_of(device)) || !track)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pn_op_start(op);
    enlist(op, track, event);
    return CUDA_SUCCESS;
}
