/* How communicators begin: unique ids, InitRank in all forms, InitAll, and the exchange between the ranks. */
#include "nccl_group.h"

#include <string.h>

ncclResult_t ncclGetUniqueId(ncclUniqueId *uniqueId) {
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, "ncclGetUniqueId", NULL);
    if (result == ncclSuccess && uniqueId == NULL)
        result = host_fail(ncclInvalidArgument, "ncclGetUniqueId: the pointer for the id is NULL");
    if (result == ncclSuccess)
        result = host_segment_offer(uniqueId);
    return host_entry_end(&entry, result);
}

/* ---- the exchange -------------------------------------------------------------------------------- */

static ncclResult_t check_peers(ncclComm_t comm, host_clique_t *clique) {
    bool strict = host_config()->mode == HOST_STRICT;
    if (strict && atomic_load(&clique->head->broken) == 2)
        return host_fail(ncclInvalidUsage, "%s", clique->head->reason);
    for (int rank = 0; strict && rank < comm->ranks; rank++)
        if (atomic_load(&host_segment_area(clique->head, rank)->presence) == HOST_LEFT)
            return host_fail(ncclRemoteError, "rank %d gave up while rank %d waited for all ranks", rank,
                             comm->rank);
    return ncclSuccess;
}

static ncclResult_t wait_for_all(ncclComm_t comm, host_clique_t *clique) {
    for (;;) {
        uint32_t seen = host_bell_look(&comm->area->bell);
        if (atomic_load(&clique->head->ready) == (uint32_t)comm->ranks)
            return ncclSuccess;
        ncclResult_t result = check_peers(comm, clique);
        if (result != ncclSuccess)
            return result;
        host_clique_meet(clique);
        result = host_comm_nap(comm, &comm->area->bell, seen);
        if (result != ncclSuccess)
            return result;
    }
}

/* What only the exchange can show. Ranks with different lists of ids would wait for ever in NCCL. */
static ncclResult_t check_agreement(ncclComm_t comm, host_clique_t *clique) {
    const host_area_t *own = comm->area;
    for (int rank = 0; rank < comm->ranks; rank++) {
        const host_area_t *peer = host_segment_area(clique->head, rank);
        if (peer->version != own->version)
            return host_fail(ncclInvalidUsage, "rank %d has NCCL %d and rank %d NCCL %d", comm->rank,
                             own->version, rank, peer->version);
        if (peer->ids != own->ids && host_config()->mode == HOST_FAITHFUL)
            return host_comm_hang(comm, "waiting for ranks with other unique ids");
        if (peer->ids != own->ids)
            return host_fail(ncclInvalidUsage, "rank %d and rank %d were given different lists of unique ids",
                             comm->rank, rank);
    }
    return ncclSuccess;
}

/* Devices are virtual, and each process has its own set. */
static ncclResult_t check_devices(ncclComm_t comm, host_clique_t *clique) {
    if (host_config()->multi_rank)
        return ncclSuccess;
    for (int b = 1; b < comm->ranks; b++)
        for (int a = 0; a < b; a++) {
            const host_area_t *first = host_segment_area(clique->head, a);
            const host_area_t *second = host_segment_area(clique->head, b);
            if (first->pid == second->pid && first->start == second->start && first->device == second->device)
                return host_fail(ncclInvalidUsage,
                                 "duplicate device: rank %d and rank %d both use device %d of process %d", a,
                                 b, first->device, first->pid);
        }
    return ncclSuccess;
}

/* Each would refuse the other's sockets. */
static ncclResult_t check_encryption(ncclComm_t comm, host_clique_t *clique) {
    for (int rank = 0; rank < comm->ranks; rank++)
        if (host_segment_area(clique->head, rank)->encryption != comm->area->encryption)
            return host_fail(ncclRemoteError, "rank %d and rank %d have set different keys, or only one has",
                             comm->rank, rank);
    return ncclSuccess;
}

ncclResult_t host_init_exchange(ncclComm_t comm, const ncclUniqueId *id, uint64_t ids) {
    ncclResult_t result = host_clique_join(comm, id);
    if (result == ncclInvalidUsage && host_config()->mode == HOST_FAITHFUL)
        result = host_comm_hang(comm, "waiting for ranks that will not come");
    if (result != ncclSuccess)
        return result;
    host_clique_t *clique = atomic_load(&comm->clique);
    comm->area->ids = ids;
    atomic_store(&comm->area->presence, HOST_READY);
    atomic_fetch_add(&clique->head->ready, 1);
    host_clique_ring(clique, comm->rank);
    result = wait_for_all(comm, clique);
    if (result != ncclSuccess)
        return result;
    host_clique_meet(clique);
    result = check_agreement(comm, clique);
    if (result == ncclSuccess)
        result = check_devices(comm, clique);
    if (result == ncclSuccess)
        result = check_encryption(comm, clique);
    return result == ncclSuccess ? host_rma_begin(comm) : result;
}

