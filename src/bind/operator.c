/* Pre-multiplied sums: operators that a user makes for one communicator.
 *
 * 1. The native operator is made by the first operation that uses it, on the thread that issues it: making,
 *    using and destroying one are then never concurrent, which NCCL does not allow.
 * 2. It is destroyed through the communicator's lane, so behind every operation that was called before.
 * 3. NCCL reads a scalar in device memory when the kernel runs: each operation holds it, not only its
 * operator.
 */
#include "memory.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

pn_operator_t *pn_operator_new(pn_comm_t *comm, int32_t type, const void *scalar, bool on_device) {
    pn_operator_t *made = calloc(1, sizeof *made);
    if (!made)
        return NULL;
    made->comm = comm;
    made->type = (ncclDataType_t)type;
    made->residence = on_device ? ncclScalarDevice : ncclScalarHostImmediate;
    if (on_device)
        made->pointer = (void *)(uintptr_t)scalar;
    else
        memcpy(made->value, scalar, sizeof made->value);
    pthread_mutex_lock(&comm->device->lock);
    made->code = ncclNumOps;
    for (const pn_link_t *at = comm->operators.next; at != &comm->operators; at = at->next)
        if (PN_OWNER(at, const pn_operator_t, in_comm)->code >= made->code)
            made->code = PN_OWNER(at, const pn_operator_t, in_comm)->code + 1;
    pn_link_append(&comm->operators, &made->in_comm);
    comm->references++;
    pthread_mutex_unlock(&comm->device->lock);
    atomic_fetch_add(&pn_counts.operators, 1);
    return made;
}

ncclResult_t pn_operator_resolve(pn_comm_t *comm, ncclRedOp_t *redop, const char **function) {
    pn_operator_t *found = NULL;
    pthread_mutex_lock(&comm->device->lock);
    for (const pn_link_t *at = comm->operators.next; at != &comm->operators && !found; at = at->next)
        if (PN_OWNER(at, pn_operator_t, in_comm)->code == (int32_t)*redop)
            found = PN_OWNER(at, pn_operator_t, in_comm);
    pthread_mutex_unlock(&comm->device->lock);
    *function = "ncclRedOpCreatePreMulSum";
    if (!found)
        return ncclInvalidArgument;
    if (!found->made) {
        void *scalar = found->residence == ncclScalarDevice ? found->pointer : found->value;
        ncclResult_t rc = comm->device->engine->nccl.ncclRedOpCreatePreMulSum(
            &found->handle, scalar, found->type, found->residence, comm->handle);
        if (rc != ncclSuccess)
            return rc;
        found->made = true;
    }
    *redop = found->handle;
    return ncclSuccess;
}

static void discard(pn_operator_t *op) {
    pn_comm_t *comm = op->comm;
    pthread_mutex_lock(&comm->device->lock);
    pn_link_remove(&op->in_comm);
    pthread_mutex_unlock(&comm->device->lock);
    free(op);
    atomic_fetch_sub(&pn_counts.operators, 1);
    pn_comm_release(comm);
}

static void run_destroy(pn_task_t *task, pn_comm_t *comm) {
    pn_operator_t *op = PN_OWNER(task, pn_operator_t, task);
    if (pn_go_inside(comm)) {
        if (op->made)
            comm->device->engine->nccl.ncclRedOpDestroy(op->handle, comm->handle);
        pn_come_out(comm);
    }
    discard(op); /* of one that has failed it goes with the handle */
}

static void drop_destroy(pn_task_t *task) {
    discard(PN_OWNER(task, pn_operator_t, task));
}

void pn_operator_end(pn_operator_t *op) {
    pn_comm_t *comm = op->comm;
    pthread_mutex_lock(&comm->device->lock);
    bool gone = comm->state == PN_GONE;
    op->task.run = run_destroy;
    op->task.drop = drop_destroy;
    if (!gone)
        pn_lane_push(comm, &op->task);
    pthread_mutex_unlock(&comm->device->lock);
    if (gone)
        discard(op);
}
