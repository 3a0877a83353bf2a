/* The host side of NCCL's device API, as a system answers where no kernel can reach a peer: each rank is
 * alone in its team of load and store, and communicators for kernels cannot be made. */
#include "nccl_group.h"
#include "nccl_window.h"

#include <stdlib.h>
#include <string.h>

/* The first release that had these structs. */
enum { OLDEST_VERSION = 22902 };

static ncclResult_t check_struct(const char *function, unsigned int magic, unsigned int version) {
    if (magic != NCCL_API_MAGIC)
        return host_fail(ncclInvalidUsage, "%s: the magic number is %#x; was the struct initialised?",
                         function, magic);
    const char *lenient = getenv("NCCL_ENABLE_VERSION_CHECK");
    unsigned int own = (unsigned int)host_nccl_version();
    bool newer = version > own && !(lenient != NULL && strcmp(lenient, "0") == 0);
    if (newer || version < OLDEST_VERSION)
        return host_fail(ncclInvalidUsage, "%s: the program was made for NCCL version %u, this is %u",
                         function, version, own);
    return ncclSuccess;
}

/* ---- properties ---------------------------------------------------------------------------------- */

static void fill(ncclComm_t comm, ncclCommProperties_t *props) {
    ncclCommProperties_t all = {
        .rank = comm->rank,
        .nRanks = comm->ranks,
        .cudaDev = comm->device,
        .nvmlDev = comm->device,
        .ginType = NCCL_GIN_TYPE_NONE,
        .railedGinType = NCCL_GIN_TYPE_NONE,
        .ginConnectionType = NCCL_GIN_CONNECTION_NONE,
        .nLsaTeams = comm->ranks,
        .hostRmaSupport = host_config()->windows && comm->config.numRmaCtx > 0,
    };
    host_clique_t *clique = atomic_load(&comm->clique);
    all.commHash = clique != NULL ? clique->hash : 0;
    const size_t head = offsetof(ncclCommProperties_t, rank);
    size_t end = props->size < sizeof all ? props->size : sizeof all; /* the caller's may be an older one */
    if (end > head)
        memcpy((char *)props + head, (const char *)&all + head, end - head);
}

ncclResult_t ncclCommQueryProperties(ncclComm_t comm, ncclCommProperties_t *props) {
    static const char name[] = "ncclCommQueryProperties";
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, name, comm);
    if (result == ncclSuccess)
        result = host_comm_check(comm, name);
    if (result == ncclSuccess && props == NULL)
        result = host_fail(ncclInvalidArgument, "%s: the pointer for the answer is NULL", name);
    if (result == ncclSuccess)
        result = host_comm_ready(comm, name);
    if (result == ncclSuccess)
        result = check_struct(name, props->magic, props->version);
    if (result == ncclSuccess)
        fill(comm, props);
    return host_entry_end(&entry, result);
}

/* ---- communicators for kernels ------------------------------------------------------------------- */

ncclResult_t ncclDevCommCreate(ncclComm_t comm, const ncclDevCommRequirements_t *reqs,
                               ncclDevComm_t *outDevComm) {
    static const char name[] = "ncclDevCommCreate";
    struct {
        size_t size;
        unsigned int magic, version;
    } head;
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, name, comm);
    entry.record.object = (uint64_t)(uintptr_t)outDevComm;
    if (result == ncclSuccess)
        result = host_comm_check(comm, name);
    if (result == ncclSuccess && reqs == NULL)
        result = host_fail(ncclInvalidArgument, "%s: the requirements are NULL", name);
    if (result == ncclSuccess) {
        memcpy(&head, reqs, sizeof head);
        result = check_struct(name, head.magic, head.version);
    }
    if (result == ncclSuccess)
        result = host_group_poison(host_fail(ncclInvalidUsage, "%s: there are no kernels on a CPU", name));
    return host_entry_end(&entry, result);
}

ncclResult_t ncclDevCommDestroy(ncclComm_t comm, const ncclDevComm_t *devComm) {
    static const char name[] = "ncclDevCommDestroy";
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, name, comm);
    if (result == ncclSuccess)
        result = host_comm_check(comm, name);
    if (result == ncclSuccess)
        result = host_fail(ncclInvalidArgument, "%s: %p was not made by ncclDevCommCreate", name,
                           (const void *)devComm);
    return host_entry_end(&entry, result);
}

/* ---- teams --------------------------------------------------------------------------------------- */

static bool is_alive(ncclComm_t comm, const char *function) {
    return host_comm_check(comm, function) == ncclSuccess;
}

