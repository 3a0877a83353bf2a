/* How communicators end: Finalize, Destroy, Abort. */
#include "nccl_group.h"

/* ---- finalize ------------------------------------------------------------------------------------ */

/* Until all that was issued is done. */
static ncclResult_t drain(ncclComm_t comm) {
    host_order_t *order = comm->order;
    uint64_t target = atomic_load(&order->issued);
    for (;;) {
        uint32_t seen = host_bell_look(&order->bell);
        if (atomic_load(&order->turn) >= target)
            return ncclSuccess;
        ncclResult_t result = host_comm_state(comm);
        if (result == ncclSuccess)
            result = host_comm_nap(comm, &order->bell, seen);
        if (result != ncclSuccess)
            return result;
    }
}

static void say_finalized(ncclComm_t comm, host_clique_t *clique) {
    atomic_store(&comm->area->finalized, 1);
    host_clique_ring(clique, comm->rank);
}

/* All ranks are on this host, so that NCCL's barrier between the ranks of a host is one of all ranks. */
static ncclResult_t wait_finalized(ncclComm_t comm, host_clique_t *clique) {
    for (int rank = 0; rank < comm->ranks;) {
        host_area_t *peer = host_segment_area(clique->head, rank);
        uint32_t seen = host_bell_look(&comm->area->bell);
        uint32_t presence = atomic_load(&peer->presence);
        if (atomic_load(&peer->finalized) != 0) {
            rank++;
            continue;
        }
        if (presence == HOST_LEFT)
            return host_fail(ncclRemoteError, "rank %d was aborted before it was finalized", rank);
        ncclResult_t result = host_comm_nap(comm, &comm->area->bell, seen);
        if (result != ncclSuccess)
            return result;
    }
    comm->finalized = true;
    return ncclSuccess;
}

static ncclResult_t run_finalize(host_job_t *job) {
    ncclComm_t comm = job->comm;
    if (!host_comm_enter_call(comm))
        return host_fail(ncclInternalError, "ncclCommFinalize: the communicator is aborted");
    host_clique_t *clique = atomic_load(&comm->clique);
    ncclResult_t result = host_comm_fault(comm, "finalize", "ncclCommFinalize");
    if (result == ncclSuccess)
        result = drain(comm);
    if (result == ncclSuccess)
        host_graphs_wait(comm, true);
    if (result == ncclSuccess) {
        say_finalized(comm, clique);
        result = wait_finalized(comm, clique);
    }
    host_comm_leave_call(comm);
    return result;
}

static void undo_finalize(host_job_t *job) {
    job->comm->finalize_called = false;
}

static ncclResult_t queue_finalize(ncclComm_t comm) {
    ncclResult_t result = host_comm_ready(comm, "ncclCommFinalize");
    if (result != ncclSuccess)
        return result;
    if (comm->finalize_called)
        return host_fail(ncclInvalidArgument, "ncclCommFinalize: the communicator was %s before",
                         atomic_load(&comm->revoked) ? "revoked" : "finalized");
    comm->finalize_called = true;
    host_job_t job = {
        .run = run_finalize, .undo = undo_finalize, .comm = comm, .function = "ncclCommFinalize"};
    result = host_group_add_job(&job);
    if (result != ncclSuccess)
        undo_finalize(&job);
    return result;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, "ncclCommFinalize", comm);
    if (result == ncclSuccess && comm != NULL) {
        host_group_start();
        result = host_comm_pin(comm, "ncclCommFinalize");
        if (result == ncclSuccess) {
            result = queue_finalize(comm);
            host_comm_unpin(comm);
        }
        result = host_comm_progress(comm, host_group_close(result));
    }
    return host_entry_end(&entry, result);
}

/* ---- reclaim ------------------------------------------------------------------------------------- */

void host_comm_detach(ncclComm_t comm) {
    atomic_store(&comm->magic, HOST_COMM_DEAD);
    host_registrations_drop(comm);
    /* An abort of a communicator that shares resources with this one looks at it under this lock. */
    pthread_mutex_lock(&comm->order->lock);
    atomic_store(&comm->stop, 1);
    if (atomic_load(&comm->clique) != NULL)
        host_bell_ring(&comm->area->bell);
    pthread_mutex_unlock(&comm->order->lock);
    host_bell_ring(&comm->order->bell);
    host_comm_settle(comm);
    pthread_mutex_lock(&comm->order->lock);
    host_clique_t *clique = atomic_exchange(&comm->clique, NULL);
    pthread_mutex_unlock(&comm->order->lock);
    if (clique != NULL) {
        if (atomic_exchange(&comm->area->presence, HOST_LEFT) != HOST_LEFT)
            host_clique_ring(clique, comm->rank);
        host_clique_release(clique);
    }
    atomic_fetch_sub(&host_live_communicators, 1);
    host_comm_release(comm);
}