/* ---- InitRank ------------------------------------------------------------------------------------ */

ncclResult_t host_init_run(host_job_t *job) {
    ncclComm_t comm = job->comm;
    if (!host_comm_enter_call(comm))
        return host_fail(ncclInternalError, "%s: aborted", job->function);
    ncclResult_t result = host_comm_fault(comm, "init", job->function);
    if (result == ncclSuccess)
        result = host_init_exchange(comm, &job->id, job->ids);
    host_segment_withdraw(result == ncclSuccess ? NULL : &job->id);
    atomic_store(&comm->state, (int)result);
    host_comm_leave_call(comm);
    return result;
}

void host_init_undo(host_job_t *job) {
    atomic_store(&job->comm->state, (int)job->result);
}

ncclResult_t host_init_ranks(const char *function, int ranks, int rank) {
    if (ranks < 1 || rank < 0 || rank >= ranks)
        return host_fail(ncclInvalidArgument, "%s: rank %d of %d", function, rank, ranks);
    if (ranks > HOST_MAX_RANKS)
        return host_fail(ncclInvalidArgument, "%s: %d ranks; the host engine has at most %d", function, ranks,
                         HOST_MAX_RANKS);
    return ncclSuccess;
}

static ncclResult_t queue_init(const char *function, ncclComm_t *out, int ranks, const ncclUniqueId *id,
                               uint64_t ids, int rank, int device, const ncclConfig_t *given) {
    ncclConfig_t config;
    if (out == NULL)
        return host_fail(ncclInvalidArgument, "%s: the pointer for the communicator is NULL", function);
    __atomic_store_n(out, NULL, __ATOMIC_RELAXED);
    ncclResult_t result = host_init_ranks(function, ranks, rank);
    if (result == ncclSuccess)
        result = host_config_parse(given, &config);
    if (result != ncclSuccess)
        return result;
    ncclComm_t comm = host_comm_new(ranks, rank, device, &config, NULL);
    if (comm == NULL)
        return ncclSystemError;
    host_job_t job = {.run = host_init_run,
                      .undo = host_init_undo,
                      .comm = comm,
                      .function = function,
                      .id = *id,
                      .ids = ids};
    result = host_group_add_job(&job);
    if (result != ncclSuccess) {
        host_comm_detach(comm);
        return result;
    }
    /* Before anything waits, so that another thread can abort it. */
    __atomic_store_n(out, comm, __ATOMIC_RELEASE);
    return ncclSuccess;
}

ncclResult_t host_init_device(const char *function, int *device) {
    CUresult status = host_current_device(device, true);
    if (status != CUDA_SUCCESS)
        return host_fail(ncclUnhandledCudaError, "%s: no current device (CUDA error %d)", function,
                         (int)status);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank) {
    host_entry_t entry;
    int device;
    ncclResult_t result = host_entry_begin(&entry, "ncclCommInitRank", NULL);
    if (result == ncclSuccess)
        result = host_init_device("ncclCommInitRank", &device);
    if (result == ncclSuccess) {
        host_group_start();
        result = queue_init("ncclCommInitRank", comm, nranks, &commId, 0, rank, device, NULL);
        result = host_group_close(result);
    }
    /* With NCCL_COMM_BLOCKING=0 it says that all is well while it is still running. */
    if (result == ncclInProgress)
        result = ncclSuccess;
    if (result == ncclSuccess && (*comm)->config.blocking != 0)
        result = host_comm_progress(*comm, result);
    entry.record.rank = rank;
    return host_entry_end(&entry, result);
}

/* All ids of a list, in their order; 0 for a single one, which the exchange itself tells. */
static uint64_t hash_ids(const ncclUniqueId *ids, int count) {
    uint64_t hash = 0xcbf29ce484222325ull;
    for (int i = 0; count > 1 && i < count; i++)
        for (size_t k = 0; k < sizeof ids->internal; k++)
            hash = (hash ^ (unsigned char)ids[i].internal[k]) * 0x100000001b3ull;
    return count > 1 ? hash : 0;
}

/* Each process that made one of them must live until the init is done. */
static ncclResult_t check_makers(const ncclUniqueId *ids, int count) {
    ncclResult_t result = ncclSuccess;
    for (int i = 1; i < count && result == ncclSuccess; i++)
        result = host_segment_check(&ids[i]);
    return result;
}

