/* Graphs: what a capture has written down, and how it is run again.
 *
 * A graph does not change once its capture has ended, so that an executable graph is a reference to it. A
 * launch makes a fresh item from each node's and queues it: in the stream of the launch, or, where nodes do
 * not depend on each other, in further streams (lanes), which begin and end with the launch in its stream.
 */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>
#include <string.h>

struct CUgraphNode_st {
    host_work_t *work; /* never run; `again` makes what is */
    CUgraphNode *after;
    size_t after_count;
    size_t index;
    bool marked;
};

struct CUgraph_st {
    int refs;           /* its handle or capture, and executable graphs */
    CUgraphNode *nodes; /* each one behind all that it depends on */
    size_t count;
    bool open; /* its capture goes on */
    CUgraph next;
};

struct CUgraphExec_st {
    int refs; /* its handle, and launches on their way */
    CUgraph graph;
    CUgraphExec next;
    size_t *lane;         /* by node: 0 is the stream of the launch */
    size_t lanes;         /* beside that one */
    pthread_mutex_t lock; /* held by a launch; guards what follows */
    uint64_t context;     /* of the lanes' streams; 0 before the first launch */
    host_device_t *device;
    CUstream *streams;
    host_place_t last; /* where the launch before this one ends */
};

static pthread_mutex_t handles_lock = PTHREAD_MUTEX_INITIALIZER; /* guards references, and what follows */
static CUgraph graphs;
static CUgraphExec executables;

host_work_t *host_work_copy(const host_work_t *work, size_t bytes) {
    host_work_t *copy = malloc(bytes);
    if (copy != NULL)
        memcpy(copy, work, bytes);
    return copy;
}

/* ---- graphs --------------------------------------------------------------------------------------- */

CUgraph host_graph_new(void) {
    CUgraph graph = calloc(1, sizeof *graph);
    if (graph == NULL)
        return NULL;
    graph->refs = 1;
    graph->open = true;
    pthread_mutex_lock(&handles_lock);
    graph->next = graphs;
    graphs = graph;
    pthread_mutex_unlock(&handles_lock);
    return graph;
}

CUgraphNode host_graph_add(CUgraph graph, host_work_t *work, const host_nodes_t *after) {
    CUgraphNode *grown = realloc(graph->nodes, (graph->count + 1) * sizeof *grown);
    if (grown == NULL)
        return NULL;
    graph->nodes = grown;
    CUgraphNode node = calloc(1, sizeof *node);
    CUgraphNode *own = malloc((after->count + 1) * sizeof *own);
    if (node == NULL || own == NULL) {
        free(node);
        free(own);
        return NULL;
    }
    for (size_t i = 0; i < after->count; i++)
        own[i] = after->nodes[i];
    *node = (struct CUgraphNode_st){
        .work = work, .after = own, .after_count = after->count, .index = graph->count};
    graph->nodes[graph->count++] = node;
    return node;
}

void host_graph_mark(CUgraph graph, const host_nodes_t *ends) {
    for (size_t i = 0; i < graph->count; i++)
        graph->nodes[i]->marked = false;
    for (size_t i = 0; i < ends->count; i++)
        ends->nodes[i]->marked = true;
    for (size_t i = graph->count; i-- > 0;) /* backwards: each one is behind what it depends on */
        for (size_t k = 0; k < graph->nodes[i]->after_count && graph->nodes[i]->marked; k++)
            graph->nodes[i]->after[k]->marked = true;
}

bool host_graph_marked(CUgraphNode node) {
    return node->marked;
}

static bool is_graph(CUgraph graph) {
    CUgraph found = graphs;
    while (found != NULL && found != graph)
        found = found->next;
    return found != NULL;
}

/* One that its client may use: not that of a capture which may still add to it. */
static bool is_ended(CUgraph graph) {
    bool known = is_graph(graph);
    if (known && graph->open)
        host_last_error("the host engine shows a graph only once its capture has ended");
    return known && !graph->open;
}

void host_graph_end(CUgraph graph) {
    pthread_mutex_lock(&handles_lock);
    graph->open = false;
    pthread_mutex_unlock(&handles_lock);
}

