/* Operations whose blocks differ in size: grouped point to point, and a grouped reduction a root.
 *
 * Where a rank does not know what the others have, the lane asks first: a small collective of NCCL's own
 * brings the counts, the owner is told by pn_asking_take and makes room, and the data follow. The lane stands
 * still meanwhile, and the operation stays among the device's called ones, so that nothing which was called
 * later gets ahead of it: its place in the order is that of the call, as on every other rank.
 */
#include "uneven.h"
#include "futex.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LOOK_NS (1000 * 1000) /* how often a lane that waits for its owner looks at the communicator */

/* ---- the native calls ------------------------------------------------------------------------------ */

static ncclResult_t part_call(const pn_op_t *op, int peer, ncclRedOp_t redop, CUstream stream) {
    const pn_comm_t *comm = op->comm;
    const pn_nccl_t *nccl = &comm->device->engine->nccl;
    const pn_part_t *send = &op->uneven->send[peer], *recv = &op->uneven->recv[peer];
    ncclDataType_t type = (ncclDataType_t)op->datatype;
    size_t element = pn_element_bytes(op->datatype);
    const char *from = (const char *)op->send + send->offset * element;
    ncclResult_t rc = ncclSuccess;
    if (op->kind == PN_REDUCE_SCATTER_V)
        return send->count
                   ? nccl->ncclReduce(from, op->recv, send->count, type, redop, peer, comm->handle, stream)
                   : rc;
    if (send->count)
        rc = nccl->ncclSend(from, send->count, type, peer, comm->handle, stream);
    if (rc == ncclSuccess && recv->count)
        rc = nccl->ncclRecv((char *)op->recv + recv->offset * element, recv->count, type, peer, comm->handle,
                            stream);
    return rc;
}

/* What is empty is not sent: a rank that has something for few of many should not pay for all. */
ncclResult_t pn_uneven_call(const pn_op_t *op, ncclRedOp_t redop, CUstream stream) {
    const pn_nccl_t *nccl = &op->comm->device->engine->nccl;
    ncclResult_t rc = nccl->ncclGroupStart();
    for (int peer = 0; peer < op->comm->size && rc == ncclSuccess; peer++)
        rc = part_call(op, peer, redop, stream);
    ncclResult_t end = nccl->ncclGroupEnd();
    return rc != ncclSuccess ? rc : end;
}

/* The parts as the operations that NCCL takes them for, one after another; true while there is one. */
static bool next_part(const pn_op_t *op, pn_op_t *part, int *at) {
    bool reduces = op->kind == PN_REDUCE_SCATTER_V;
    for (; *at < 2 * op->comm->size; ++*at) {
        bool receives = *at % 2;
        size_t count = (receives ? op->uneven->recv : op->uneven->send)[*at / 2].count;
        if (!count || (receives && reduces))
            continue;
        part->kind = reduces ? PN_REDUCE : receives ? PN_RECV : PN_SEND;
        part->root = *at / 2;
        part->nbytes = count * pn_element_bytes(op->datatype);
        ++*at;
        return true;
    }
    return false;
}

bool pn_uneven_contacted(const pn_op_t *op) {
    pn_op_t part = {.comm = op->comm, .datatype = op->datatype, .redop = op->redop};
    for (int at = 0; next_part(op, &part, &at);)
        if (!pn_contacted(&part))
            return false;
    return true;
}

void pn_uneven_mark(const pn_op_t *op) {
    pn_op_t part = {.comm = op->comm, .datatype = op->datatype, .redop = op->redop};
    for (int at = 0; next_part(op, &part, &at);)
        pn_mark_contacted(&part);
}

/* ---- asking ---------------------------------------------------------------------------------------- */

static _Atomic(pn_uneven_t *) asking;

bool pn_asking_some(void) {
    return atomic_load_explicit(&asking, memory_order_relaxed) != NULL;
}

pn_uneven_t *pn_asking_take(void) {
    return atomic_exchange_explicit(&asking, NULL, memory_order_acquire);
}

void pn_asking_answer(pn_uneven_t *uneven, bool fits) {
    atomic_store(&uneven->answer, fits ? PN_ANSWER_FITS : PN_ANSWER_DOES_NOT);
    pn_futex_wake(&uneven->answer);
}

static bool still_open(pn_comm_t *comm) {
    pthread_mutex_lock(&comm->device->lock);
    bool open = comm->state == PN_READY || comm->state == PN_CLOSING;
    pthread_mutex_unlock(&comm->device->lock);
    return open;
}

/* Pinned memory of the communicator's for what it tells and is told. One exchange is under way at a time: the
 * lane makes them. Entered. */
