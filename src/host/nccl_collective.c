/* Eight collectives as one state machine.
 *
 * Data go through shared memory in chunks. For each chunk a rank writes what it gives into its slot (or, if
 * it is small, into the cache line that announces it), announces it, waits until all have announced theirs,
 * and takes what it needs from the others' slots. Reductions are made in the order of the ranks, so that the
 * result does not depend on timing, nor on how the data were cut into chunks.
 */
#include "nccl.h"

#include <stdlib.h>
#include <string.h>

enum {
    TILE_BYTES = 8 * 1024
}; /* what is reduced at a time, so that the accumulator stays in the first cache */

typedef struct {
    host_kernel_t kernel;
    host_task_t task;
    const host_shape_t *shape;
    uint64_t sequence;
    size_t size;      /* of an element */
    size_t blocks;    /* what a giver gives: one block, or one for each rank */
    size_t chunk;     /* elements of a block that are published at once */
    size_t at, now;   /* elements of a block that are done, and that are under way */
    uint32_t arrival; /* of the chunk under way */
    int seen;         /* ranks below it have arrived */
    bool started, announced, in_line, gives, takes;
} collective_t;

/* ---- solo: a communicator of one rank ------------------------------------------------------------ */

typedef struct {
    host_kernel_t kernel;
    host_task_t task;
} solo_t;

static host_progress_t advance_solo(host_kernel_t *kernel) {
    const host_task_t *task = &((solo_t *)(void *)kernel)->task;
    size_t bytes = task->count * host_type_size(task->type);
    int device = kernel->work.device;
    if (!host_kernel_may_touch(device, task->send, bytes) ||
        !host_kernel_may_touch(device, task->recv, bytes))
        kernel->work.status = CUDA_ERROR_ILLEGAL_ADDRESS;
    else if (task->scaled)
        host_premultiply(task->recv, task->send, task->count, task->type,
                         task->scalar != NULL ? task->scalar : &task->factor);
    else if (task->send != task->recv)
        memmove(task->recv, task->send, bytes);
    return HOST_DONE;
}

host_kernel_t *host_solo_new(const host_task_t *task) {
    solo_t *solo = calloc(1, sizeof *solo);
    if (solo == NULL)
        return NULL;
    solo->task = *task;
    solo->kernel.solo = true;
    solo->kernel.advance = advance_solo;
    solo->kernel.name = host_shapes[task->function].name;
    solo->kernel.work.bytes = task->count * host_type_size(task->type);
    return &solo->kernel;
}

/* ---- give ---------------------------------------------------------------------------------------- */

static host_line_t *line_of(const collective_t *c, int rank) {
    return &host_segment_area(c->kernel.clique->head, rank)->line[c->arrival & 1];
}

static unsigned char *data_of(const collective_t *c, int rank) {
    return c->in_line ? line_of(c, rank)->data : host_segment_slot(c->kernel.clique->head, rank, c->arrival);
}

static void give(const collective_t *c) {
    const host_task_t *task = &c->task;
    unsigned char *to = data_of(c, c->kernel.comm->rank);
    size_t bytes = c->now * c->size;
    for (size_t block = 0; block < c->blocks; block++, to += bytes) {
        const char *from = (const char *)task->send + (block * task->count + c->at) * c->size;
        if (task->scaled)
            host_premultiply(to, from, c->now, task->type,
                             task->scalar != NULL ? task->scalar : &task->factor);
        else
            memcpy(to, from, bytes);
    }
}

/* ---- take ---------------------------------------------------------------------------------------- */

/* Where the data that `rank` gave to this rank begin. */
static const unsigned char *gift_of(const collective_t *c, int rank) {
    size_t own_block = c->shape->spread ? (size_t)c->kernel.comm->rank * c->now * c->size : 0;
    return data_of(c, rank) + own_block;
}

static void reduce(const collective_t *c) {
    const host_task_t *task = &c->task;
    const ncclRedOp_t op = task->op == ncclAvg || task->op == HOST_USER_OP ? ncclSum : task->op;
    const int ranks = c->kernel.comm->ranks;
    const size_t tile = TILE_BYTES / c->size;
    for (size_t done = 0; done < c->now; done += tile) {
        size_t count = c->now - done < tile ? c->now - done : tile;
        unsigned char *result = (unsigned char *)task->recv + (c->at + done) * c->size;
        memcpy(result, gift_of(c, 0) + done * c->size, count * c->size);
        for (int rank = 1; rank < ranks; rank++)
            host_reduce(result, gift_of(c, rank) + done * c->size, count, task->type, op);
        if (task->divided)
            host_divide(result, count, task->type, ranks);
    }
}

static void place(const collective_t *c) {
    const host_task_t *task = &c->task;
    int first = c->shape->from_root ? task->root : 0;
    int end = c->shape->from_root ? task->root + 1 : c->kernel.comm->ranks;
    for (int rank = first; rank < end; rank++) {
        size_t block = (size_t)(rank - first);
        char *to = (char *)task->recv + (block * task->count + c->at) * c->size;
        memcpy(to, gift_of(c, rank), c->now * c->size);
    }
}

