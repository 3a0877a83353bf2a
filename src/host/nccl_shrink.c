/* ncclCommShrink: the ranks that stay make a new communicator, and need nothing of those that do not. */
#include "nccl_group.h"

#include <stdlib.h>

static host_shrink_t *request_of(host_clique_t *clique, int rank) {
    return &host_segment_area(clique->head, rank)->shrink;
}

static bool stays(uint64_t survivors, int rank) {
    return (survivors >> rank & 1) != 0;
}

/* ---- the exchange -------------------------------------------------------------------------------- */

/* Ranks that exclude different ones would wait for each other for ever. */
static ncclResult_t compare(ncclComm_t parent, host_clique_t *clique, uint64_t survivors) {
    if (host_config()->mode != HOST_STRICT)
        return ncclSuccess;
    for (int rank = 0; rank < parent->ranks; rank++) {
        if (!stays(survivors, rank))
            continue;
        host_shrink_t *request = request_of(clique, rank);
        if (atomic_load(&request->state) == HOST_SHRINK_ASKED &&
            atomic_load(&request->survivors) != survivors)
            return host_fail(ncclInvalidUsage,
                             "ncclCommShrink: rank %d and rank %d do not exclude the same ranks",
                             parent->rank, rank);
        if (atomic_load(&host_segment_area(clique->head, rank)->presence) == HOST_LEFT)
            return host_fail(ncclRemoteError, "ncclCommShrink: rank %d has left the communicator", rank);
    }
    return ncclSuccess;
}

static bool all_asked(ncclComm_t parent, host_clique_t *clique, uint64_t survivors) {
    for (int rank = 0; rank < parent->ranks; rank++) {
        host_shrink_t *request = request_of(clique, rank);
        if (stays(survivors, rank) && (atomic_load(&request->state) != HOST_SHRINK_ASKED ||
                                       atomic_load(&request->survivors) != survivors))
            return false;
    }
    return true;
}

static ncclResult_t wait_for_turn(ncclComm_t parent, host_clique_t *clique, uint64_t survivors, bool leads) {
    host_shrink_t *own = request_of(clique, parent->rank);
    for (;;) {
        uint32_t seen = host_bell_look(&parent->area->bell);
        if (leads ? all_asked(parent, clique, survivors) : atomic_load(&own->state) == HOST_SHRINK_ANSWERED)
            return ncclSuccess;
        ncclResult_t result = compare(parent, clique, survivors);
        if (result == ncclSuccess)
            result = host_comm_nap(parent, &parent->area->bell, seen);
        if (result != ncclSuccess)
            return result;
    }
}

static ncclResult_t answer_all(ncclComm_t parent, host_clique_t *clique, uint64_t survivors) {
    ncclUniqueId id;
    ncclResult_t result = host_segment_offer(&id);
    for (int rank = 0; rank < parent->ranks && result == ncclSuccess; rank++) {
        if (!stays(survivors, rank))
            continue;
        host_shrink_t *request = request_of(clique, rank);
        request->id = id;
        atomic_store(&request->state, HOST_SHRINK_ANSWERED);
        host_bell_ring(&host_segment_area(clique->head, rank)->bell);
    }
    return result;
}

/* The lowest rank that stays makes the id, when all the others have asked for it. */
static ncclResult_t agree(ncclComm_t parent, host_clique_t *clique, uint64_t survivors, ncclUniqueId *id) {
    host_shrink_t *own = request_of(clique, parent->rank);
    int leader = __builtin_ctzll(survivors);
    bool leads = leader == parent->rank;
    atomic_store(&own->survivors, survivors);
    atomic_store(&own->state, HOST_SHRINK_ASKED);
    host_clique_ring(clique, parent->rank);
    ncclResult_t result = wait_for_turn(parent, clique, survivors, leads);
    if (result == ncclSuccess && leads)
        result = answer_all(parent, clique, survivors);
    if (result == ncclSuccess)
        *id = own->id;
    atomic_store(&own->state, HOST_SHRINK_IDLE);
    return result;
}

static ncclResult_t shrink(host_job_t *job) {
    ncclComm_t parent = job->parent;
    uint64_t survivors = job->survivors;
    ncclUniqueId id;
    if (job->ranks != __builtin_popcountll(survivors)) /* a rank was excluded twice, or none of them */
        return host_comm_hang(parent, "waiting for ranks that will not come");
    ncclResult_t result = agree(parent, atomic_load(&parent->clique), survivors, &id);
    if (result != ncclSuccess)
        return result;
    int rank = __builtin_popcountll(survivors & (((uint64_t)1 << parent->rank) - 1));
    return host_child_make(job, job->ranks, rank, &id);
}

