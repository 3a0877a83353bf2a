/* ncclCommGrow: the ranks of a communicator and new ones make a bigger communicator.
 *
 * One rank makes an id and leaves it with ranks 0 and n - 1, as NCCL does; all other ranks find it with rank
 * 0. New ranks are given it by the program.
 */
#include "nccl_group.h"

#include <stdlib.h>

static const char name[] = "ncclCommGrow";

static host_grow_t *box_of(host_clique_t *clique, int rank) {
    return &host_segment_area(clique->head, rank)->grow;
}

/* ---- the id -------------------------------------------------------------------------------------- */

static void leave_id(host_clique_t *clique, int rank, uint32_t number, const ncclUniqueId *id) {
    host_grow_t *box = box_of(clique, rank);
    box->id = *id;
    atomic_store(&box->told, number);
}

/* NCCL hands the id over by a socket on which nobody listens before ncclCommGrow. */
static ncclResult_t wait_for_taker(ncclComm_t comm, host_clique_t *clique, int rank, uint32_t number) {
    while (rank != comm->rank) {
        uint32_t seen = host_bell_look(&comm->area->bell);
        if (atomic_load(&box_of(clique, rank)->entered) >= number)
            break;
        ncclResult_t result = host_comm_nap(comm, &comm->area->bell, seen);
        if (result != ncclSuccess)
            return result;
    }
    return ncclSuccess;
}

static ncclResult_t tell_id(ncclComm_t comm, ncclUniqueId *id) {
    static const char caller[] = "ncclCommGetUniqueId";
    host_clique_t *clique = atomic_load(&comm->clique);
    uint32_t number = comm->children + 1;
    if (comm->id_for == number)
        return host_fail(ncclInvalidUsage, "%s: the id that it gave last has not been used yet", caller);
    ncclResult_t result = host_segment_offer(id);
    if (result != ncclSuccess)
        return result;
    comm->id_for = number;
    int last = comm->ranks - 1;
    leave_id(clique, 0, number, id);
    leave_id(clique, last, number, id);
    host_clique_ring(clique, comm->rank);
    if (host_config()->temper == HOST_GPULIKE && comm->ranks > 1) {
        result = wait_for_taker(comm, clique, 0, number);
        if (result == ncclSuccess)
            result = wait_for_taker(comm, clique, last, number);
    }
    if (result != ncclSuccess)
        host_segment_withdraw(id);
    return result;
}

ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId *uniqueId) {
    static const char caller[] = "ncclCommGetUniqueId";
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, caller, comm);
    if (result == ncclSuccess)
        result = host_comm_pin(comm, caller);
    if (result != ncclSuccess)
        return host_entry_end(&entry, result);
    result = host_comm_ready(comm, caller);
    if (result == ncclSuccess && uniqueId == NULL)
        result = host_fail(ncclInvalidArgument, "%s: the pointer for the id is NULL", caller);
    if (result == ncclSuccess && getenv("NCCL_COMM_ID") != NULL)
        result = host_fail(ncclInvalidUsage, "%s: NCCL_COMM_ID is set", caller);
    if (result == ncclSuccess)
        result = tell_id(comm, uniqueId);
    host_comm_unpin(comm);
    return host_entry_end(&entry, result);
}

/* `waiter` is who is aborted to end the wait. */
static ncclResult_t take_id(ncclComm_t parent, ncclComm_t waiter, int holder, uint32_t number,
                            ncclUniqueId *id) {
    host_grow_t *box = box_of(atomic_load(&parent->clique), holder);
    for (;;) {
        uint32_t seen = host_bell_look(&parent->area->bell);
        uint32_t told = atomic_load(&box->told);
        if (told == number) {
            *id = box->id;
            return ncclSuccess;
        }
        if (told > number)
            return host_fail(ncclInvalidArgument,
                             "%s: this is child %u of the communicator here, and child %u elsewhere", name,
                             number, told);
        ncclResult_t result = host_comm_nap(waiter, &parent->area->bell, seen);
        if (result != ncclSuccess)
            return result;
    }
}

/* ---- ranks of the communicator that grows -------------------------------------------------------- */

static bool is_boundary(ncclComm_t comm) {
    return comm->rank == 0 || comm->rank == comm->ranks - 1;
}

static ncclResult_t join(host_job_t *job) {
    ncclComm_t child = job->comm, parent = job->parent;
    ncclResult_t result = host_comm_fault(child, "init", name);
    if (result == ncclSuccess)
        result = host_child_turn(job);
    if (result == ncclSuccess && !is_boundary(parent))
        result = take_id(parent, child, 0, job->number, &job->id);
    if (result == ncclSuccess)
        result = host_init_exchange(child, &job->id, 0);
    return result;
}

static ncclResult_t run_grow(host_job_t *job) {
    ncclComm_t child = job->comm, parent = job->parent;
    ncclResult_t result = ncclInternalError;
    bool entered = host_comm_enter_call(child);
    if (entered && host_comm_enter_call(parent)) {
        child->parent = parent;
        result = join(job);
        child->parent = NULL;
        host_comm_leave_call(parent);
    } else {
        host_last_error("%s: aborted", name);
    }
    host_segment_withdraw(result == ncclSuccess ? NULL : &job->id);
    atomic_store(&child->state, (int)result);
    host_child_done(job);
    host_comm_release(parent);
    if (entered)
        host_comm_leave_call(child);
    return result;
}