ncclTeam_t ncclTeamWorld(ncclComm_t comm) {
    if (!is_alive(comm, "ncclTeamWorld"))
        return (ncclTeam_t){0};
    return (ncclTeam_t){.nRanks = comm->ranks, .rank = comm->rank, .stride = 1};
}

ncclTeam_t ncclTeamLsa(ncclComm_t comm) {
    if (!is_alive(comm, "ncclTeamLsa"))
        return (ncclTeam_t){0};
    return (ncclTeam_t){.nRanks = 1, .rank = 0, .stride = 1};
}

ncclTeam_t ncclTeamRail(ncclComm_t comm) {
    return ncclTeamWorld(comm); /* one rank a team of load and store, so that all are on one rail */
}

int ncclTeamRankToWorld(ncclComm_t comm, ncclTeam_t team, int rank) {
    return is_alive(comm, "ncclTeamRankToWorld") ? comm->rank + (rank - team.rank) * team.stride : -1;
}

int ncclTeamRankToLsa(ncclComm_t comm, ncclTeam_t team, int rank) {
    return is_alive(comm, "ncclTeamRankToLsa") ? (rank - team.rank) * team.stride : -1;
}

/* ---- pointers for kernels ------------------------------------------------------------------------ */

/* A window is looked up among all there are, since these calls name no communicator; it is held. */
static ncclResult_t find(const char *function, ncclWindow_t window, void **out) {
    if (window == NULL || out == NULL)
        return host_fail(ncclInvalidArgument, "%s: window %p, output %p", function, (void *)window,
                         (void *)out);
    if (!host_window_hold_any(window))
        return host_fail(ncclInvalidArgument, "%s: %p is no window", function, (void *)window);
    return ncclSuccess;
}

/* Only the own memory is within reach of a load. */
static ncclResult_t own_pointer(const char *function, ncclWindow_t window, size_t offset, void **out) {
    const host_reach_t *own = &window->reach[window->rank];
    if (offset >= own->bytes)
        return host_fail(ncclInvalidArgument, "%s: offset %zu of a window of %zu bytes", function, offset,
                         own->bytes);
    *out = own->base + offset;
    return ncclSuccess;
}

ncclResult_t ncclGetLsaDevicePointer(ncclWindow_t window, size_t offset, int lsaRank, void **outPtr) {
    static const char name[] = "ncclGetLsaDevicePointer";
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, name, NULL);
    if (result == ncclSuccess)
        result = find(name, window, outPtr);
    if (result != ncclSuccess)
        return host_entry_end(&entry, result);
    if (lsaRank == 0)
        result = own_pointer(name, window, offset, outPtr);
    else
        result = host_fail(ncclInvalidArgument, "%s: rank %d of a team of 1", name, lsaRank);
    host_window_release(window);
    return host_entry_end(&entry, result);
}

ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, size_t offset, int peer, void **outPtr) {
    static const char name[] = "ncclGetPeerDevicePointer";
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, name, NULL);
    if (result == ncclSuccess)
        result = find(name, window, outPtr);
    if (result != ncclSuccess)
        return host_entry_end(&entry, result);
    if (peer < 0 || peer >= window->ranks)
        result = host_fail(ncclInvalidArgument, "%s: there is no rank %d", name, peer);
    else if (peer == window->rank)
        result = own_pointer(name, window, offset, outPtr);
    else
        *outPtr = NULL; /* out of reach is no error */
    host_window_release(window);
    return host_entry_end(&entry, result);
}

static ncclResult_t no_multimem(const char *function, ncclWindow_t window, bool possible, void **out) {
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, function, NULL);
    if (result == ncclSuccess && !possible)
        result = host_fail(ncclInvalidArgument, "%s: the multicast handle is empty", function);
    if (result == ncclSuccess)
        result = find(function, window, out);
    if (result == ncclSuccess) {
        *out = NULL;
        host_window_release(window);
    }
    return host_entry_end(&entry, result);
}

ncclResult_t ncclGetLsaMultimemDevicePointer(ncclWindow_t window, size_t offset, void **outPtr) {
    (void)offset;
    return no_multimem("ncclGetLsaMultimemDevicePointer", window, true, outPtr);
}

ncclResult_t ncclGetMultimemDevicePointer(ncclWindow_t window, size_t offset, ncclMultimemHandle_t multimem,
                                          void **outPtr) {
    (void)offset;
    return no_multimem("ncclGetMultimemDevicePointer", window, multimem.mcBasePtr != NULL, outPtr);
}