static ncclResult_t run_shrink(host_job_t *job) {
    ncclComm_t parent = job->parent;
    if (!host_comm_enter_call(parent))
        return host_fail(ncclInternalError, "ncclCommShrink: the parent is aborted");
    ncclResult_t result = host_comm_fault(parent, "init", "ncclCommShrink");
    if (result == ncclSuccess) {
        atomic_store(&parent->needed, job->survivors);
        result = shrink(job);
        atomic_store(&parent->needed, ~(uint64_t)0);
    }
    host_comm_leave_call(parent);
    return result;
}

/* ---- the call ------------------------------------------------------------------------------------ */

static int ascending(const void *a, const void *b) {
    int left = *(const int *)a, right = *(const int *)b;
    return (left > right) - (left < right);
}

/* NCCL looks for nothing but the caller in the list, and then hangs over a rank that is named twice. */
static ncclResult_t read_list(ncclComm_t comm, int *list, int count, uint64_t *survivors) {
    if (list == NULL || count <= 0)
        return host_fail(ncclInvalidArgument, "ncclCommShrink: %d ranks to exclude, listed at %p", count,
                         (void *)list);
    qsort(list, (size_t)count, sizeof *list, ascending); /* NCCL sorts the caller's array too */
    bool strict = host_config()->mode == HOST_STRICT;
    *survivors = comm->ranks == 64 ? ~(uint64_t)0 : ((uint64_t)1 << comm->ranks) - 1;
    for (int i = 0; i < count; i++) {
        bool known = list[i] >= 0 && list[i] < comm->ranks;
        if (list[i] == comm->rank)
            return host_fail(ncclInvalidArgument, "ncclCommShrink: rank %d excludes itself", comm->rank);
        if (strict && (!known || !stays(*survivors, list[i])))
            return host_fail(ncclInvalidArgument, "ncclCommShrink: rank %d %s", list[i],
                             known ? "is listed twice" : "is not in the communicator");
        if (known)
            *survivors &= ~((uint64_t)1 << list[i]);
    }
    return ncclSuccess;
}

static ncclResult_t queue_shrink(ncclComm_t comm, int *list, int count, ncclComm_t *newcomm,
                                 const ncclConfig_t *config, bool aborting) {
    host_job_t job = {.run = run_shrink, .comm = comm, .parent = comm, .function = "ncclCommShrink"};
    if (newcomm == NULL)
        return host_fail(ncclInvalidArgument, "ncclCommShrink: the pointer for the new communicator is NULL");
    ncclResult_t result = read_list(comm, list, count, &job.survivors);
    /* What made the caller abort its operations is no reason to refuse what it does then. */
    if (result == ncclSuccess && (!aborting || host_comm_state(comm) == ncclInProgress))
        result = host_comm_ready(comm, "ncclCommShrink");
    if (result != ncclSuccess)
        return result;
    *newcomm = NULL;
    job.out = newcomm;
    job.ranks = comm->ranks - count;
    job.share = comm->config.shrinkShare == 1 && !aborting && !atomic_load(&comm->revoked);
    result = host_config_inherit(config, &comm->config, &job.config);
    return result == ncclSuccess ? host_group_add_job(&job) : result;
}

/* Stop what runs, on the host, before anything else. */
static ncclResult_t cut_operations(ncclComm_t comm) {
    ncclResult_t result = host_comm_check(comm, "ncclCommShrink");
    if (result != ncclSuccess)
        return result;
    host_comm_hold(comm);
    host_comm_stop(comm);
    host_comm_await_background(comm);
    result = host_comm_cut(comm);
    host_comm_release(comm);
    return result;
}

ncclResult_t ncclCommShrink(ncclComm_t comm, int *excludeRanksList, int excludeRanksCount,
                            ncclComm_t *newcomm, ncclConfig_t *config, int shrinkFlags) {
    static const char name[] = "ncclCommShrink";
    bool aborting = (shrinkFlags & NCCL_SHRINK_ABORT) != 0;
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, name, comm);
    entry.record.count = (uint64_t)excludeRanksCount;
    if (result == ncclSuccess) {
        host_group_start();
        if (aborting)
            result = cut_operations(comm);
        if (result == ncclSuccess)
            result = host_comm_pin(comm, name);
        if (result == ncclSuccess) {
            result = queue_shrink(comm, excludeRanksList, excludeRanksCount, newcomm, config, aborting);
            host_comm_unpin(comm);
        }
        result = host_group_close(result);
    }
    return host_entry_end(&entry, result == ncclInProgress ? ncclSuccess : result);
}
