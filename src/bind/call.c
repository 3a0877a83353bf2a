/* The native calls behind each kind of operation, and which of them may wait for peers. */
#include "bind.h"
#include "memory.h"
#include "uneven.h"

size_t pn_element_bytes(int datatype) {
    static const uint8_t bytes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return bytes[datatype];
}

/* Before NCCL 2.28 these three were spelled by hand, as grouped point to point. */
static ncclResult_t exchange(pn_op_t *op, CUstream stream) {
    const pn_comm_t *comm = op->comm;
    const pn_nccl_t *nccl = &comm->device->engine->nccl;
    ncclDataType_t type = (ncclDataType_t)op->datatype;
    size_t block = op->count * pn_element_bytes(op->datatype);
    const char *send = op->send;
    char *recv = op->recv;
    bool all = op->kind == PN_ALL_TO_ALL, root = comm->rank == op->root;
    ncclResult_t rc = nccl->ncclGroupStart();
    for (int peer = 0; peer < comm->size && rc == ncclSuccess; peer++) {
        size_t at = (size_t)peer * block;
        if (all || (op->kind == PN_SCATTER && root))
            rc = nccl->ncclSend(send + at, op->count, type, peer, comm->handle, stream);
        else if (op->kind == PN_GATHER && peer == op->root)
            rc = nccl->ncclSend(send, op->count, type, peer, comm->handle, stream);
        if (rc != ncclSuccess)
            break;
        if (all || (op->kind == PN_GATHER && root))
            rc = nccl->ncclRecv(recv + at, op->count, type, peer, comm->handle, stream);
        else if (op->kind == PN_SCATTER && peer == op->root)
            rc = nccl->ncclRecv(recv, op->count, type, peer, comm->handle, stream);
    }
    ncclResult_t end = nccl->ncclGroupEnd();
    return rc != ncclSuccess ? rc : end;
}

