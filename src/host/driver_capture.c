/* Stream capture: between BeginCapture and EndCapture what is queued on a stream is not run but becomes a
 * node of a graph. A stream that captures knows its last nodes, on which the next one depends; an event
 * recorded in it carries them on, so that a stream which waits for the event joins the capture.
 *
 * One lock guards all of it. Where nobody captures, `host_captures` is 0 and nothing is asked of anybody.
 */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>

struct host_capture {
    struct host_capture *next;
    uint64_t id;
    CUstreamCaptureMode mode;
    const void *thread; /* that began it: the address of its own host_thread */
    CUstream origin;
    CUgraph graph;
    bool invalid;
};

_Atomic uint32_t host_captures;
pthread_mutex_t host_capture_lock = PTHREAD_MUTEX_INITIALIZER;
static host_capture_t *captures;
static uint64_t last_id;

/* ---- sets of nodes -------------------------------------------------------------------------------- */

static bool holds(const host_nodes_t *set, CUgraphNode node) {
    for (size_t i = 0; i < set->count; i++)
        if (set->nodes[i] == node)
            return true;
    return false;
}

static bool add(host_nodes_t *set, CUgraphNode node) {
    if (holds(set, node))
        return true;
    CUgraphNode *grown = realloc(set->nodes, (set->count + 1) * sizeof *grown);
    if (grown == NULL)
        return false;
    set->nodes = grown;
    grown[set->count++] = node;
    return true;
}

static bool add_all(host_nodes_t *set, const host_nodes_t *other) {
    for (size_t i = 0; i < other->count; i++)
        if (!add(set, other->nodes[i]))
            return false;
    return true;
}

void host_nodes_clear(host_nodes_t *set) {
    free(set->nodes);
    *set = (host_nodes_t){NULL, 0};
}

/* ---- captures; all under the lock ----------------------------------------------------------------- */

static host_capture_t *find(uint64_t id) {
    host_capture_t *capture = captures;
    while (capture != NULL && capture->id != id)
        capture = capture->next;
    return capture;
}

static host_capture_t *capture_of(CUstream stream) {
    uint64_t id = atomic_load(&stream->capture);
    return id != 0 ? find(id) : NULL;
}

static CUresult invalidate(host_capture_t *capture, CUresult error) {
    if (capture != NULL)
        capture->invalid = true;
    return error;
}

static void join(CUstream stream, host_capture_t *capture) {
    atomic_store(&stream->capture, capture->id);
}

/* The capture is over: its streams are streams again. */
static void finish(host_capture_t *capture) {
    for (uint32_t i = 0; i < host_streams_used(); i++) {
        CUstream stream = host_stream_slot(i);
        if (atomic_load(&stream->capture) == capture->id) {
            host_nodes_clear(&stream->tails);
            atomic_store(&stream->capture, 0);
        }
    }
    host_capture_t **link = &captures;
    while (*link != capture)
        link = &(*link)->next;
    *link = capture->next;
    atomic_fetch_sub(&host_captures, 1);
    free(capture);
}

/* Has all that the capture's streams did come together in the one where it began? */
static bool is_joined(const host_capture_t *capture) {
    host_graph_mark(capture->graph, &capture->origin->tails);
    for (uint32_t i = 0; i < host_streams_used(); i++) {
        CUstream stream = host_stream_slot(i);
        if (atomic_load(&stream->capture) != capture->id)
            continue;
        for (size_t k = 0; k < stream->tails.count; k++)
            if (!host_graph_marked(stream->tails.nodes[k]))
                return false;
    }
    return true;
}

/* The legacy stream would have to wait for a capture of a blocking stream of its device. */
static host_capture_t *in_the_way(CUstream legacy) {
    for (uint32_t i = 0; i < host_streams_used(); i++) {
        CUstream stream = host_stream_slot(i);
        host_capture_t *capture = capture_of(stream);
        if (capture != NULL && stream->device == legacy->device && !(stream->flags & CU_STREAM_NON_BLOCKING))
            return capture;
    }
    return NULL;
}

static CUresult check_legacy(CUstream stream) {
    host_capture_t *capture = stream->flags & HOST_STREAM_LEGACY ? in_the_way(stream) : NULL;
    return capture != NULL ? invalidate(capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) : CUDA_SUCCESS;
}

