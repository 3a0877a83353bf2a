/* First contact. NCCL connects the ranks for an algorithm, and two ranks for messages, when they are first
 * needed; the call that launches then waits on the host until all of them, or the peer, make the same call.
 * Only the gpulike temper has it, and only where NCCL_RUNTIME_CONNECT is not 0.
 */
#include "nccl_group.h"

static bool applies(ncclComm_t comm) {
    const host_config_t *config = host_config();
    return config->temper == HOST_GPULIKE && config->runtime_connect && comm->ranks > 1;
}

/* All say that they have come before any of them waits: one thread may speak for several ranks. */
static bool announce(ncclComm_t comm, const host_task_t *task) {
    host_clique_t *clique = atomic_load(&comm->clique);
    if (task->function < HOST_COLLECTIVES) {
        if (comm->connected[task->function])
            return false;
        host_intent_say(comm, HOST_INTENT_CALL, comm->sequence + 1, host_sketch_of(task));
        if (atomic_exchange(&comm->area->connected[task->function], 1) == 0)
            host_clique_ring(clique, comm->rank);
        return true;
    }
    if (comm->met[task->root] || task->root == comm->rank)
        return false;
    if (atomic_exchange(&comm->area->met[task->root], 1) == 0)
        host_bell_ring(&host_segment_area(clique->head, task->root)->bell);
    return true;
}

static bool has_come(ncclComm_t comm, const host_task_t *task) {
    host_clique_t *clique = atomic_load(&comm->clique);
    if (task->function >= HOST_COLLECTIVES)
        return atomic_load(&host_segment_area(clique->head, task->root)->met[comm->rank]) != 0;
    for (int rank = 0; rank < comm->ranks; rank++)
        if (atomic_load(&host_segment_area(clique->head, rank)->connected[task->function]) == 0)
            return false;
    return true;
}

/* A mismatch becomes the asynchronous error, and the call waits on, as it would without the strict mode. */
static void compare(ncclComm_t comm, const host_task_t *task) {
    if (host_config()->mode != HOST_STRICT || host_comm_state(comm) != ncclSuccess)
        return;
    uint64_t next = comm->sequence + 1;
    host_sketch_t own = host_sketch_of(task);
    if (task->function < HOST_COLLECTIVES)
        host_intent_differs(comm, next, own);
    else
        host_intent_passes_by(comm, HOST_INTENT_CALL, next, own, task->root);
}

static ncclResult_t wait_for_peers(ncclComm_t comm, const host_task_t *task) {
    int64_t next_look = host_now_ns() + HOST_NAP_NS;
    for (;;) {
        uint32_t seen = host_bell_look(&comm->area->bell);
        if (has_come(comm, task))
            break;
        ncclResult_t result = host_comm_nap(comm, &comm->area->bell, seen);
        if (result == ncclRemoteError) {
            host_comm_set_state(comm, result);
            return host_comm_hang(comm, "connecting to a rank that is gone");
        }
        if (result != ncclSuccess)
            return result;
        if (host_now_ns() >= next_look) {
            next_look = host_now_ns() + HOST_NAP_NS;
            compare(comm, task);
        }
    }
    if (task->function < HOST_COLLECTIVES)
        comm->connected[task->function] = true;
    else
        comm->met[task->root] = true;
    return ncclSuccess;
}

ncclResult_t host_contact_one(ncclComm_t comm, const host_task_t *task) {
    if (!applies(comm) || !host_comm_enter_call(comm))
        return ncclSuccess;
    ncclResult_t result = announce(comm, task) ? wait_for_peers(comm, task) : ncclSuccess;
    host_comm_leave_call(comm);
    return result;
}

static void announce_list(ncclComm_t comm, const host_task_t *task) {
    for (; task != NULL; task = task->next)
        announce(comm, task);
}

static ncclResult_t wait_list(ncclComm_t comm, const host_task_t *task) {
    ncclResult_t result = ncclSuccess;
    for (; task != NULL && result == ncclSuccess; task = task->next)
        if (task->function < HOST_COLLECTIVES ? !comm->connected[task->function]
                                              : !comm->met[task->root] && task->root != comm->rank)
            result = wait_for_peers(comm, task);
    return result;
}

ncclResult_t host_contact(host_plan_t *plans, bool with_messages) {
    ncclResult_t result = ncclSuccess;
    for (host_plan_t *plan = plans; plan != NULL; plan = plan->next)
        if (applies(plan->comm) && host_comm_enter_call(plan->comm)) {
            announce_list(plan->comm, plan->collectives);
            announce_list(plan->comm, with_messages ? plan->messages : NULL);
            host_comm_leave_call(plan->comm);
        }
    for (host_plan_t *plan = plans; plan != NULL && result == ncclSuccess; plan = plan->next)
        if (applies(plan->comm) && host_comm_enter_call(plan->comm)) {
            result = wait_list(plan->comm, plan->collectives);
            if (result == ncclSuccess)
                result = wait_list(plan->comm, with_messages ? plan->messages : NULL);
            host_comm_leave_call(plan->comm);
        }
    return result;
}
