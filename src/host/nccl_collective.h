/* One collective under way: what nccl_collective.c and nccl_direct.c share. */
#ifndef PYNCCL_HOST_NCCL_COLLECTIVE_H
#define PYNCCL_HOST_NCCL_COLLECTIVE_H

#include "nccl.h"

typedef enum {
    HOST_SETTING_OUT,
    HOST_STAGED,   /* chunk by chunk through shared memory */
    HOST_DECLARED, /* it has said where its buffers are, and waits for what the others say */
    HOST_MAPPED,   /* it has reached them all, or not, and waits for the others */
    HOST_DIRECT,   /* it works on them */
    HOST_WORKED,   /* it waits until all have worked */
    HOST_FINISHED,
} host_phase_t;

/* Buffers of all ranks, as this process sees them. */
typedef struct {
    host_place_t send[HOST_MAX_RANKS], recv[HOST_MAX_RANKS];
    uint64_t factor[HOST_MAX_RANKS];
} host_peers_t;

typedef struct {
    host_kernel_t kernel;
    host_task_t task;
    const host_shape_t *shape;
    uint64_t sequence;
    size_t size;   /* of an element */
    size_t blocks; /* what a giver gives: one block, or one for each rank */
    host_phase_t phase;
    uint32_t arrival; /* the last that this rank has published */
    uint32_t awaited; /* the one that it waits for, */
    int seen;         /* and how many of the first ranks have published it */
    bool in_line, large, gives, takes;
    /* how it goes, if it is large and its ranks are `apart`, in several processes (nccl_way.c) */
    host_way_t way;
    bool apart, odd, timed;
    int64_t clock, spent; /* on what is not waiting */
    /* staged */
    size_t chunk;        /* elements of a block that are published at once */
    size_t given, taken; /* elements of a block */
    uint32_t first;      /* arrival of the first chunk */
    /* direct */
    host_manifest_t manifest;
    host_peers_t *peers;
    size_t desk; /* bytes of each of its places for a slice of what a far rank gives or takes */
    int piece;   /* of its moves: with which rank, counted from itself, */
    size_t at;   /* and how many elements of that, or of a reduction, are done */
} host_collective_t;

/* Say with a new arrival what was written before. */
void host_collective_arrive(host_collective_t *c);
bool host_collective_all_arrived(host_collective_t *c, uint32_t arrival);
/* Too large to stay in the caches. */
static inline bool host_collective_is_large(const host_collective_t *c) {
    return c->kernel.work.bytes >= HOST_PAST_CACHES_BYTES;
}
/* Averages are sums of what was scaled before, or is divided later. */
static inline ncclRedOp_t host_collective_op(const host_collective_t *c) {
    return c->task.op == ncclAvg || c->task.op == HOST_USER_OP ? ncclSum : c->task.op;
}

/* nccl_way.c. Between pause and resume it waits for others. */
void host_way_begin(host_collective_t *c);
void host_way_pause(host_collective_t *c);
void host_way_resume(host_collective_t *c);
void host_way_end(host_collective_t *c);

/* nccl_direct.c */
void host_direct_declare(host_collective_t *c);         /* before the first arrival */
host_phase_t host_direct_agree(host_collective_t *c);   /* after it: how to go on */
host_phase_t host_direct_confirm(host_collective_t *c); /* after the second */
host_progress_t host_direct_work(host_collective_t *c);

#endif