/* ---- what others ask ------------------------------------------------------------------------------ */

/* Global: no thread but a relaxed one does anything unsafe while this capture goes on. Thread-local: only the
 * thread that began it does not. */
static bool forbids(const host_capture_t *capture) {
    const host_thread_t *thread = &host_thread;
    if (thread->capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED ||
        capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return false;
    return capture->thread == thread || (thread->capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                                         capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
}

CUresult host_capture_unsafe_slowly(const char *function) {
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&host_capture_lock);
    for (host_capture_t *capture = captures; capture != NULL; capture = capture->next)
        if (forbids(capture))
            result = invalidate(capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    pthread_mutex_unlock(&host_capture_lock);
    if (result != CUDA_SUCCESS)
        host_last_error("%s is not permitted while a stream is being captured, and has broken the capture "
                        "(cuThreadExchangeStreamCaptureMode: relaxed permits it)",
                        function);
    return result;
}

/* Waiting for work that is only being written down, or asking about it, never makes sense. */
CUresult host_capture_ask_slowly(const char *function, CUstream stream) {
    pthread_mutex_lock(&host_capture_lock);
    CUresult result = check_legacy(stream);
    if (atomic_load(&stream->capture) != 0)
        result = invalidate(capture_of(stream), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    pthread_mutex_unlock(&host_capture_lock);
    return result == CUDA_SUCCESS ? host_capture_unsafe_slowly(function) : result;
}

CUresult host_capture_device_slowly(const char *function, host_device_t *device) {
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&host_capture_lock);
    for (host_capture_t *capture = captures; capture != NULL; capture = capture->next)
        if (capture->origin->device == device)
            result = invalidate(capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    pthread_mutex_unlock(&host_capture_lock);
    return result == CUDA_SUCCESS ? host_capture_unsafe_slowly(function) : result;
}

static CUresult refuse_work(host_capture_t *capture) {
    host_last_error(
        "the host engine captures copies, fills, words in memory, host functions and NCCL operations, "
        "and neither allocations nor launches of graphs");
    return invalidate(capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

CUresult host_capture_work(CUstream stream, host_work_t *work, bool *captured) {
    *captured = false;
    pthread_mutex_lock(&host_capture_lock);
    host_capture_t *capture = capture_of(stream);
    CUresult result = check_legacy(stream);
    if (result == CUDA_SUCCESS && capture != NULL) {
        *captured = true;
        CUgraphNode node = NULL;
        if (capture->invalid)
            result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        else if (work->again == NULL)
            result = refuse_work(capture);
        else if ((node = host_graph_add(capture->graph, work, &stream->tails)) == NULL)
            result = CUDA_ERROR_OUT_OF_MEMORY;
        if (node != NULL) {
            stream->tails.count = 0;
            if (!add(&stream->tails, node))
                result = invalidate(capture, CUDA_SUCCESS); /* the node has the item now */
        }
    }
    pthread_mutex_unlock(&host_capture_lock);
    return result;
}

/* Put the nodes that `id` stands for before the next one of the stream. Under the lock. */
static CUresult depend(CUstream stream, uint64_t id, const host_nodes_t *nodes) {
    host_capture_t *own = capture_of(stream), *other = id != 0 ? find(id) : NULL;
    if (own == NULL && id == 0)
        return CUDA_SUCCESS;
    if (own != NULL && own->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (id == 0)
        return invalidate(own, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    if (other == NULL) /* that capture is over: the event stands for nothing that will ever happen */
        return invalidate(own, CUDA_ERROR_CAPTURED_EVENT);
    if (other->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (own != NULL && own != other) {
        invalidate(own, CUDA_SUCCESS);
        return invalidate(other, CUDA_ERROR_STREAM_CAPTURE_MERGE);
    }
    if (own == NULL && stream->flags & HOST_STREAM_LEGACY)
        return invalidate(other, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    if (!add_all(&stream->tails, nodes))
        return invalidate(other, CUDA_ERROR_OUT_OF_MEMORY);
    join(stream, other);
    return CUDA_SUCCESS;
}

CUresult host_capture_follow(CUstream waiter, CUstream signaller, bool *captured) {
    pthread_mutex_lock(&host_capture_lock);
    uint64_t id = atomic_load(&signaller->capture);
    *captured = id != 0 || atomic_load(&waiter->capture) != 0;
    CUresult result = check_legacy(waiter);
    if (result == CUDA_SUCCESS)
        result = depend(waiter, id, &signaller->tails);
    pthread_mutex_unlock(&host_capture_lock);
    return result;
}

CUresult host_capture_wait(CUstream stream, const host_captured_t *event, bool *captured) {
    pthread_mutex_lock(&host_capture_lock);
    *captured = event->id != 0 || atomic_load(&stream->capture) != 0;
    CUresult result = check_legacy(stream);
    if (result == CUDA_SUCCESS)
        result = depend(stream, event->id, &event->nodes);
    pthread_mutex_unlock(&host_capture_lock);
    return result;
}

CUresult host_capture_record(CUstream stream, host_captured_t *event) {
    pthread_mutex_lock(&host_capture_lock);
    host_capture_t *capture = capture_of(stream);
    CUresult result = check_legacy(stream);
    host_nodes_clear(&event->nodes);
    event->id = 0;
    if (result == CUDA_SUCCESS && capture != NULL && capture->invalid)
        result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (result == CUDA_SUCCESS && capture != NULL) {
        event->id = capture->id;
        if (!add_all(&event->nodes, &stream->tails))
            result = invalidate(capture, CUDA_ERROR_OUT_OF_MEMORY);
    }
    pthread_mutex_unlock(&host_capture_lock);
    return result;
}

void host_capture_forget(host_captured_t *event) {
    pthread_mutex_lock(&host_capture_lock);
    host_nodes_clear(&event->nodes);
    event->id = 0;
    pthread_mutex_unlock(&host_capture_lock);
}

CUresult host_capture_asked(const host_captured_t *event) {
    pthread_mutex_lock(&host_capture_lock);
    invalidate(event->id != 0 ? find(event->id) : NULL, CUDA_SUCCESS);
    pthread_mutex_unlock(&host_capture_lock);
    return CUDA_ERROR_CAPTURED_EVENT;
}

CUresult host_stream_capturing(CUstream handle, uint64_t *id) {
    CUstream stream;
    *id = 0;
    CUresult result = host_stream_resolve(handle, &stream);
    if (result != CUDA_SUCCESS || atomic_load(&host_captures) == 0)
        return result;
    pthread_mutex_lock(&host_capture_lock);
    host_capture_t *capture = capture_of(stream);
    if (capture != NULL)
        *id = capture->id;
    if (capture != NULL && capture->invalid)
        result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    pthread_mutex_unlock(&host_capture_lock);
    return result;
}

/* The stream ends in the middle of its capture. */
void host_capture_abandon(CUstream stream) {
    pthread_mutex_lock(&host_capture_lock);
    host_capture_t *capture = capture_of(stream);
    invalidate(capture, CUDA_SUCCESS);
    if (capture != NULL && capture->origin == stream) { /* nobody can end it any more */
        host_graph_drop(capture->graph);
        finish(capture);
    }
    host_nodes_clear(&stream->tails);
    atomic_store(&stream->capture, 0);
    pthread_mutex_unlock(&host_capture_lock);
}

/* ---- exported ------------------------------------------------------------------------------------- */

static CUresult begin(CUstream stream, CUstreamCaptureMode mode) {
    if (mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream->flags & HOST_STREAM_LEGACY)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (atomic_load(&stream->capture) != 0)
        return CUDA_ERROR_ILLEGAL_STATE;
    CUresult result = host_device_error(stream->device);
    if (result != CUDA_SUCCESS)
        return result;
    host_capture_t *capture = calloc(1, sizeof *capture);
    CUgraph graph = host_graph_new();
    if (capture == NULL || graph == NULL) {
        free(capture);
        host_graph_drop(graph);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *capture = (host_capture_t){.next = captures,
                                .id = ++last_id,
                                .mode = mode,
                                .thread = &host_thread,
                                .origin = stream,
                                .graph = graph};
    captures = capture;
    atomic_fetch_add(&host_captures, 1);
    join(stream, capture);
    return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    CUresult result = host_enter("cuStreamBeginCapture_v2", HOST_NEEDS_CONTEXT);
    CUstream found;
    if (result == CUDA_SUCCESS)
        result = host_stream_resolve(stream, &found);
    if (result == CUDA_SUCCESS) {
        pthread_mutex_lock(&host_capture_lock);
        result = begin(found, mode);
        pthread_mutex_unlock(&host_capture_lock);
    }
    return host_leave("cuStreamBeginCapture_v2", stream, NULL, result);
}

static CUresult end(CUstream stream, CUgraph *graph) {
    host_capture_t *capture = capture_of(stream);
    if (capture == NULL)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != &host_thread)
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    if (capture->origin != stream)
        return invalidate(capture, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    CUresult result = CUDA_SUCCESS;
    if (capture->invalid)
        result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    else if (!is_joined(capture))
        result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    if (result == CUDA_SUCCESS) {
        *graph = capture->graph;
        host_graph_end(capture->graph);
    } else {
        host_graph_drop(capture->graph);
    }
    finish(capture);
    return result;
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    CUresult result = host_enter("cuStreamEndCapture", HOST_NEEDS_CONTEXT);
    CUstream found;
    if (result == CUDA_SUCCESS)
        result = graph != NULL ? host_stream_resolve(stream, &found) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *graph = NULL;
        pthread_mutex_lock(&host_capture_lock);
        result = end(found, graph);
        pthread_mutex_unlock(&host_capture_lock);
    }
    return host_leave("cuStreamEndCapture", stream, NULL, result);
}

/* Any of the outputs but the status may be NULL. */
static CUresult describe(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                         const CUgraphNode **dependencies, size_t *count) {
    host_capture_t *capture = capture_of(stream);
    if (check_legacy(stream) != CUDA_SUCCESS)
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    *status = capture == NULL    ? CU_STREAM_CAPTURE_STATUS_NONE
              : capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                 : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
        return CUDA_SUCCESS;
    if (id != NULL)
        *id = capture->id;
    if (graph != NULL)
        *graph = capture->graph;
    if (dependencies != NULL)
        *dependencies = stream->tails.nodes;
    if (count != NULL)
        *count = stream->tails.count;
    return CUDA_SUCCESS;
}

static CUresult describe_call(const char *function, CUstream stream, CUstreamCaptureStatus *status,
                              cuuint64_t *id, CUgraph *graph, const CUgraphNode **dependencies,
                              size_t *count) {
    CUresult result = host_enter(function, HOST_NEEDS_CONTEXT);
    CUstream found;
    if (result == CUDA_SUCCESS)
        result = status != NULL ? host_stream_resolve(stream, &found) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && atomic_load(&host_captures) == 0) {
        *status = CU_STREAM_CAPTURE_STATUS_NONE;
    } else if (result == CUDA_SUCCESS) {
        pthread_mutex_lock(&host_capture_lock);
        result = describe(found, status, id, graph, dependencies, count);
        pthread_mutex_unlock(&host_capture_lock);
    }
    return host_leave(function, stream, NULL, result);
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    return describe_call("cuStreamIsCapturing", stream, status, NULL, NULL, NULL, NULL);
}

CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id,
                                   CUgraph *graph, const CUgraphNode **dependencies, size_t *count) {
    return describe_call("cuStreamGetCaptureInfo_v2", stream, status, id, graph, dependencies, count);
}

CUresult cuStreamGetCaptureInfo_v3(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id,
                                   CUgraph *graph, const CUgraphNode **dependencies,
                                   const CUgraphEdgeData **edges, size_t *count) {
    if (edges != NULL)
        *edges = NULL; /* all edges are of the plain kind */
    return describe_call("cuStreamGetCaptureInfo_v3", stream, status, id, graph, dependencies, count);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    CUresult result = host_enter("cuThreadExchangeStreamCaptureMode", HOST_NEEDS_INIT);
    if (result == CUDA_SUCCESS && (mode == NULL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        CUstreamCaptureMode before = host_thread.capture_mode;
        host_thread.capture_mode = *mode;
        *mode = before;
    }
    return host_leave("cuThreadExchangeStreamCaptureMode", NULL, NULL, result);
}