/* What was revoked waits for nobody. */
static bool needs_finalize(ncclComm_t comm) {
    return !comm->finalized && !host_comm_stopped(comm) && !atomic_load(&comm->revoked);
}

/* The last of a process finalizes for all: first everybody says so, then everybody is waited for. */
static ncclResult_t finalize_all(ncclComm_t members) {
    ncclResult_t result = ncclSuccess;
    for (ncclComm_t comm = members; comm != NULL && result == ncclSuccess; comm = comm->next_member)
        if (needs_finalize(comm)) {
            result = drain(comm);
            if (result == ncclSuccess)
                say_finalized(comm, atomic_load(&comm->clique));
            else
                host_comm_stop(comm); /* what it left undone would block whoever shares its order */
        }
    for (ncclComm_t comm = members; comm != NULL && result == ncclSuccess; comm = comm->next_member)
        if (needs_finalize(comm))
            result = wait_finalized(comm, atomic_load(&comm->clique));
    return result;
}

/* Memory goes with the last communicator of the clique in this process; until then a handle is only dead. */
ncclResult_t host_comm_reclaim(ncclComm_t comm) {
    ncclResult_t result = ncclSuccess;
    ncclComm_t members = NULL;
    bool aborting = host_comm_stopped(comm);
    atomic_store(&comm->magic, HOST_COMM_DEAD);
    if (aborting)
        host_comm_settle(comm);
    host_clique_t *clique = atomic_load(&comm->clique);
    if (clique == NULL) {
        host_comm_detach(comm);
        return result;
    }
    if (aborting) {
        atomic_store(&comm->area->presence, HOST_LEFT);
        host_clique_ring(clique, comm->rank);
    }
    if (!host_clique_leave(comm, &members))
        return result;
    for (ncclComm_t member = members; member != NULL; member = member->next_member)
        host_graphs_wait(member, false); /* also after an abort: so does NCCL */
    result = finalize_all(members);
    while (members != NULL) {
        ncclComm_t next = members->next_member;
        host_comm_detach(members);
        members = next;
    }
    return result;
}

static void undo_reclaim(host_job_t *job) {
    atomic_store(&job->comm->reclaim_queued, false);
}

static ncclResult_t run_reclaim(host_job_t *job, const char *site) {
    ncclResult_t result = host_reclaim_fault(job->comm, site, job->function);
    if (result == ncclSuccess)
        return host_comm_reclaim(job->comm);
    undo_reclaim(job);
    return result;
}

static ncclResult_t run_destroy(host_job_t *job) {
    return run_reclaim(job, "destroy");
}

static ncclResult_t run_abort(host_job_t *job) {
    return run_reclaim(job, "abort");
}

static ncclResult_t queue_reclaim(ncclComm_t comm, const char *function,
                                  ncclResult_t (*run)(host_job_t *job)) {
    if (atomic_exchange(&comm->reclaim_queued, true)) {
        if (host_misuse_watched())
            host_misuse("%s: the communicator %p is on its way out already", function, (void *)comm);
        return host_fail(ncclInvalidArgument, "%s: the communicator is on its way out already", function);
    }
    host_job_t job = {.run = run, .undo = undo_reclaim, .comm = comm, .function = function, .ends = true};
    ncclResult_t result = host_group_add_job(&job);
    if (result != ncclSuccess)
        undo_reclaim(&job);
    return result;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    static const char name[] = "ncclCommDestroy";
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, name, comm);
    if (result != ncclSuccess || comm == NULL)
        return host_entry_end(&entry, result);
    host_group_start();
    result = host_comm_pin(comm, name);
    bool leaks = host_config()->quirk_depth_leak;
    if (result == ncclSuccess) {
        result = host_comm_ready(comm, name);
        leaks = leaks && result != ncclSuccess;
        if (result == ncclSuccess)
            result = queue_reclaim(comm, name, run_destroy);
        host_comm_unpin(comm);
    }
    if (!leaks)
        result = host_group_close(result);
    return host_entry_end(&entry, result);
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    static const char name[] = "ncclCommAbort";
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, name, comm);
    if (result != ncclSuccess || comm == NULL)
        return host_entry_end(&entry, result);
    host_group_start();
    result = host_comm_pin(comm, name);
    if (result == ncclSuccess) {
        atomic_store(&comm->aborted, true);
        host_comm_stop(comm); /* at once, also inside a group; only the reclaim waits for its end */
        result = queue_reclaim(comm, name, run_abort);
        host_comm_unpin(comm);
    }
    result = host_group_close(result);
    return host_entry_end(&entry, result);
}