static ncclResult_t init_configured(const char *function, ncclComm_t *out, int ranks, int rank,
                                    const ncclUniqueId *ids, int count, const ncclConfig_t *config) {
    int device;
    host_group_start();
    ncclResult_t result = host_init_device(function, &device);
    bool leaks = result != ncclSuccess && host_config()->quirk_depth_leak;
    if (result == ncclSuccess && (count < 1 || count > ranks))
        result = host_fail(ncclInvalidArgument, "%s: %d unique ids for %d ranks", function, count, ranks);
    if (result == ncclSuccess && ids == NULL)
        result = host_fail(ncclInvalidArgument, "%s: the list of unique ids is NULL", function);
    if (result == ncclSuccess)
        result = check_makers(ids, count);
    if (result == ncclSuccess)
        result = queue_init(function, out, ranks, ids, hash_ids(ids, count), rank, device, config);
    for (int i = 1; i < count && result == ncclSuccess; i++)
        host_segment_withdraw(&ids[i]);
    if (!leaks)
        result = host_group_close(result);
    bool made = out != NULL && *out != NULL && !leaks;
    return made && host_group_depth() == 0 ? host_comm_progress(*out, result) : result;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank,
                                    ncclConfig_t *config) {
    static const char name[] = "ncclCommInitRankConfig";
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, name, NULL);
    if (result == ncclSuccess)
        result = init_configured(name, comm, nranks, rank, &commId, 1, config);
    entry.record.rank = rank;
    return host_entry_end(&entry, result);
}

/* In NCCL each id has a root of its own, so that many ranks need not ask a single one. Here they all meet in
 * the first, and the others only have to be the same on all ranks. */
ncclResult_t ncclCommInitRankScalable(ncclComm_t *newcomm, int nranks, int myrank, int nId,
                                      ncclUniqueId *commIds, ncclConfig_t *config) {
    static const char name[] = "ncclCommInitRankScalable";
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, name, NULL);
    if (result == ncclSuccess)
        result = init_configured(name, newcomm, nranks, myrank, commIds, nId, config);
    entry.record.rank = myrank;
    return host_entry_end(&entry, result);
}

/* ---- InitAll ------------------------------------------------------------------------------------- */

static ncclResult_t check_list(int ndev, const int *devlist) {
    int devices = host_config()->devices;
    for (int i = 0; devlist != NULL && i < ndev; i++) {
        if (devlist[i] < 0 || devlist[i] >= devices)
            return host_fail(ncclInvalidArgument, "ncclCommInitAll: there is no device %d", devlist[i]);
        for (int before = 0; before < i && !host_config()->multi_rank; before++)
            if (devlist[before] == devlist[i])
                return host_fail(ncclInvalidUsage, "ncclCommInitAll: device %d is listed twice", devlist[i]);
    }
    return ncclSuccess;
}

/* Each rank's own error shows at the end of the group, as in NCCL. */
static ncclResult_t queue_all(ncclComm_t *comms, int ndev, const int *devlist, const ncclUniqueId *id) {
    for (int rank = 0; rank < ndev; rank++) {
        int device = devlist != NULL ? devlist[rank] : rank;
        CUresult status = host_set_current_device(device);
        if (status != CUDA_SUCCESS)
            return host_fail(ncclUnhandledCudaError, "ncclCommInitAll: device %d (CUDA error %d)", device,
                             (int)status);
        host_group_poison(queue_init("ncclCommInitAll", &comms[rank], ndev, id, 0, rank, device, NULL));
    }
    return ncclSuccess;
}

static ncclResult_t init_all(ncclComm_t *comms, int ndev, const int *devlist) {
    ncclUniqueId id;
    int before;
    ncclResult_t result = host_init_device("ncclCommInitAll", &before);
    if (result != ncclSuccess)
        return result;
    if (comms == NULL || ndev < 1)
        return host_fail(ncclInvalidArgument, "ncclCommInitAll: %d devices, communicators at %p", ndev,
                         (void *)comms);
    result = check_list(ndev, devlist);
    if (result == ncclSuccess)
        result = host_segment_offer(&id);
    if (result != ncclSuccess)
        return result;
    memset(comms, 0, (size_t)ndev * sizeof *comms);
    host_group_start();
    result = queue_all(comms, ndev, devlist, &id);
    host_set_current_device(before);
    if (result != ncclSuccess) { /* there will never be enough of them */
        host_segment_withdraw(&id);
        for (int rank = 0; rank < ndev; rank++)
            if (comms[rank] != NULL)
                host_comm_stop(comms[rank]);
    }
    if (result != ncclSuccess && host_config()->quirk_depth_leak)
        return result;
    return host_group_close(result);
}

ncclResult_t ncclCommInitAll(ncclComm_t *comm, int ndev, const int *devlist) {
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, "ncclCommInitAll", NULL);
    entry.record.count = (uint64_t)ndev;
    if (result == ncclSuccess)
        result = init_all(comm, ndev, devlist);
    return host_entry_end(&entry, result);
}