ncclResult_t pn_call(pn_op_t *op, CUstream stream, const char **function) {
    const pn_comm_t *comm = op->comm;
    const pn_nccl_t *nccl = &comm->device->engine->nccl;
    ncclDataType_t type = (ncclDataType_t)op->datatype;
    ncclRedOp_t redop = (ncclRedOp_t)op->redop;
    ncclComm_t handle = comm->handle;
    if (op->redop >= ncclNumOps) {
        ncclResult_t rc = pn_operator_resolve(op->comm, &redop, function);
        if (rc != ncclSuccess)
            return rc;
    }
    const pn_one_sided_t *side = op->argument;
#define CALL(name, ...)                                                                                      \
    do {                                                                                                     \
        *function = #name;                                                                                   \
        return nccl->name(__VA_ARGS__);                                                                      \
    } while (0)
#define COLLECTIVE(name, ...)                                                                                \
    do {                                                                                                     \
        if (op->config)                                                                                      \
            CALL(name##Config, __VA_ARGS__, op->config);                                                     \
        CALL(name, __VA_ARGS__);                                                                             \
    } while (0)
    switch (op->kind) {
    case PN_ALL_REDUCE:
        COLLECTIVE(ncclAllReduce, op->send, op->recv, op->count, type, redop, handle, stream);
    case PN_REDUCE:
        COLLECTIVE(ncclReduce, op->send, op->recv, op->count, type, redop, op->root, handle, stream);
    case PN_BROADCAST:
        COLLECTIVE(ncclBroadcast, op->send, op->recv, op->count, type, op->root, handle, stream);
    case PN_ALL_GATHER:
        COLLECTIVE(ncclAllGather, op->send, op->recv, op->count, type, handle, stream);
    case PN_REDUCE_SCATTER:
        COLLECTIVE(ncclReduceScatter, op->send, op->recv, op->count, type, redop, handle, stream);
    case PN_SEND:
        CALL(ncclSend, op->send, op->count, type, op->root, handle, stream);
    case PN_RECV:
        CALL(ncclRecv, op->recv, op->count, type, op->root, handle, stream);
    case PN_BARRIER:
        CALL(ncclAllReduce, comm->scratch, comm->scratch, 1, ncclInt8, ncclSum, handle, stream);
    case PN_ALL_TO_ALL:
        if (nccl->ncclAlltoAll)
            COLLECTIVE(ncclAlltoAll, op->send, op->recv, op->count, type, handle, stream);
        break;
    case PN_GATHER:
        if (nccl->ncclGather)
            COLLECTIVE(ncclGather, op->send, op->recv, op->count, type, op->root, handle, stream);
        break;
    case PN_SCATTER:
        if (nccl->ncclScatter)
            COLLECTIVE(ncclScatter, op->send, op->recv, op->count, type, op->root, handle, stream);
        break;
    case PN_PUT:
        CALL(ncclPutSignal, op->send, op->count, type, op->root, side->window, side->offset, side->signal,
             side->context, 0, handle, stream);
    case PN_SIGNAL:
        CALL(ncclSignal, op->root, side->signal, side->context, 0, handle, stream);
    case PN_WAIT_SIGNAL:
        CALL(ncclWaitSignal, side->awaited, (ncclWaitSignalDesc_t *)(uintptr_t)side->descriptors, handle,
             stream);
    case PN_ALL_GATHER_V:
    case PN_ALL_TO_ALL_V:
    case PN_REDUCE_SCATTER_V:
    case PN_GATHER_V:
    case PN_SCATTER_V:
        *function = "ncclGroupEnd";
        return pn_uneven_call(op, redop, stream);
    default:
        *function = "";
        return ncclInternalError;
    }
#undef COLLECTIVE
#undef CALL
    *function = "ncclGroupEnd";
    return exchange(op, stream);
}

/* NCCL connects an algorithm when it is first chosen, and it chooses by function, operator, type and size;
 * point to point connects each peer. What has been through once will not wait for peers again. */
static uint64_t *contact_word(const pn_op_t *op, uint64_t *bit) {
    int class = 0;
    for (size_t bytes = op->nbytes; bytes > 1; bytes >>= 1)
        class++;
    *bit = (uint64_t)1 << class;
    int redop = op->redop >= 0 && op->redop < PN_OPS - 1 ? op->redop : PN_OPS - 1;
    return &op->comm->contacted[op->kind][redop][op->datatype];
}

bool pn_contacted(const pn_op_t *op) {
    const pn_comm_t *comm = op->comm;
    if (comm->size == 1)
        return true;
    if (op->kind == PN_SEND || op->kind == PN_RECV)
        return (comm->met[op->root] & (op->kind == PN_SEND ? 1 : 2)) != 0;
    if (op->uneven)
        return pn_uneven_contacted(op);
    uint64_t bit;
    const uint64_t *word = contact_word(op, &bit);
    return (*word & bit) != 0;
}

void pn_mark_contacted(pn_op_t *op) {
    if (op->config || pn_on_registered(op))
        return; /* the algorithm may have been another one than for the plain call */
    if (op->kind == PN_SEND || op->kind == PN_RECV) {
        op->comm->met[op->root] |= (uint8_t)(op->kind == PN_SEND ? 1 : 2);
        return;
    }
    if (op->uneven) {
        pn_uneven_mark(op);
        return;
    }
    uint64_t bit;
    *contact_word(op, &bit) |= bit;
}

_Atomic long pn_depth_repairs;

/* Some calls leave NCCL's thread-local group open when they fail; everything after that would only be queued.
 * At our own depth of nought a GroupEnd answers ncclInvalidUsage, unless it has just closed such a leak. */
void pn_repair_depth(pn_comm_t *comm) {
    if (comm->device->engine->nccl.ncclGroupEnd() != ncclInvalidUsage)
        atomic_fetch_add(&pn_depth_repairs, 1);
}
