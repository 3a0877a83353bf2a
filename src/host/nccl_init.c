/* How communicators begin: unique ids, InitRank, InitAll, and the exchange between the ranks. */
#include "nccl.h"

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

ncclResult_t host_init_exchange(ncclComm_t comm, const ncclUniqueId *id) {
    ncclResult_t result = host_clique_join(comm, id);
    if (result == ncclInvalidUsage && host_config()->mode == HOST_FAITHFUL)
        result = host_comm_hang(comm, "waiting for ranks that will not come");
    if (result != ncclSuccess)
        return result;
    host_clique_t *clique = atomic_load(&comm->clique);
    atomic_store(&comm->area->presence, HOST_READY);
    atomic_fetch_add(&clique->head->ready, 1);
    host_clique_ring(clique, comm->rank);
    result = wait_for_all(comm, clique);
    if (result != ncclSuccess)
        return result;
    host_clique_meet(clique);
    result = check_devices(comm, clique);
    if (result == ncclSuccess)
        result = check_encryption(comm, clique);
    return result == ncclSuccess ? host_rma_begin(comm) : result;
}

/* ---- InitRank ------------------------------------------------------------------------------------ */

static ncclResult_t run_init(host_job_t *job) {
    ncclComm_t comm = job->comm;
    if (!host_comm_enter_call(comm))
        return host_fail(ncclInternalError, "%s: aborted", job->function);
    ncclResult_t result = host_comm_fault(comm, "init", job->function);
    if (result == ncclSuccess)
        result = host_init_exchange(comm, &job->id);
    host_segment_withdraw(result == ncclSuccess ? NULL : &job->id);
    atomic_store(&comm->state, (int)result);
    host_comm_leave_call(comm);
    return result;
}

static void undo_init(host_job_t *job) {
    atomic_store(&job->comm->state, (int)job->result);
}

static ncclResult_t queue_init(const char *function, ncclComm_t *out, int ranks, const ncclUniqueId *id,
                               int rank, int device, const ncclConfig_t *given) {
    ncclConfig_t config;
    if (out == NULL)
        return host_fail(ncclInvalidArgument, "%s: the pointer for the communicator is NULL", function);
    __atomic_store_n(out, NULL, __ATOMIC_RELAXED);
    if (ranks < 1 || rank < 0 || rank >= ranks)
        return host_fail(ncclInvalidArgument, "%s: rank %d of %d", function, rank, ranks);
    if (ranks > HOST_MAX_RANKS)
        return host_fail(ncclInvalidArgument, "%s: %d ranks; the host engine has at most %d", function, ranks,
                         HOST_MAX_RANKS);
    ncclResult_t result = host_config_parse(given, &config);
    if (result != ncclSuccess)
        return result;
    ncclComm_t comm = host_comm_new(ranks, rank, device, &config, NULL);
    if (comm == NULL)
        return ncclSystemError;
    host_job_t job = {.run = run_init, .undo = undo_init, .comm = comm, .function = function, .id = *id};
    result = host_group_add_job(&job);
    if (result != ncclSuccess) {
        host_comm_detach(comm);
        return result;
    }
    /* Before anything waits, so that another thread can abort it. */
    __atomic_store_n(out, comm, __ATOMIC_RELEASE);
    return ncclSuccess;
}

static ncclResult_t read_device(const char *function, int *device) {
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
    if (result == ncclSuccess) {
        host_group_start();
        result = read_device("ncclCommInitRank", &device);
        if (result == ncclSuccess)
            result = queue_init("ncclCommInitRank", comm, nranks, &commId, rank, device, NULL);
        result = host_group_close(result);
    }
    if (result == ncclSuccess)
        result = host_comm_progress(*comm, result);
    entry.record.rank = rank;
    return host_entry_end(&entry, result);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank,
                                    ncclConfig_t *config) {
    host_entry_t entry;
    int device;
    ncclResult_t result = host_entry_begin(&entry, "ncclCommInitRankConfig", NULL);
    if (result == ncclSuccess) {
        host_group_start();
        result = read_device("ncclCommInitRankConfig", &device);
        bool leaks = result != ncclSuccess && host_config()->quirk_depth_leak;
        if (result == ncclSuccess)
            result = queue_init("ncclCommInitRankConfig", comm, nranks, &commId, rank, device, config);
        if (!leaks)
            result = host_group_close(result);
    }
    if (result == ncclSuccess)
        result = host_comm_progress(*comm, result);
    entry.record.rank = rank;
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
        host_group_poison(queue_init("ncclCommInitAll", &comms[rank], ndev, id, rank, device, NULL));
    }
    return ncclSuccess;
}

static ncclResult_t init_all(ncclComm_t *comms, int ndev, const int *devlist) {
    ncclUniqueId id;
    int before;
    if (comms == NULL || ndev < 1)
        return host_fail(ncclInvalidArgument, "ncclCommInitAll: %d devices, communicators at %p", ndev,
                         (void *)comms);
    ncclResult_t result = check_list(ndev, devlist);
    if (result == ncclSuccess)
        result = host_segment_offer(&id);
    if (result != ncclSuccess)
        return result;
    memset(comms, 0, (size_t)ndev * sizeof *comms);
    if (host_current_device(&before, false) != CUDA_SUCCESS)
        before = -1;
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
