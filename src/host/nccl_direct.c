/* Collectives on buffers that all ranks can reach: nothing is staged. With its first arrival each rank says
 * where its buffers are. If all can be reached, each rank does its share of the work on them, and the
 * operation ends when all have done theirs. All decide from the same words, so that all decide alike.
 */
#include "nccl_collective.h"

#include <stdlib.h>
#include <string.h>

enum { SLICE_BYTES = 256 * 1024, ROUND = 64 }; /* an abort waits for a slice; shares end at cache lines */

static host_clique_t *clique_of(const host_collective_t *c) {
    return c->kernel.clique;
}

static host_manifest_t *manifest_of(const host_collective_t *c, int rank, uint32_t arrival) {
    return &host_segment_area(clique_of(c)->head, rank)->manifest[arrival % HOST_SLOTS];
}

/* Inputs are read by whoever takes from them; where several ranks share the work of a reduction, each writes
 * its part of the result to all who take it. */
void host_direct_declare(host_collective_t *c) {
    ncclComm_t comm = c->kernel.comm;
    host_manifest_t *manifest = &c->manifest;
    size_t block = c->task.count * c->size;
    manifest->sends = c->gives;
    manifest->recvs = c->takes && c->shape->reduces && !c->shape->spread;
    manifest->exposed =
        (!manifest->sends || host_expose(comm, c->task.send, c->blocks * block, &manifest->send)) &&
        (!manifest->recvs || host_expose(comm, c->task.recv, block, &manifest->recv));
    if (c->task.scaled) {
        manifest->factor = c->task.factor;
        if (c->task.scalar != NULL)
            memcpy(&manifest->factor, c->task.scalar, c->size);
    }
    c->kernel.exposed = manifest->exposed;
    *manifest_of(c, comm->rank, comm->arrival + 1) = *manifest;
}

/* ---- agreeing ------------------------------------------------------------------------------------ */

static bool reach(host_collective_t *c, int rank, const host_manifest_t *manifest) {
    c->peers->factor[rank] = manifest->factor;
    return (!manifest->sends || host_reach(clique_of(c), rank, &manifest->send, &c->peers->send[rank])) &&
           (!manifest->recvs || host_reach(clique_of(c), rank, &manifest->recv, &c->peers->recv[rank]));
}

/* Also what this rank does not need now: only with the first use of an offer can a failure be told. */
static bool reach_all(host_collective_t *c) {
    if (c->peers == NULL)
        c->peers = calloc(1, sizeof *c->peers);
    if (c->peers == NULL)
        return false;
    bool reached = true;
    for (int rank = 0; rank < c->kernel.comm->ranks && reached; rank++)
        reached = reach(c, rank, manifest_of(c, rank, c->arrival));
    return reached;
}

/* Once more from the beginning, through shared memory. */
static host_phase_t stage(host_collective_t *c) {
    c->kernel.exposed = false;
    c->given = 0;
    c->first = c->arrival + 1;
    return HOST_STAGED;
}

host_phase_t host_direct_agree(host_collective_t *c) {
    ncclComm_t comm = c->kernel.comm;
    bool any = false, all = true, fresh = false;
    for (int rank = 0; rank < comm->ranks; rank++) {
        const host_manifest_t *manifest = manifest_of(c, rank, c->arrival);
        any |= manifest->exposed;
        all &= manifest->exposed;
        fresh |= (manifest->sends && manifest->send.fresh) || (manifest->recvs && manifest->recv.fresh);
    }
    if (!any)
        return HOST_STAGED; /* the first chunk has been given already */
    if (!all)
        return stage(c);
    bool reached = reach_all(c);
    if (fresh) {
        c->manifest.failed = !reached;
        *manifest_of(c, comm->rank, comm->arrival + 1) = c->manifest;
        host_collective_arrive(c);
        return HOST_MAPPED;
    }
    if (reached)
        return HOST_DIRECT;
    host_last_error("%s: rank %d cannot map the buffers of another rank any more", c->shape->name,
                    comm->rank);
    host_comm_set_state(comm, ncclSystemError);
    c->kernel.stuck = true;
    return HOST_DECLARED;
}

