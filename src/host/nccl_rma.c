/* One-sided operations: put, signal, and waiting for signals.
 *
 * A signal is a counter in the receiver's memory, one for each sender, context and index. A put copies into
 * the peer's window and then counts its signal, so that whoever sees the signal sees the data. A wait takes
 * so many counts as it asks for, earlier ones first.
 */
#include "nccl_window.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ThreadSanitizer goes by addresses, and ranks of one process have mapped the counters at different ones: it
 * is told who sees whose signals, by the address of the receiver's area. */
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#define SIGNALS_GIVEN(area) __tsan_release(area)
#define SIGNALS_SEEN(area) __tsan_acquire(area)
#else
#define SIGNALS_GIVEN(area) ((void)(area))
#define SIGNALS_SEEN(area) ((void)(area))
#endif

/* ---- counters ------------------------------------------------------------------------------------ */

static size_t counters(const host_signals_t *signals) {
    return (size_t)signals->ranks * (size_t)signals->contexts * (size_t)signals->indices;
}

static size_t place_of(const host_signals_t *signals, int sender, int context, int index) {
    return ((size_t)sender * (size_t)signals->contexts + (size_t)context) * (size_t)signals->indices +
           (size_t)index;
}

static _Atomic uint64_t *counter_at(const host_signals_t *signals, int receiver, size_t place) {
    return (_Atomic uint64_t *)(void *)signals->reach[receiver].base + place;
}

static host_signals_t *new_signals(ncclComm_t comm) {
    host_signals_t *signals = calloc(1, sizeof *signals + (size_t)comm->ranks * sizeof signals->reach[0]);
    if (signals == NULL)
        return NULL;
    signals->ranks = comm->ranks;
    signals->contexts = comm->config.numRmaCtx;
    signals->indices = comm->config.numRmaSig;
    signals->descriptor = -1;
    size_t each;
    bool huge = __builtin_mul_overflow((size_t)signals->contexts, (size_t)signals->indices, &each) ||
                each > SIZE_MAX / 16 / (size_t)comm->ranks;
    signals->consumed = huge ? NULL : calloc(counters(signals) + 1, sizeof(uint64_t));
    if (signals->consumed != NULL)
        return signals;
    free(signals);
    return NULL;
}

static void free_signals(host_signals_t *signals) {
    if (signals == NULL)
        return;
    for (int rank = 0; rank < signals->ranks; rank++)
        host_window_lose(&signals->reach[rank]);
    if (signals->descriptor >= 0)
        close(signals->descriptor);
    free(signals->consumed);
    free(signals);
}

void host_signals_free(ncclComm_t comm) {
    free_signals(comm->signals);
    comm->signals = NULL;
}

/* The own counters are mapped from the file like everybody's. */
static ncclResult_t offer(host_signals_t *signals, host_extent_t *extent) {
    size_t bytes = (counters(signals) + 1) * sizeof(uint64_t);
    int error = host_share_make(bytes, &extent->share);
    if (error != 0)
        return host_fail(ncclSystemError, "memory for signals cannot be made: %s", strerror(error));
    signals->descriptor = extent->share.descriptor;
    extent->bytes = bytes;
    return ncclSuccess;
}

static ncclResult_t reach_all(ncclComm_t comm, host_signals_t *signals, const host_extent_t *extents) {
    ncclResult_t result = ncclSuccess;
    for (int rank = 0; rank < comm->ranks && result == ncclSuccess; rank++) {
        if (extents[rank].bytes != extents[comm->rank].bytes)
            return host_fail(ncclInvalidUsage,
                             "rank %d and rank %d were made with different numRmaCtx or numRmaSig",
                             comm->rank, rank);
        result = host_window_map(&extents[rank], &signals->reach[rank]);
    }
    return result;
}

ncclResult_t host_signals_make(ncclComm_t comm) {
    host_extent_t own = {0}, none = {0};
    host_signals_t *signals = new_signals(comm);
    host_extent_t *extents = calloc((size_t)comm->ranks, sizeof *extents);
    ncclResult_t result = ncclSuccess;
    if (signals == NULL || extents == NULL)
        result = host_fail(ncclSystemError, "no memory for the signals of %d contexts with %d indices",
                           comm->config.numRmaCtx, comm->config.numRmaSig);
    else
        result = offer(signals, &own);
    if (extents != NULL) {
        result = host_window_exchange(comm, &own, result, extents);
        if (result == ncclSuccess)
            result = reach_all(comm, signals, extents);
        result = host_window_exchange(comm, &none, result, extents);
    }
    free(extents);
    if (result != ncclSuccess) {
        free_signals(signals);
        return result;
    }
    close(signals->descriptor); /* all have mapped it */
    signals->descriptor = -1;
    comm->signals = signals;
    return ncclSuccess;
}