static void hide(CUgraph graph) {
    CUgraph *link = &graphs;
    while (*link != graph)
        link = &(*link)->next;
    *link = graph->next;
}

/* Not under the lock: an item may have to tell others that it has gone. */
static void destroy(CUgraph graph) {
    for (size_t i = 0; i < graph->count; i++) {
        CUgraphNode node = graph->nodes[i];
        node->work->release(node->work);
        free(node->after);
        free(node);
    }
    free(graph->nodes);
    free(graph);
}

static void leave(CUgraph graph) {
    pthread_mutex_lock(&handles_lock);
    bool last = --graph->refs == 0;
    pthread_mutex_unlock(&handles_lock);
    if (last)
        destroy(graph);
}

void host_graph_drop(CUgraph graph) {
    if (graph == NULL)
        return;
    pthread_mutex_lock(&handles_lock);
    hide(graph);
    pthread_mutex_unlock(&handles_lock);
    leave(graph);
}

CUresult cuGraphDestroy(CUgraph graph) {
    CUresult result = host_enter("cuGraphDestroy", HOST_NEEDS_INIT);
    if (result == CUDA_SUCCESS) {
        pthread_mutex_lock(&handles_lock);
        bool found = is_ended(graph);
        if (found)
            hide(graph);
        pthread_mutex_unlock(&handles_lock);
        if (found)
            leave(graph);
        else
            result = CUDA_ERROR_INVALID_VALUE;
    }
    return host_leave("cuGraphDestroy", NULL, graph, result);
}

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
    CUresult result = host_enter("cuGraphGetNodes", HOST_NEEDS_INIT);
    pthread_mutex_lock(&handles_lock);
    if (result == CUDA_SUCCESS && (count == NULL || !is_ended(graph)))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && nodes == NULL) {
        *count = graph->count;
    } else if (result == CUDA_SUCCESS) {
        for (size_t i = 0; i < *count; i++)
            nodes[i] = i < graph->count ? graph->nodes[i] : NULL;
        if (*count > graph->count)
            *count = graph->count;
    }
    pthread_mutex_unlock(&handles_lock);
    return host_leave("cuGraphGetNodes", NULL, graph, result);
}

/* ---- executable graphs ---------------------------------------------------------------------------- */

/* A node goes on in the lane of something that it depends on, if nothing has gone on there yet. */
static void choose_lanes(CUgraphExec exec) {
    CUgraph graph = exec->graph;
    for (size_t i = 0; i < graph->count; i++)
        graph->nodes[i]->marked = false; /* now: another one goes on in this one's lane */
    bool origin_taken = false;
    for (size_t i = 0; i < graph->count; i++) {
        CUgraphNode node = graph->nodes[i], before = NULL;
        for (size_t k = 0; k < node->after_count && before == NULL; k++)
            if (!node->after[k]->marked)
                before = node->after[k];
        if (before != NULL) {
            before->marked = true;
            exec->lane[i] = exec->lane[before->index];
        } else {
            exec->lane[i] = origin_taken ? ++exec->lanes : 0;
            origin_taken = true;
        }
    }
}

