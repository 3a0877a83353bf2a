/* One-sided operations as they are called: argument checks in NCCL's order. */
#include "nccl_group.h"
#include "nccl_window.h"

#include <stdlib.h>

static bool has_rma(ncclComm_t comm) {
    return host_config()->windows && comm->config.numRmaCtx > 0;
}

static ncclResult_t check_indices(const char *function, ncclComm_t comm, int context, int index) {
    if (context < 0 || context >= comm->config.numRmaCtx)
        return host_fail(ncclInvalidArgument, "%s: context %d; this communicator has %d (numRmaCtx)",
                         function, context, comm->config.numRmaCtx);
    if (index < 0 || index >= comm->config.numRmaSig)
        return host_fail(ncclInvalidArgument, "%s: signal index %d; this communicator has %d (numRmaSig)",
                         function, index, comm->config.numRmaSig);
    return ncclSuccess;
}

static ncclResult_t check_support(const char *function, ncclComm_t comm) {
    if (has_rma(comm))
        return ncclSuccess;
    return host_fail(ncclInvalidArgument, "%s: this communicator has no one-sided operations (%s)", function,
                     host_config()->windows ? "numRmaCtx is 0" : "windows are switched off");
}

static ncclResult_t check_signals(const char *function, ncclComm_t comm) {
    if (comm->signals != NULL)
        return ncclSuccess;
    return host_fail(ncclInvalidUsage,
                     "%s: register a window first, or make the communicator with rmaEagerInit=1", function);
}

static host_rma_t *new_rma(host_rma_kind_t kind, size_t waits, CUstream stream) {
    host_rma_t *rma = calloc(1, sizeof *rma + waits * sizeof rma->wait[0]);
    if (rma == NULL) {
        host_last_error("out of memory");
        return NULL;
    }
    rma->kind = kind;
    rma->stream = stream;
    return rma;
}

/* ---- put and signal ------------------------------------------------------------------------------ */

typedef struct {
    const char *function;
    host_rma_kind_t kind;
    const void *source;
    size_t count, offset;
    ncclDataType_t type;
    int peer, index, context;
    unsigned int flags;
    ncclWindow_t window;
    CUstream stream;
} give_t;

static ncclResult_t check_windows(ncclComm_t comm, const give_t *give) {
    if (give->window == NULL || give->source == NULL)
        return host_fail(ncclInvalidArgument, "%s: the %s is NULL", give->function,
                         give->window == NULL ? "peer's window" : "source");
    ncclWindow_t around = host_window_around(comm, give->source);
    bool symmetric = around != NULL && (around->flags & NCCL_WIN_COLL_SYMMETRIC) != 0;
    if (around != NULL)
        host_window_release(around);
    if (!symmetric)
        return host_fail(ncclInvalidArgument, "%s: the source %p is in no symmetric window", give->function,
                         give->source);
    return ncclSuccess;
}

static ncclResult_t check_give(ncclComm_t comm, const give_t *give) {
    if (give->peer < 0 || give->peer >= comm->ranks)
        return host_fail(ncclInvalidArgument, "%s: peer %d is not a rank of this communicator (it has %d)",
                         give->function, give->peer, comm->ranks);
    if ((int)give->type < 0 || give->type >= ncclNumTypes)
        return host_fail(ncclInvalidArgument, "%s: %d is no data type", give->function, (int)give->type);
    ncclResult_t result = check_support(give->function, comm);
    if (result == ncclSuccess)
        result = check_indices(give->function, comm, give->context, give->index);
    if (result == ncclSuccess && give->flags != 0)
        result =
            host_fail(ncclInvalidArgument, "%s: flags %u; there are none yet", give->function, give->flags);
    if (result == ncclSuccess && give->kind == HOST_PUT)
        result = check_windows(comm, give);
    return result == ncclSuccess ? check_signals(give->function, comm) : result;
}

static ncclResult_t queue_give(ncclComm_t comm, const void *wanted) {
    const give_t *give = wanted;
    ncclResult_t result = check_give(comm, give);
    if (result != ncclSuccess)
        return result;
    host_rma_t *rma = new_rma(give->kind, 0, give->stream);
    if (rma == NULL)
        return ncclSystemError;
    rma->peer = give->peer;
    rma->index = give->index;
    rma->context = give->context;
    rma->source = give->source;
    rma->offset = give->offset;
    rma->bytes = give->count * host_type_size(give->type);
    if (give->kind == HOST_PUT) {
        rma->window = host_window_hold(comm, give->window);
        if (rma->window == NULL) {
            host_rma_free(rma);
            return host_fail(ncclInternalError, "%s: %p is no window of this communicator", give->function,
                             (void *)give->window);
        }
    }
    return host_group_add_rma(comm, rma);
}

/* ---- wait ---------------------------------------------------------------------------------------- */

typedef struct {
    int count;
    const ncclWaitSignalDesc_t *list;
    CUstream stream;
} take_t;

static const char wait_name[] = "ncclWaitSignal";