ncclResult_t host_rma_begin(ncclComm_t comm) {
    bool wanted = comm->config.rmaEagerInit == 1 && comm->config.numRmaCtx > 0 && host_config()->windows;
    return wanted ? host_signals_make(comm) : ncclSuccess;
}

/* ---- the kernel ---------------------------------------------------------------------------------- */

typedef struct {
    host_kernel_t kernel;
    host_rma_t *list, *at; /* done up to here */
    int waited;            /* descriptors of a wait that are done */
} sequence_t;

void host_rma_free(host_rma_t *list) {
    while (list != NULL) {
        host_rma_t *next = list->next;
        if (list->window != NULL)
            host_window_release(list->window);
        free(list);
        list = next;
    }
}

/* A peer of this process may have freed its memory. */
static bool is_there(const host_reach_t *reach) {
    if (reach->map != NULL)
        return true;
    host_memory_t memory;
    host_memory_find(reach->base, &memory);
    return memory.own && (size_t)(reach->base - (char *)memory.base) + reach->bytes <= memory.bytes;
}

static bool put(const sequence_t *s, const host_rma_t *rma) {
    const host_reach_t *target = &rma->window->reach[rma->peer];
    bool inside = rma->offset <= target->bytes && rma->bytes <= target->bytes - rma->offset;
    if (!inside || !is_there(target) ||
        !host_kernel_may_touch(s->kernel.work.device, rma->source, rma->bytes))
        return false;
    if (rma->bytes != 0)
        memmove(target->base + rma->offset, rma->source, rma->bytes);
    return true;
}

static void give_signal(const sequence_t *s, const host_rma_t *rma) {
    const host_signals_t *signals = s->kernel.comm->signals;
    size_t place = place_of(signals, s->kernel.comm->rank, rma->context, rma->index);
    host_area_t *area = host_segment_area(s->kernel.clique->head, rma->peer);
    SIGNALS_GIVEN(area);
    atomic_fetch_add(counter_at(signals, rma->peer, place), 1);
    host_bell_ring(&area->bell);
}

static bool take_signals(sequence_t *s, const host_rma_t *rma) {
    host_signals_t *signals = s->kernel.comm->signals;
    for (; s->waited < rma->waits; s->waited++) {
        int peer = rma->wait[s->waited].peer;
        size_t place = place_of(signals, peer, rma->context, rma->wait[s->waited].index);
        uint64_t arrived = atomic_load(counter_at(signals, s->kernel.comm->rank, place));
        if (arrived - signals->consumed[place] < rma->wait[s->waited].count)
            return false;
        signals->consumed[place] += rma->wait[s->waited].count;
    }
    SIGNALS_SEEN(s->kernel.comm->area);
    s->waited = 0;
    return true;
}

/* NCCL looks at no bounds: what is past the end of a window is somebody else's memory, or nobody's. */
static bool is_possible(const sequence_t *s, const host_rma_t *rma) {
    for (int i = 0; i < rma->waits; i++)
        if (rma->wait[i].peer < 0 || rma->wait[i].peer >= s->kernel.comm->ranks)
            return false;
    return true;
}

static host_progress_t advance(host_kernel_t *kernel) {
    sequence_t *s = (sequence_t *)(void *)kernel;
    for (; s->at != NULL; s->at = s->at->next) {
        const host_rma_t *rma = s->at;
        if (!is_possible(s, rma) || (rma->kind == HOST_PUT && !put(s, rma))) {
            kernel->work.status = CUDA_ERROR_ILLEGAL_ADDRESS;
            return HOST_DONE;
        }
        if (rma->kind != HOST_WAIT_SIGNAL)
            give_signal(s, rma);
        else if (!take_signals(s, rma))
            return HOST_BLOCKED;
    }
    return HOST_DONE;
}

static void drop_list(host_kernel_t *kernel) {
    host_rma_free(((sequence_t *)(void *)kernel)->list);
}

host_kernel_t *host_rma_new(host_rma_t *list) {
    sequence_t *s = calloc(1, sizeof *s);
    if (s == NULL)
        return NULL;
    s->list = s->at = list;
    s->kernel.advance = advance;
    s->kernel.drop = drop_list;
    s->kernel.off_device = true;
    s->kernel.name = list->kind == HOST_PUT      ? "ncclPutSignal"
                     : list->kind == HOST_SIGNAL ? "ncclSignal"
                                                 : "ncclWaitSignal";
    for (const host_rma_t *rma = list; rma != NULL; rma = rma->next)
        s->kernel.work.bytes += rma->bytes;
    return &s->kernel;
}