static CUresult instantiate(CUgraphExec *out, CUgraph graph) {
    CUgraphExec exec = calloc(1, sizeof *exec);
    if (exec == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    exec->graph = graph;
    exec->lane = calloc(graph->count + 1, sizeof *exec->lane);
    if (exec->lane != NULL)
        choose_lanes(exec);
    exec->streams = calloc(exec->lanes + 1, sizeof *exec->streams);
    if (exec->lane == NULL || exec->streams == NULL) {
        free(exec->lane);
        free(exec->streams);
        free(exec);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    exec->refs = 1;
    pthread_mutex_init(&exec->lock, NULL);
    graph->refs++;
    exec->next = executables;
    executables = exec;
    *out = exec;
    return CUDA_SUCCESS;
}

static CUresult instantiate_call(const char *function, CUgraphExec *exec, CUgraph graph,
                                 unsigned long long flags) {
    CUresult result = host_enter(function, HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS && flags != 0) {
        host_last_error("%s: the host engine knows none of the flags 0x%llx", function, flags);
        result = CUDA_ERROR_NOT_SUPPORTED;
    }
    pthread_mutex_lock(&handles_lock);
    if (result == CUDA_SUCCESS)
        result = exec != NULL && is_ended(graph) ? instantiate(exec, graph) : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&handles_lock);
    return host_leave(function, NULL, graph, result);
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    return instantiate_call("cuGraphInstantiateWithFlags", exec, graph, flags);
}

CUresult cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph,
                                      CUDA_GRAPH_INSTANTIATE_PARAMS *parameters) {
    bool given = parameters != NULL;
    CUresult result = instantiate_call("cuGraphInstantiateWithParams", given ? exec : NULL, graph,
                                       given ? parameters->flags : 0);
    if (given) {
        parameters->hErrNode_out = NULL;
        parameters->result_out =
            result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
    }
    return result;
}

static CUgraphExec *find_executable(CUgraphExec exec) {
    CUgraphExec *link = &executables;
    while (*link != NULL && *link != exec)
        link = &(*link)->next;
    return link;
}

/* What is queued there is done first. */
static void close_lanes(CUgraphExec exec) {
    bool there = exec->context != 0 && exec->device->id == exec->context && host_device_alive(exec->device);
    for (size_t i = 0; i < exec->lanes; i++) {
        if (there && exec->streams[i] != NULL)
            host_stream_close(exec->streams[i]);
        exec->streams[i] = NULL; /* or gone with their context */
    }
    exec->context = 0;
}

static void leave_executable(CUgraphExec exec) {
    pthread_mutex_lock(&handles_lock);
    bool last = --exec->refs == 0;
    pthread_mutex_unlock(&handles_lock);
    if (!last)
        return;
    close_lanes(exec);
    leave(exec->graph);
    pthread_mutex_destroy(&exec->lock);
    free(exec->lane);
    free(exec->streams);
    free(exec);
}

CUresult cuGraphExecDestroy(CUgraphExec exec) {
    CUresult result = host_enter("cuGraphExecDestroy", HOST_NEEDS_INIT);
    if (result == CUDA_SUCCESS) {
        pthread_mutex_lock(&handles_lock);
        CUgraphExec *link = find_executable(exec);
        bool found = *link != NULL;
        if (found)
            *link = exec->next;
        pthread_mutex_unlock(&handles_lock);
        if (found)
            leave_executable(exec);
        else
            result = CUDA_ERROR_INVALID_VALUE;
    }
    return host_leave("cuGraphExecDestroy", NULL, exec, result);
}

CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *resultInfo) {
    CUresult result = host_enter("cuGraphExecUpdate_v2", HOST_NEEDS_CONTEXT);
    pthread_mutex_lock(&handles_lock);
    if (result == CUDA_SUCCESS && (resultInfo == NULL || *find_executable(exec) == NULL || !is_ended(graph)))
        result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&handles_lock);
    if (result == CUDA_SUCCESS) { /* the answer after which a client instantiates anew */
        host_last_error("cuGraphExecUpdate: the host engine changes no executable graph");
        *resultInfo = (CUgraphExecUpdateResultInfo){.result = CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED};
        result = CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    }
    return host_leave("cuGraphExecUpdate_v2", NULL, exec, result);
}

/* ---- launches ------------------------------------------------------------------------------------- */

static host_progress_t head_step(host_work_t *work) {
    (void)work;
    return HOST_DONE;
}

static void head_release(host_work_t *work) {
    free(work);
}