host_phase_t host_direct_confirm(host_collective_t *c) {
    ncclComm_t comm = c->kernel.comm;
    bool failed = false;
    for (int rank = 0; rank < comm->ranks; rank++)
        failed |= manifest_of(c, rank, c->arrival)->failed;
    if (!failed)
        return HOST_DIRECT;
    host_offers_retire(comm, c->manifest.send.serial); /* so that all try again the next time */
    host_offers_retire(comm, c->manifest.recv.serial);
    return stage(c);
}

/* ---- working ------------------------------------------------------------------------------------- */

static size_t least(size_t a, size_t b) {
    return a < b ? a : b;
}

static bool is_large(const host_collective_t *c) {
    return c->kernel.work.bytes >= HOST_PAST_CACHES_BYTES;
}

/* Which elements of all blocks this rank combines. */
typedef struct {
    size_t begin, count;
} share_t;

static share_t share_of(const host_collective_t *c) {
    size_t ranks = (size_t)c->kernel.comm->ranks, rank = (size_t)c->kernel.comm->rank, count = c->task.count;
    if (c->shape->spread)
        return (share_t){rank * count, count};
    size_t part = (count + ranks - 1) / ranks;
    part = (part + ROUND - 1) / ROUND * ROUND;
    size_t begin = least(rank * part, count);
    return (share_t){begin, least(part, count - begin)};
}

static bool reduce_slice(host_collective_t *c) {
    const unsigned char *sources[HOST_MAX_RANKS];
    unsigned char *results[HOST_MAX_RANKS];
    const host_task_t *task = &c->task;
    const int ranks = c->kernel.comm->ranks;
    share_t share = share_of(c);
    host_fold_t fold = {.sources = sources,
                        .factors = task->scaled ? c->peers->factor : NULL,
                        .results = results,
                        .source_count = ranks,
                        .count = least(share.count - c->at, SLICE_BYTES / c->size),
                        .type = task->type,
                        .op = host_collective_op(c),
                        .divisor = task->divided ? ranks : 0,
                        .past_caches = is_large(c)};
    size_t at = (share.begin + c->at) * c->size;
    for (int rank = 0; rank < ranks; rank++) {
        sources[rank] = c->peers->send[rank] + at;
        if (c->peers->recv[rank] != NULL)
            results[fold.result_count++] = c->peers->recv[rank] + at;
        fold.past_caches &= c->peers->recv[rank] != c->peers->send[rank]; /* what is read is in the caches */
    }
    if (c->shape->spread)
        results[fold.result_count++] = (unsigned char *)task->recv + c->at * c->size;
    host_fold(&fold);
    c->at += fold.count;
    return c->at == share.count;
}

static bool move_slice(host_collective_t *c) {
    const host_task_t *task = &c->task;
    ncclComm_t comm = c->kernel.comm;
    size_t givers = c->shape->from_root ? 1 : (size_t)comm->ranks;
    size_t index = c->at / task->count, at = c->at % task->count;
    int giver = c->shape->from_root ? task->root : (int)index;
    size_t block = c->shape->spread ? (size_t)comm->rank * task->count : 0;
    const unsigned char *from = c->peers->send[giver] + (block + at) * c->size;
    unsigned char *to = (unsigned char *)task->recv + c->at * c->size;
    size_t count = least(task->count - at, SLICE_BYTES / c->size);
    if (from != to && is_large(c))
        host_copy_past(to, from, count * c->size);
    else if (from != to)
        memcpy(to, from, count * c->size);
    c->at += count;
    return c->at == givers * task->count;
}

/* Nothing to do: it takes nothing, or its share of a small count is empty. */
static bool is_idle(const host_collective_t *c) {
    return c->shape->reduces ? share_of(c).count == 0 || (c->shape->spread && !c->takes) : !c->takes;
}

host_progress_t host_direct_work(host_collective_t *c) {
    ncclComm_t comm = c->kernel.comm;
    bool done = is_idle(c);
    while (!done) {
        if (host_comm_stopped(comm))
            return HOST_BLOCKED;
        if (!host_visit_begin(comm, clique_of(c))) {
            c->kernel.stuck = true; /* a rank was aborted: it will not do its part */
            return HOST_BLOCKED;
        }
        done = c->shape->reduces ? reduce_slice(c) : move_slice(c);
        host_visit_end(comm);
    }
    return HOST_DONE;
}