static void undo_grow(host_job_t *job) {
    atomic_store(&job->comm->state, (int)job->result);
    host_child_done(job);
    host_comm_release(job->parent);
}

/* Ranks 0 and n - 1 wait for the id here, in the call, also where the communicator is non-blocking. */
static ncclResult_t receive_id(ncclComm_t comm, const ncclUniqueId *given, host_job_t *job) {
    job->number = ++comm->children;
    if (comm->ranks == 1 && given == NULL)
        return host_fail(ncclInvalidArgument, "%s: the id is NULL on the only rank of the communicator",
                         name);
    if (!is_boundary(comm))
        return ncclSuccess;
    atomic_store(&comm->area->grow.entered, job->number);
    host_clique_ring(atomic_load(&comm->clique), comm->rank);
    return take_id(comm, comm, comm->rank, job->number, &job->id);
}

static ncclResult_t publish(host_job_t *job, int rank, int device, ncclComm_t *newcomm) {
    ncclComm_t made = host_comm_new(job->ranks, rank, device, &job->config, NULL);
    if (made == NULL)
        return ncclSystemError;
    job->comm = made;
    ncclResult_t result = host_group_add_job(job);
    if (result != ncclSuccess) {
        host_comm_detach(made);
        return result;
    }
    __atomic_store_n(newcomm, made, __ATOMIC_RELEASE);
    return ncclSuccess;
}

/* The communicator is pinned. */
static ncclResult_t queue_existing(ncclComm_t comm, int ranks, const ncclUniqueId *id, int rank,
                                   ncclComm_t *newcomm, const ncclConfig_t *config) {
    host_job_t job = {
        .run = run_grow, .undo = undo_grow, .parent = comm, .function = name, .out = newcomm, .ranks = ranks};
    ncclResult_t result = host_comm_ready(comm, name);
    if (result == ncclSuccess && rank != -1)
        result = host_fail(ncclInvalidArgument, "%s: a rank of the communicator passes rank -1, not %d", name,
                           rank);
    if (result != ncclSuccess)
        return result;
    result = receive_id(comm, id, &job);
    if (result == ncclSuccess)
        result = host_config_inherit(config, &comm->config, &job.config);
    if (result == ncclSuccess) {
        host_comm_hold(comm); /* for the job */
        result = publish(&job, comm->rank, comm->device, newcomm);
        if (result != ncclSuccess)
            host_comm_release(comm);
    }
    if (result != ncclSuccess)
        host_child_done(&job);
    return result;
}

/* ---- new ranks ----------------------------------------------------------------------------------- */

static ncclResult_t queue_new(int ranks, const ncclUniqueId *id, int rank, ncclComm_t *newcomm,
                              const ncclConfig_t *config, bool *leaks) {
    int device;
    if (id == NULL)
        return host_fail(ncclInvalidArgument, "%s: the id is NULL for new rank %d", name, rank);
    ncclResult_t result = host_init_ranks(name, ranks, rank);
    if (result != ncclSuccess)
        return result;
    result = host_init_device(name, &device);
    *leaks = result != ncclSuccess && host_config()->quirk_depth_leak;
    host_job_t job = {
        .run = host_init_run, .undo = host_init_undo, .function = name, .id = *id, .ranks = ranks};
    if (result == ncclSuccess)
        result = host_config_parse(config, &job.config);
    return result == ncclSuccess ? publish(&job, rank, device, newcomm) : result;
}

/* ---- the call ------------------------------------------------------------------------------------ */

static ncclResult_t check(ncclComm_t comm, int ranks, ncclComm_t *newcomm) {
    if (newcomm == NULL)
        return host_fail(ncclInvalidArgument, "%s: the pointer for the new communicator is NULL", name);
    if (ranks <= 0 || ranks > HOST_MAX_RANKS)
        return host_fail(ncclInvalidArgument, "%s: %d ranks; the host engine has at most %d", name, ranks,
                         HOST_MAX_RANKS);
    if (comm == NULL)
        return ncclSuccess;
    ncclResult_t result = host_comm_check(comm, name);
    if (result == ncclSuccess && ranks <= comm->ranks)
        result = host_fail(ncclInvalidArgument, "%s: %d ranks are no more than the %d there are", name, ranks,
                           comm->ranks);
    return result;
}

/* On a non-blocking communicator it answers at once that all is well; the new one is polled. */
ncclResult_t ncclCommGrow(ncclComm_t comm, int nRanks, const ncclUniqueId *uniqueId, int rank,
                          ncclComm_t *newcomm, ncclConfig_t *config) {
    host_entry_t entry;
    bool leaks = false;
    ncclResult_t result = host_entry_begin(&entry, name, comm);
    if (result == ncclSuccess)
        result = check(comm, nRanks, newcomm);
    if (result != ncclSuccess)
        return host_entry_end(&entry, result);
    *newcomm = NULL;
    host_group_start();
    if (comm == NULL) {
        result = queue_new(nRanks, uniqueId, rank, newcomm, config, &leaks);
    } else {
        result = host_comm_pin(comm, name);
        if (result == ncclSuccess) {
            result = queue_existing(comm, nRanks, uniqueId, rank, newcomm, config);
            host_comm_unpin(comm);
        }
    }
    if (!leaks)
        result = host_group_close(result);
    return host_entry_end(&entry, result == ncclInProgress ? ncclSuccess : result);
}