static ncclResult_t check_take(ncclComm_t comm, const take_t *take) {
    ncclResult_t result = check_support(wait_name, comm);
    if (result == ncclSuccess && (take->list == NULL || take->count <= 0))
        result = host_fail(ncclInvalidArgument, "%s: %d descriptors at %p", wait_name, take->count,
                           (const void *)take->list);
    for (int i = 0; i < take->count && result == ncclSuccess; i++) {
        const ncclWaitSignalDesc_t *wait = &take->list[i];
        if (wait->opCnt <= 0)
            return host_fail(ncclInvalidArgument, "%s: descriptor %d waits for %d signals", wait_name, i,
                             wait->opCnt);
        result = check_indices(wait_name, comm, wait->ctx, wait->sigIdx);
    }
    return result == ncclSuccess ? check_signals(wait_name, comm) : result;
}

/* One operation for each context, since a group keeps the contexts apart. */
static ncclResult_t queue_context(ncclComm_t comm, const take_t *take, int context) {
    host_rma_t *rma = new_rma(HOST_WAIT_SIGNAL, (size_t)take->count, take->stream);
    if (rma == NULL)
        return ncclSystemError;
    rma->context = context;
    for (int i = 0; i < take->count; i++) {
        const ncclWaitSignalDesc_t *wait = &take->list[i];
        if (wait->ctx != context)
            continue;
        rma->wait[rma->waits].peer = wait->peer;
        rma->wait[rma->waits].index = wait->sigIdx;
        rma->wait[rma->waits++].count = (uint64_t)wait->opCnt;
    }
    return host_group_add_rma(comm, rma);
}

static bool is_first_of_context(const take_t *take, int at) {
    for (int i = 0; i < at; i++)
        if (take->list[i].ctx == take->list[at].ctx)
            return false;
    return true;
}

static ncclResult_t queue_take(ncclComm_t comm, const void *wanted) {
    const take_t *take = wanted;
    ncclResult_t result = check_take(comm, take);
    for (int i = 0; i < take->count && result == ncclSuccess; i++)
        if (is_first_of_context(take, i))
            result = queue_context(comm, take, take->list[i].ctx);
    return result;
}

/* ---- the calls ----------------------------------------------------------------------------------- */

static ncclResult_t issue(host_entry_t *entry, const char *function, ncclComm_t comm, CUstream stream,
                          ncclResult_t (*queue)(ncclComm_t comm, const void *wanted), const void *wanted) {
    ncclResult_t result = host_entry_begin(entry, function, comm);
    entry->record.stream = (uint64_t)(uintptr_t)stream;
    if (result != ncclSuccess)
        return host_group_poison(result);
    host_group_start();
    result = host_comm_pin(comm, function);
    if (result == ncclSuccess) {
        result = host_comm_usable(comm, function);
        if (result == ncclSuccess)
            result = queue(comm, wanted);
        host_comm_unpin(comm);
    }
    return host_comm_progress(comm, host_group_close(result));
}

ncclResult_t ncclPutSignal(const void *localbuff, size_t count, ncclDataType_t datatype, int peer,
                           ncclWindow_t peerWin, size_t peerWinOffset, int sigIdx, int ctx,
                           unsigned int flags, ncclComm_t comm, cudaStream_t stream) {
    host_entry_t entry;
    give_t give = {.function = "ncclPutSignal",
                   .kind = HOST_PUT,
                   .source = localbuff,
                   .count = count,
                   .offset = peerWinOffset,
                   .type = datatype,
                   .peer = peer,
                   .index = sigIdx,
                   .context = ctx,
                   .flags = flags,
                   .window = peerWin,
                   .stream = stream};
    ncclResult_t result = issue(&entry, give.function, comm, stream, queue_give, &give);
    entry.record.count = count;
    entry.record.datatype = (int32_t)datatype;
    entry.record.root = peer;
    entry.record.object = (uint64_t)(uintptr_t)localbuff;
    return host_entry_end(&entry, result);
}

ncclResult_t ncclSignal(int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm,
                        cudaStream_t stream) {
    host_entry_t entry;
    give_t give = {.function = "ncclSignal",
                   .kind = HOST_SIGNAL,
                   .type = ncclInt8,
                   .peer = peer,
                   .index = sigIdx,
                   .context = ctx,
                   .flags = flags,
                   .stream = stream};
    ncclResult_t result = issue(&entry, give.function, comm, stream, queue_give, &give);
    entry.record.root = peer;
    return host_entry_end(&entry, result);
}

ncclResult_t ncclWaitSignal(int nDesc, ncclWaitSignalDesc_t *signalDescs, ncclComm_t comm,
                            cudaStream_t stream) {
    host_entry_t entry;
    take_t take = {.count = nDesc, .list = signalDescs, .stream = stream};
    ncclResult_t result = issue(&entry, wait_name, comm, stream, queue_take, &take);
    entry.record.count = (uint64_t)nDesc;
    return host_entry_end(&entry, result);
}