/* One item stands for the whole launch: its cost, its place in the launch queue, its order in the stream. */
static CUresult submit_head(CUstream stream) {
    host_work_t *head = calloc(1, sizeof *head);
    if (head == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *head = (host_work_t){.step = head_step, .release = head_release, .kind = HOST_WORK_COPY};
    CUresult result = host_stream_submit(stream, head);
    if (result != CUDA_SUCCESS)
        free(head);
    return result;
}

static CUresult ready_lanes(CUgraphExec exec, host_device_t *device) {
    if (exec->device == device && exec->context == device->id)
        return CUDA_SUCCESS;
    close_lanes(exec);
    exec->device = device;
    exec->context = device->id;
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < exec->lanes && result == CUDA_SUCCESS; i++)
        result = host_stream_make(device, CU_STREAM_NON_BLOCKING, HOST_PRIORITY_LEAST, &exec->streams[i]);
    if (result != CUDA_SUCCESS)
        close_lanes(exec);
    return result;
}

static CUresult launch_node(CUgraphNode node, CUstream stream, host_place_t begin, host_place_t *places) {
    CUresult result = node->after_count == 0 ? host_stream_wait_place(stream, begin) : CUDA_SUCCESS;
    for (size_t k = 0; k < node->after_count && result == CUDA_SUCCESS; k++)
        result = host_stream_wait_place(stream, places[node->after[k]->index]);
    host_work_t *work = result == CUDA_SUCCESS ? node->work->again(node->work) : NULL;
    if (result == CUDA_SUCCESS && work == NULL)
        result = CUDA_ERROR_OUT_OF_MEMORY;
    host_place_t *place = &places[node->index];
    place->stream = stream;
    if (result == CUDA_SUCCESS)
        result = host_stream_push(stream, work, &place->count);
    return result;
}

static CUresult launch_nodes(CUgraphExec exec, CUstream stream, host_place_t *places) {
    CUgraph graph = exec->graph;
    CUresult result = exec->last.stream != NULL ? host_stream_wait_place(stream, exec->last) : CUDA_SUCCESS;
    host_place_t begin = host_stream_end(stream);
    for (size_t i = 0; i < graph->count && result == CUDA_SUCCESS; i++) {
        size_t lane = exec->lane[i];
        result = launch_node(graph->nodes[i], lane == 0 ? stream : exec->streams[lane - 1], begin, places);
    }
    for (size_t i = 0; i < exec->lanes && result == CUDA_SUCCESS; i++)
        result = host_stream_wait_place(stream, host_stream_end(exec->streams[i]));
    exec->last = host_stream_end(stream);
    return result;
}

static CUresult launch(CUgraphExec exec, CUstream stream) {
    host_place_t *places = calloc(exec->graph->count + 1, sizeof *places);
    if (places == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = ready_lanes(exec, stream->device);
    if (result == CUDA_SUCCESS)
        result = submit_head(stream);
    if (result == CUDA_SUCCESS)
        result = launch_nodes(exec, stream, places);
    free(places);
    if (result == CUDA_SUCCESS && host_config()->launch_blocking)
        host_place_wait(host_stream_end(stream), stream->device);
    return result;
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
    CUresult result = host_enter("cuGraphLaunch", HOST_NEEDS_CONTEXT);
    CUstream found;
    if (result == CUDA_SUCCESS)
        result = host_stream_resolve(stream, &found);
    if (result == CUDA_SUCCESS) {
        pthread_mutex_lock(&handles_lock);
        bool known = *find_executable(exec) != NULL;
        if (known)
            exec->refs++;
        pthread_mutex_unlock(&handles_lock);
        result = CUDA_ERROR_INVALID_VALUE;
        if (known) {
            pthread_mutex_lock(&exec->lock);
            result = launch(exec, found);
            pthread_mutex_unlock(&exec->lock);
            leave_executable(exec);
        }
    }
    return host_leave("cuGraphLaunch", stream, exec, result);
}

/* There is nothing to carry to a device in advance. */
CUresult cuGraphUpload(CUgraphExec exec, CUstream stream) {
    CUresult result = host_enter("cuGraphUpload", HOST_NEEDS_CONTEXT);
    CUstream found;
    if (result == CUDA_SUCCESS)
        result = host_stream_resolve(stream, &found);
    pthread_mutex_lock(&handles_lock);
    if (result == CUDA_SUCCESS && *find_executable(exec) == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&handles_lock);
    return host_leave("cuGraphUpload", stream, exec, result);
}
