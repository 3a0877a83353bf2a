/* Operations that are cut off, and ranks that wait for each other on the host. */
#include "nccl.h"

/* ---- cutting operations off ---------------------------------------------------------------------- */

/* Under the lock of the order. A kernel that was launched and has not ended would leave its turn behind. */
static ncclComm_t find_busy(host_order_t *order) {
    for (ncclComm_t member = order->members; member != NULL; member = member->next_family)
        if (atomic_load(&member->kernels) != 0 || host_comm_used(member))
            return member;
    return NULL;
}

static bool is_aborted(ncclComm_t comm) {
    return atomic_load(&comm->aborted) || atomic_load(&comm->magic) != HOST_COMM_MAGIC;
}

static void resume(host_order_t *order) {
    for (ncclComm_t member = order->members; member != NULL; member = member->next_family)
        if (!is_aborted(member))
            atomic_store(&member->stop, 0);
    atomic_store(&order->turn, atomic_load(&order->issued));
}

ncclResult_t host_comm_cut(ncclComm_t comm) {
    host_order_t *order = comm->order;
    pthread_mutex_lock(&order->lock);
    for (ncclComm_t member = order->members; member != NULL; member = member->next_family)
        if (atomic_load(&member->kernels) != 0)
            atomic_store(&member->torn, true);
    for (ncclComm_t busy = find_busy(order); busy != NULL && !is_aborted(comm); busy = find_busy(order)) {
        uint32_t seen = host_bell_look(&busy->quiet);
        if (atomic_load(&busy->kernels) == 0 && !host_comm_used(busy))
            continue;
        host_comm_hold(busy);
        pthread_mutex_unlock(&order->lock);
        host_bell_wait(&busy->quiet, seen, HOST_NAP_NS);
        host_comm_release(busy);
        pthread_mutex_lock(&order->lock);
    }
    bool aborted = is_aborted(comm);
    if (!aborted)
        resume(order);
    pthread_mutex_unlock(&order->lock);
    if (aborted)
        return host_fail(ncclInternalError, "rank %d was aborted while its operations were stopped",
                         comm->rank);
    return ncclSuccess;
}

/* ---- barriers ------------------------------------------------------------------------------------ */

ncclResult_t host_comm_barrier(ncclComm_t comm) {
    host_clique_t *clique = atomic_load(&comm->clique);
    uint32_t number = ++comm->barriers;
    atomic_store(&comm->area->barrier, number);
    host_clique_ring(clique, comm->rank);
    for (int rank = 0; rank < comm->ranks;) {
        uint32_t seen = host_bell_look(&comm->area->bell);
        /* Another rank may have gone on to the next one, but no further. */
        if (atomic_load(&host_segment_area(clique->head, rank)->barrier) - number <= 1) {
            rank++;
            continue;
        }
        ncclResult_t result = host_comm_nap(comm, &comm->area->bell, seen);
        if (result != ncclSuccess)
            return result;
    }
    return ncclSuccess;
}