static CUresult numbers(pn_comm_t *comm) {
    if (comm->numbers)
        return CUDA_SUCCESS;
    void *page;
    CUresult rc =
        comm->device->engine->cuda.cuMemHostAlloc(&page, 2 * (size_t)comm->size * sizeof(int64_t),
                                                  CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
    if (rc == CUDA_SUCCESS)
        comm->numbers = page;
    return rc;
}

/* Wait for an event of ours; CUDA_SUCCESS also where the communicator has failed meanwhile. Entered. */
static CUresult wait_for(pn_comm_t *comm, CUevent event) {
    for (int64_t nap = 5000;; nap = nap < LOOK_NS ? 2 * nap : LOOK_NS) {
        CUresult rc = comm->device->engine->cuda.cuEventQuery(event);
        if (rc != CUDA_ERROR_NOT_READY || !still_open(comm))
            return rc == CUDA_ERROR_NOT_READY ? CUDA_SUCCESS : rc;
        nanosleep(&(struct timespec){0, nap}, NULL);
    }
}

/* Tell the others what this rank has, and be told. */
static pn_outcome_t exchange(pn_op_t *op, char *detail, size_t detail_size) {
    pn_comm_t *comm = op->comm;
    pn_device_t *device = comm->device;
    const pn_cuda_t *cuda = &device->engine->cuda;
    pn_uneven_t *uneven = op->uneven;
    bool each = op->kind == PN_ALL_TO_ALL_V;
    size_t told = (size_t)comm->size, own = each ? told : 1;
    pn_op_t ask = {.comm = comm,
                   .kind = each ? PN_ALL_TO_ALL : PN_ALL_GATHER,
                   .datatype = ncclInt64,
                   .count = 1,
                   .nbytes = own * sizeof(int64_t)};
    pn_outcome_t why = {PN_FROM_CUDA, 0, "cuMemHostAlloc"};
    CUevent event = NULL;
    pn_enter_t saved;
    if ((why.code = (int)pn_enter(device, &saved)) != CUDA_SUCCESS)
        return why;
    if ((why.code = (int)numbers(comm)) == CUDA_SUCCESS) {
        why.function = "cuEventCreate";
        why.code = (int)pn_event_take(device, &event);
    }
    if (why.code == CUDA_SUCCESS) {
        memcpy(comm->numbers, uneven->own, own * sizeof(int64_t));
        ask.send = comm->numbers;
        ask.recv = comm->numbers + told;
        pthread_mutex_lock(&device->lock);
        bool waits = !pn_contacted(&ask) || pn_launch_blocking;
        pthread_mutex_unlock(&device->lock);
        if (!waits)
            pthread_mutex_lock(&device->issue);
        why.function = "cuStreamWaitEvent";
        if ((why.code = (int)pn_before_call(op, comm->stream)) == CUDA_SUCCESS) {
            ncclResult_t rc = pn_call(&ask, comm->stream, &why.function);
            if (rc != ncclSuccess) {
                why.source = PN_FROM_NCCL;
                why.code = (int)rc;
                snprintf(detail, detail_size, "%s", device->engine->nccl.ncclGetLastError(comm->handle));
                pn_repair_depth(comm);
            } else {
                why.function = "cuEventRecord";
                why.code = (int)cuda->cuEventRecord(event, comm->stream);
            }
        }
        if (!waits)
            pthread_mutex_unlock(&device->issue);
    }
    if (why.code == 0) {
        why.function = "cuEventQuery";
        why.code = (int)wait_for(comm, event);
    }
    if (why.code == 0)
        memcpy(uneven->told, comm->numbers + told, told * sizeof(int64_t));
    pn_leave(device, &saved);
    pthread_mutex_lock(&device->lock);
    if (why.code == 0)
        pn_mark_contacted(&ask);
    if (event)
        pn_event_put(device, event);
    pthread_mutex_unlock(&device->lock);
    return why;
}

/* Hand the numbers to the owner, and wait until there is room for what is coming; false: there is none. */
static bool make_room(pn_op_t *op) {
    pn_uneven_t *uneven = op->uneven;
    uneven->op = op;
    uneven->next = atomic_load_explicit(&asking, memory_order_relaxed);
    while (!atomic_compare_exchange_weak(&asking, &uneven->next, uneven))
        ;
    pn_reaper_call();
    while (atomic_load(&uneven->answer) == PN_ANSWER_NONE && still_open(op->comm))
        pn_futex_wait(&uneven->answer, PN_ANSWER_NONE, LOOK_NS);
    return atomic_load(&uneven->answer) != PN_ANSWER_DOES_NOT;
}

bool pn_uneven_ask(pn_op_t *op) {
    pn_comm_t *comm = op->comm;
    char detail[PN_DETAIL_BYTES] = "";
    pn_outcome_t why = exchange(op, detail, sizeof detail);
    if (why.code == 0 && still_open(comm) && !make_room(op)) {
        /* The others go on to send, and no call of this rank will take it from them: the end, and the same
         * one for all. */
        why = (pn_outcome_t){PN_FROM_NCCL, ncclInvalidUsage, "ncclRecv"};
        snprintf(detail, sizeof detail, "%s", op->uneven->refusal);
        pn_comm_fail(comm, op->seq, why, PN_FAILED, detail);
    }
    if (why.code == 0 && still_open(comm))
        return true;
    pn_not_issued(op, why.code ? why : (pn_outcome_t){PN_FROM_CLOSED, 0, NULL}, detail);
    return false;
}