/* ---- arrive -------------------------------------------------------------------------------------- */

static bool all_arrived(collective_t *c) {
    const int ranks = c->kernel.comm->ranks;
    while (c->seen < ranks &&
           atomic_load_explicit(&line_of(c, c->seen)->arrival, memory_order_seq_cst) == c->arrival)
        c->seen++;
    return c->seen == ranks;
}

/* Whoever comes last finds that all are there, and rings; all stores and loads of arrivals are in one order,
 * so that at least one rank does. The others need not ring. */
static bool announce(collective_t *c) {
    ncclComm_t comm = c->kernel.comm;
    host_sketch_t sketch = host_sketch_of(&c->task);
    c->arrival = ++comm->arrival;
    c->now = c->task.count - c->at < c->chunk ? c->task.count - c->at : c->chunk;
    if (c->gives)
        give(c);
    host_line_t *line = line_of(c, comm->rank);
    line->function = sketch.function;
    line->type = sketch.type;
    line->op = sketch.op;
    line->root = sketch.root;
    line->count = sketch.count;
    atomic_store_explicit(&line->arrival, c->arrival, memory_order_seq_cst);
    c->seen = 0;
    c->announced = true;
    if (!all_arrived(c))
        return false;
    host_clique_ring(c->kernel.clique, comm->rank);
    return true;
}

static host_sketch_t sketch_at(const host_line_t *line) {
    return (host_sketch_t){.count = line->count,
                           .function = line->function,
                           .type = line->type,
                           .op = line->op,
                           .root = line->root};
}

/* Everybody compares everybody with rank 0, and so all find the same pair. */
static bool is_mismatch(const collective_t *c) {
    host_sketch_t first = sketch_at(line_of(c, 0));
    for (int rank = 1; rank < c->kernel.comm->ranks; rank++) {
        host_sketch_t other = sketch_at(line_of(c, rank));
        if (host_sketch_same(first, other))
            continue;
        host_report_mismatch(c->kernel.comm, c->sequence, 0, first, rank, other);
        return true;
    }
    return false;
}

/* ---- the machine --------------------------------------------------------------------------------- */

static bool may_touch_all(const collective_t *c) {
    const host_task_t *task = &c->task;
    size_t block = task->count * c->size;
    size_t taken = c->shape->reduces || c->shape->from_root ? 1 : (size_t)c->kernel.comm->ranks;
    int device = c->kernel.work.device;
    return (!c->gives || host_kernel_may_touch(device, task->send, c->blocks * block)) &&
           (!c->takes || host_kernel_may_touch(device, task->recv, taken * block));
}

/* In the strict mode a rank that waits long says in what, and looks whether another waits in something else.
 */
static void linger(host_kernel_t *kernel) {
    collective_t *c = (collective_t *)(void *)kernel;
    if (c->at != 0 || host_config()->mode != HOST_STRICT)
        return;
    host_sketch_t own = host_sketch_of(&c->task);
    host_intent_say(kernel->comm, HOST_INTENT_KERNEL, c->sequence, own);
    kernel->stuck = host_intent_differs(kernel->comm, c->sequence, own);
}

static host_progress_t advance(host_kernel_t *kernel) {
    collective_t *c = (collective_t *)(void *)kernel;
    if (!c->started) {
        c->started = true;
        if (!may_touch_all(c)) {
            kernel->work.status = CUDA_ERROR_ILLEGAL_ADDRESS;
            return HOST_DONE;
        }
    }
    while (c->at < c->task.count) {
        if (!(c->announced ? all_arrived(c) : announce(c)))
            return HOST_BLOCKED;
        if (c->at == 0 && host_config()->mode == HOST_STRICT && is_mismatch(c)) {
            kernel->stuck = true;
            return HOST_BLOCKED;
        }
        if (c->takes && c->shape->reduces)
            reduce(c);
        else if (c->takes)
            place(c);
        c->at += c->now;
        c->announced = false;
    }
    return HOST_DONE;
}

host_kernel_t *host_collective_new(ncclComm_t comm, const host_task_t *task) {
    collective_t *c = calloc(1, sizeof *c);
    if (c == NULL)
        return NULL;
    c->task = *task;
    c->shape = &host_shapes[task->function];
    c->sequence = ++comm->sequence;
    c->size = host_type_size(task->type);
    c->gives = !c->shape->root_gives || comm->rank == task->root;
    c->takes = !c->shape->root_takes || comm->rank == task->root;
    c->blocks = c->shape->spread ? (size_t)comm->ranks : 1;
    size_t share = HOST_LINE_BYTES / c->blocks;
    c->in_line = task->count <= share / c->size;
    if (c->in_line)
        c->chunk = task->count;
    else
        c->chunk = HOST_SLOT_BYTES / (c->blocks * c->size) / 64 * 64; /* whole cache lines, and vectors */
    c->kernel.advance = advance;
    c->kernel.linger = linger;
    c->kernel.name = c->shape->name;
    bool widens = !c->shape->reduces && !c->shape->from_root;
    c->kernel.work.bytes = task->count * c->size * (widens ? (size_t)comm->ranks : c->blocks);
    return &c->kernel;
}
