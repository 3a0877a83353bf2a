/* Collectives on buffers that all ranks can reach: nothing is staged. With its first arrival each rank says
 * where its buffers are. If all can be reached, each rank does its share of the work on them, and the
 * operation ends when all have done theirs. All decide from the same words, so that all decide alike.
 *
 * The shares are equal: of a reduction each rank makes one part for all who take it; of what goes between a
 * root and another rank, the root moves the first of n parts and the other the rest.
 */
#include "nccl_collective.h"

#include <stdlib.h>
#include <string.h>

enum { ROUND = 64 }; /* elements: shares end at cache lines */

static host_clique_t *clique_of(const host_collective_t *c) {
    return c->kernel.clique;
}

static host_manifest_t *manifest_of(const host_collective_t *c, int rank, uint32_t arrival) {
    return &host_segment_area(clique_of(c)->head, rank)->manifest[arrival % HOST_SLOTS];
}

/* Inputs are read by whoever takes from them; where several ranks share the work on a result, each writes
 * its part of it. */
void host_direct_declare(host_collective_t *c) {
    ncclComm_t comm = c->kernel.comm;
    host_manifest_t *manifest = &c->manifest;
    size_t block = c->task.count * c->size;
    bool reduces = c->shape->reduces, attach = c->way == HOST_WAY_ATTACH;
    manifest->sends = c->gives;
    manifest->recvs = c->takes && (reduces ? !c->shape->spread : c->shape->rooted);
    size_t taken = reduces || c->shape->from_root ? 1 : (size_t)comm->ranks;
    manifest->exposed =
        (!manifest->sends || host_expose(comm, c->task.send, c->blocks * block, attach, &manifest->send)) &&
        (!manifest->recvs || host_expose(comm, c->task.recv, taken * block, attach, &manifest->recv));
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

static bool any_far(const host_place_t *places, int count) {
    bool any = false;
    for (int i = 0; i < count; i++)
        any |= places[i].far;
    return any;
}

/* Once more from the beginning, through shared memory. */
static host_phase_t stage(host_collective_t *c) {
    c->kernel.exposed = c->timed = false;
    c->way = HOST_WAY_CACHED;
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
    if (!all) {
        if (c->way ==
            HOST_WAY_ATTACH) /* which is how all of them would be reached, if no rank were kept from it */
            host_attach_deny(clique_of(c));
        return stage(c);
    }
    bool reached = reach_all(c);
    if (reached)
        c->timed &= any_far(c->peers->send, comm->ranks) || any_far(c->peers->recv, comm->ranks);
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

static host_place_t further(host_place_t place, size_t bytes) {
    return (host_place_t){.at = place.at + bytes, .far = place.far};
}

/* Where a slice of what another process gives is put, and a slice of what it takes: into this rank's own
 * slots, which are empty in the direct way. */
static host_place_t desk_of(const host_collective_t *c, int rank) {
    host_place_t desk = {.at = host_segment_slot(clique_of(c)->head, c->kernel.comm->rank, 0)};
    return further(desk, (size_t)rank * c->desk);
}

/* As far as the next slice of its share goes; true when it was the last, or could not be made. */
static bool reduce_slice(host_collective_t *c) {
    const unsigned char *sources[HOST_MAX_RANKS];
    unsigned char *results[HOST_MAX_RANKS];
    const host_task_t *task = &c->task;
    const int ranks = c->kernel.comm->ranks, own = c->kernel.comm->rank;
    const host_peers_t *peers = c->peers;
    const bool takes_far = any_far(peers->recv, ranks), gives_far = any_far(peers->send, ranks);
    share_t share = share_of(c);
    host_fold_t fold = {
        .sources = sources,
        .factors = task->scaled ? peers->factor : NULL,
        .results = results,
        .source_count = ranks,
        .count = least(share.count - c->at, (takes_far || gives_far ? c->desk : HOST_SLICE_BYTES) / c->size),
        .type = task->type,
        .op = host_collective_op(c),
        .divisor = task->divided ? ranks : 0,
        .past_caches = host_collective_is_large(c) && !takes_far};
    const size_t at = (share.begin + c->at) * c->size, bytes = fold.count * c->size;
    for (int rank = 0; rank < ranks; rank++) {
        host_place_t source = further(peers->send[rank], at);
        if (source.far && !host_copy_between(&c->kernel, rank, desk_of(c, rank), source, bytes))
            return true;
        sources[rank] = source.far ? desk_of(c, rank).at : source.at;
        if (takes_far)
            continue;
        if (peers->recv[rank].at != NULL)
            results[fold.result_count++] = peers->recv[rank].at + at;
        fold.past_caches &= peers->recv[rank].at != peers->send[rank].at; /* what is read is in the caches */
    }
    if (c->shape->spread)
        results[fold.result_count++] = (unsigned char *)task->recv + c->at * c->size;
    if (takes_far)
        results[fold.result_count++] = desk_of(c, own).at;
    host_fold(&fold);
    for (int rank = 0; takes_far && rank < ranks; rank++)
        if (peers->recv[rank].at != NULL &&
            !host_copy_between(&c->kernel, rank, further(peers->recv[rank], at), desk_of(c, own), bytes))
            return true;
    c->at += fold.count;
    return c->at == share.count;
}

/* What this rank moves between itself and one other, or itself. */
typedef struct {
    host_place_t to, from;
    size_t begin, end; /* elements of the block */
    int other;
} piece_t;

static piece_t piece_with(const host_collective_t *c, int rank) {
    const host_shape_t *shape = c->shape;
    const int own = c->kernel.comm->rank, root = c->task.root;
    const size_t count = c->task.count, block = count * c->size;
    int giver = shape->from_root ? root : rank, taker = shape->from_root ? rank : own;
    if (shape->root_takes)
        taker = root;
    piece_t piece = {.end = count, .other = taker == own ? giver : taker};
    if (shape->rooted && rank != root) {
        size_t cut = count / (size_t)c->kernel.comm->ranks / ROUND * ROUND;
        if (own == root)
            piece.end = cut;
        else if (own == rank)
            piece.begin = cut;
        else
            piece.end = 0;
    } else if (shape->rooted && own != root) {
        piece.end = 0;
    }
    host_place_t recv = taker == own ? (host_place_t){.at = c->task.recv} : c->peers->recv[taker];
    piece.from = further(c->peers->send[giver], shape->spread ? (size_t)taker * block : 0);
    piece.to = further(recv, shape->from_root ? 0 : (size_t)giver * block);
    return piece;
}

/* As far as the next slice goes; true when it was the last, or could not be moved. */
static bool move_slice(host_collective_t *c) {
    const int ranks = c->kernel.comm->ranks;
    int rank = (c->kernel.comm->rank + c->piece) % ranks; /* so that not all read from the same one */
    piece_t piece = piece_with(c, rank);
    if (piece.begin + c->at < piece.end) {
        size_t most = piece.to.far || piece.from.far ? HOST_FAR_SLICE_BYTES : HOST_SLICE_BYTES;
        size_t at = piece.begin + c->at, count = least(piece.end - at, most / c->size);
        if (!host_copy_between(&c->kernel, piece.other, further(piece.to, at * c->size),
                               further(piece.from, at * c->size), count * c->size))
            return true;
        c->at += count;
    }
    if (piece.begin + c->at >= piece.end) {
        c->piece++;
        c->at = 0;
    }
    return c->piece == ranks;
}

/* Nothing to do: its share of a small count is empty. */
static bool is_idle(const host_collective_t *c) {
    return c->shape->reduces && share_of(c).count == 0;
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
    return c->kernel.stuck ? HOST_BLOCKED : HOST_DONE;
}
