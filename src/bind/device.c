/* Devices: the primary context, idle events, gates, and the tracks of streams that are not ours. */
#include "bind.h"

#include <limits.h>
#include <stdlib.h>

pn_device_t *_Atomic pn_devices;
static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;

static pn_device_t *make(pn_engine_t *engine, int ordinal, pn_outcome_t *why) {
    const pn_cuda_t *cuda = &engine->cuda;
    pn_device_t *device = calloc(1, sizeof *device);
    CUresult rc = CUDA_ERROR_OUT_OF_MEMORY;
    why->function = "calloc";
    if (!device)
        goto failed;
    device->engine = engine;
    device->ordinal = ordinal;
#define TRY(call, name)                                                                                      \
    do {                                                                                                     \
        why->function = name;                                                                                \
        if ((rc = cuda->call) != CUDA_SUCCESS)                                                               \
            goto failed;                                                                                     \
    } while (0)
    TRY(cuInit(0), "cuInit");
    TRY(cuDeviceGet(&device->device, ordinal), "cuDeviceGet");
    /* The primary context, so that torch, cupy and everyone else in the process share it with us. */
    TRY(cuDevicePrimaryCtxRetain(&device->context, device->device), "cuDevicePrimaryCtxRetain");
#undef TRY
    int waits = 0;
    if (cuda->cuDeviceGetAttribute(&waits, CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1, device->device) !=
            CUDA_SUCCESS ||
        !waits) {
        /* Since CUDA 12 memory waits exist wherever they can be used at all; the old attribute may say 0. */
        waits = engine->driver_version >= 12000;
    }
    device->has_memory_waits = waits != 0;
    pthread_mutex_init(&device->issue, NULL);
    pthread_mutex_init(&device->lock, NULL);
    pn_link_init(&device->tracks);
    pn_link_init(&device->comms);
    pn_link_init(&device->foreign);
    pn_link_init(&device->called);
    device->next_deadline = PN_NO_DEADLINE;
    return device;
failed:
    why->source = PN_FROM_CUDA;
    why->code = rc;
    free(device);
    return NULL;
}

pn_device_t *pn_device_get(pn_engine_t *engine, int ordinal, pn_outcome_t *why) {
    pthread_mutex_lock(&making);
    pn_device_t *device = atomic_load(&pn_devices);
    while (device && (device->engine != engine || device->ordinal != ordinal))
        device = device->next;
    if (!device && (device = make(engine, ordinal, why))) {
        device->next = atomic_load(&pn_devices);
        atomic_store(&pn_devices, device);
    }
    pthread_mutex_unlock(&making);
    return device;
}

CUresult pn_enter(pn_device_t *device, pn_enter_t *saved) {
    const pn_cuda_t *cuda = &device->engine->cuda;
    saved->mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    cuda->cuThreadExchangeStreamCaptureMode(&saved->mode);
    saved->context = NULL;
    saved->changed = false;
    CUresult rc = cuda->cuCtxGetCurrent(&saved->context);
    if (rc == CUDA_SUCCESS && saved->context != device->context) {
        rc = cuda->cuCtxSetCurrent(device->context);
        saved->changed = rc == CUDA_SUCCESS;
    }
    if (rc != CUDA_SUCCESS)
        cuda->cuThreadExchangeStreamCaptureMode(&saved->mode);
    return rc;
}

void pn_leave(pn_device_t *device, pn_enter_t *saved) {
    const pn_cuda_t *cuda = &device->engine->cuda;
    if (saved->changed)
        cuda->cuCtxSetCurrent(saved->context);
    cuda->cuThreadExchangeStreamCaptureMode(&saved->mode);
}

/* ---- events --------------------------------------------------------------------------------------- */

CUresult pn_event_take(pn_device_t *device, CUevent *event) {
    *event = NULL;
    pthread_mutex_lock(&device->lock);
    if (device->event_count)
        *event = device->events[--device->event_count];
    pthread_mutex_unlock(&device->lock);
    if (*event)
        return CUDA_SUCCESS;
    CUresult rc = device->engine->cuda.cuEventCreate(event, CU_EVENT_DISABLE_TIMING);
    if (rc == CUDA_SUCCESS)
        atomic_fetch_add(&pn_counts.events, 1);
    return rc;
}

void pn_event_put(pn_device_t *device, CUevent event) {
    if (device->event_count == device->event_room) {
        int room = device->event_room ? 2 * device->event_room : 64;
        CUevent *events = realloc(device->events, (size_t)room * sizeof *events);
        if (!events)
            return; /* the event is lost, which is better than a wait that never ends */
        device->events = events;
        device->event_room = room;
    }
    device->events[device->event_count++] = event;
}

/* ---- gates: a caller's stream held back until a deferred operation has run ----------------------------- */

#define GATES_A_PAGE 64

static CUresult gates_add(pn_device_t *device) {
    const pn_cuda_t *cuda = &device->engine->cuda;
    void *page;
    CUdeviceptr address;
    CUresult rc = cuda->cuMemHostAlloc(&page, GATES_A_PAGE * sizeof(uint64_t),
                                       CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
    if (rc != CUDA_SUCCESS)
        return rc;
    if ((rc = cuda->cuMemHostGetDevicePointer_v2(&address, page, 0)) != CUDA_SUCCESS) {
        cuda->cuMemFreeHost(page);
        return rc;
    }
    pn_gate_t *gates = calloc(GATES_A_PAGE, sizeof *gates);
    if (!gates) {
        cuda->cuMemFreeHost(page);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&device->lock);
    for (int i = 0; i < GATES_A_PAGE; i++) {
        gates[i].word = (volatile uint32_t *)page + 2 * i;
        *gates[i].word = 0;
        gates[i].address = address + (CUdeviceptr)i * sizeof(uint64_t);
        gates[i].next = device->gates;
        device->gates = &gates[i];
    }
    pthread_mutex_unlock(&device->lock);
    atomic_fetch_add(&pn_counts.gates, GATES_A_PAGE);
    return CUDA_SUCCESS;
}

CUresult pn_gate_add(pn_op_t *op, CUstream stream) {
    pn_device_t *device = op->comm->device;
    const pn_cuda_t *cuda = &device->engine->cuda;
    if (!device->has_memory_waits)
        return CUDA_ERROR_NOT_SUPPORTED;
    pn_gate_t *gate = NULL;
    CUdeviceptr address = 0;
    uint32_t value = 0;
    CUresult rc = CUDA_SUCCESS;
    while (!gate && rc == CUDA_SUCCESS) {
        pthread_mutex_lock(&device->lock);
        bool closed = op->gates_closed;
        if (!closed && (gate = device->gates)) {
            device->gates = gate->next;
            address = gate->address;
            value = ++gate->value; /* it may be put back, and serve again, as soon as the lock is free */
            gate->next = op->gates;
            op->gates = gate;
        }
        pthread_mutex_unlock(&device->lock);
        if (closed)
            return CUDA_ERROR_NOT_READY;
        if (!gate)
            rc = gates_add(device);
    }
    if (rc != CUDA_SUCCESS)
        return rc;
    /* Comparison is signed and modular, so a gate may serve for ever. */
    return cuda->cuStreamWaitValue32_v2(stream, address, value, CU_STREAM_WAIT_VALUE_GEQ);
}

CUresult pn_gates_release(pn_op_t *op, CUstream stream) {
    pn_device_t *device = op->comm->device;
    CUresult rc = CUDA_SUCCESS;
    pthread_mutex_lock(&device->lock);
    op->gates_closed = true;
    pn_gate_t *gate = op->gates;
    pthread_mutex_unlock(&device->lock);
    for (; gate && rc == CUDA_SUCCESS; gate = gate->next)
        rc = device->engine->cuda.cuStreamWriteValue32_v2(stream, gate->address, gate->value,
                                                          CU_STREAM_WRITE_VALUE_DEFAULT);
    return rc;
}

void pn_gates_open(pn_op_t *op) {
    op->gates_closed = true;
    for (pn_gate_t *gate = op->gates; gate; gate = gate->next)
        *gate->word = gate->value;
}

void pn_gates_put(pn_op_t *op) {
    pn_device_t *device = op->comm->device;
    while (op->gates) {
        pn_gate_t *gate = op->gates;
        op->gates = gate->next;
        gate->next = device->gates;
        device->gates = gate;
    }
}

/* ---- tracks ----------------------------------------------------------------------------------------- */

void pn_track_start(pn_track_t *track, pn_device_t *device, CUstream stream, unsigned long long id) {
    pn_link_init(&track->ops);
    pn_link_init(&track->active);
    pn_link_init(&track->home);
    track->device = device;
    track->stream = stream;
    track->id = id;
    track->count = track->awaited = 0;
}

/* The track of an id; an idle one serves again. device->lock is held. */
static pn_track_t *track_for(pn_device_t *device, CUstream stream, unsigned long long id) {
    pn_track_t *track = NULL, *idle = NULL;
    for (pn_link_t *link = device->foreign.next; link != &device->foreign && !track; link = link->next) {
        pn_track_t *seen = PN_OWNER(link, pn_track_t, home);
        if (seen->id == id)
            track = seen;
        else if (!seen->count)
            idle = seen;
    }
    if (!track && (track = idle ? idle : calloc(1, sizeof *track))) {
        if (!idle) {
            pn_track_start(track, device, stream, id);
            pn_link_append(&device->foreign, &track->home);
        }
        track->id = id;
        track->stream = stream;
    }
    return track;
}

/* By stream id and not by handle: a destroyed stream's handle comes back for another stream, and the
 * per-thread default stream has one handle for many streams. */
pn_track_t *pn_track_find(pn_device_t *device, CUstream stream, CUresult *why) {
    unsigned long long id = 0;
    *why = device->engine->cuda.cuStreamGetId(stream, &id);
    if (*why != CUDA_SUCCESS)
        return NULL;
    pthread_mutex_lock(&device->lock);
    pn_track_t *track = track_for(device, stream, id);
    if (track)
        track->stream = stream;
    pthread_mutex_unlock(&device->lock);
    if (!track)
        *why = CUDA_ERROR_OUT_OF_MEMORY;
    return track;
}

pn_track_t *pn_track_alone(pn_device_t *device) {
    static _Atomic unsigned long long next = ULLONG_MAX; /* downwards: stream ids count upwards */
    pthread_mutex_lock(&device->lock);
    pn_track_t *track = track_for(device, NULL, atomic_fetch_sub(&next, 1));
    pthread_mutex_unlock(&device->lock);
    return track;
}
