/* Eight collectives as one state machine.
 *
 * Data go through shared memory in chunks. For each chunk a rank writes what it gives into its slot (or, if
 * it is small, into the cache line that announces it), announces it, waits until all have announced theirs,
 * and takes what it needs from the others' slots. It gives one chunk more than it has taken, so that nobody
 * waits for its copying. Reductions are made in the order of the ranks, so that the result does not depend on
 * timing, nor on how the data were cut into chunks. Large operations on buffers that all can reach leave that
 * way after their first arrival (nccl_direct.c). Which way is taken between processes is measured
 * (nccl_way.c).
 */
#define _GNU_SOURCE
#include "nccl_collective.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum {
    TILE_BYTES = 8 * 1024,   /* stays in the first cache */
    DESK_BYTES = 128 * 1024, /* several of them stay in the second cache */
    DESK_STEP = 4096,
};

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

enum { LOOK_AT_MOST = 8 }; /* missing ranks, for one on this core */

/* ---- arrive -------------------------------------------------------------------------------------- */

static host_line_t *line_of(const host_collective_t *c, int rank, uint32_t arrival) {
    return &host_segment_area(c->kernel.clique->head, rank)->line[arrival % HOST_SLOTS];
}

static bool has_arrived(const host_collective_t *c, int rank, uint32_t arrival) {
    uint32_t found = atomic_load_explicit(&line_of(c, rank, arrival)->arrival, memory_order_seq_cst);
    return (int32_t)(found - arrival) >= 0;
}

/* Whether one of those who are missing was last on this very core. */
static bool is_near(const host_collective_t *c, uint32_t arrival) {
    const int end =
        c->seen + LOOK_AT_MOST < c->kernel.comm->ranks ? c->seen + LOOK_AT_MOST : c->kernel.comm->ranks;
    const int core = sched_getcpu();
    for (int rank = c->seen; rank < end; rank++) {
        host_area_t *area = host_segment_area(c->kernel.clique->head, rank);
        if (atomic_load_explicit(&area->core, memory_order_relaxed) == core && !has_arrived(c, rank, arrival))
            return true;
    }
    return false;
}

bool host_collective_all_arrived(host_collective_t *c, uint32_t arrival) {
    const int ranks = c->kernel.comm->ranks;
    if (c->awaited != arrival) {
        c->awaited = arrival;
        c->seen = 0;
    }
    while (c->seen < ranks && has_arrived(c, c->seen, arrival))
        c->seen++;
    c->kernel.work.near = c->seen != ranks && is_near(c, arrival);
    return c->seen == ranks;
}

/* Whoever comes last finds that all are there, and wakes who sleeps; all stores and loads of arrivals are in
 * one order, so that at least one rank does. The others need not look. */
void host_collective_arrive(host_collective_t *c) {
    ncclComm_t comm = c->kernel.comm;
    host_sketch_t sketch = host_sketch_of(&c->task);
    c->arrival = ++comm->arrival;
    int core = sched_getcpu();
    if (atomic_load_explicit(&comm->area->core, memory_order_relaxed) != core)
        atomic_store_explicit(&comm->area->core, core, memory_order_relaxed);
    host_line_t *line = line_of(c, comm->rank, c->arrival);
    line->function = sketch.function;
    line->type = sketch.type;
    line->op = sketch.op;
    line->root = sketch.root;
    line->count = sketch.count;
    atomic_store_explicit(&line->arrival, c->arrival, memory_order_seq_cst);
    int rank = 0;
    while (rank < comm->ranks && has_arrived(c, rank, c->arrival))
        rank++;
    if (rank == comm->ranks)
        host_clique_call(c->kernel.clique, comm->rank);
}

static host_sketch_t sketch_at(const host_line_t *line) {
    return (host_sketch_t){.count = line->count,
                           .function = line->function,
                           .type = line->type,
                           .op = line->op,
                           .root = line->root};
}

/* The rank, if any, whose operation is not that of rank 0: everybody finds the same pair. */
static int find_other(const host_collective_t *c, uint32_t arrival) {
    host_sketch_t first = sketch_at(line_of(c, 0, arrival));
    for (int rank = 1; rank < c->kernel.comm->ranks; rank++)
        if (!host_sketch_same(first, sketch_at(line_of(c, rank, arrival))))
            return rank;
    return 0;
}

/* In the strict mode ranks that disagree go no further. */
static bool is_mismatch(host_collective_t *c, uint32_t arrival) {
    if (host_config()->mode != HOST_STRICT)
        return false;
    int other = find_other(c, arrival);
    if (other == 0)
        return false;
    host_report_mismatch(c->kernel.comm, c->sequence, 0, sketch_at(line_of(c, 0, arrival)), other,
                         sketch_at(line_of(c, other, arrival)));
    c->kernel.stuck = true;
    return true;
}

/* ---- give ---------------------------------------------------------------------------------------- */

static unsigned char *data_of(const host_collective_t *c, int rank, uint32_t arrival) {
    return c->in_line ? line_of(c, rank, arrival)->data
                      : host_segment_slot(c->kernel.clique->head, rank, arrival);
}

static size_t chunk_at(const host_collective_t *c, size_t at) {
    return c->task.count - at < c->chunk ? c->task.count - at : c->chunk;
}

static _Atomic uint64_t staged;

uint64_t pn_host_staged(void) {
    return atomic_load_explicit(&staged, memory_order_relaxed);
}

/* Where that goes which it gives and all gather. */
static char *own_result(const host_collective_t *c, size_t at) {
    return (char *)c->task.recv + ((size_t)c->kernel.comm->rank * c->task.count + at) * c->size;
}

/* What it gives is also part of its own result, and goes there in the same pass. */
static bool keeps_its_own(const host_collective_t *c) {
    const host_shape_t *shape = c->shape;
    bool gathers = !shape->rooted && !shape->spread && !shape->reduces;
    return gathers && host_collective_is_large(c) && c->way == HOST_WAY_CACHED &&
           c->task.send != own_result(c, 0);
}

/* Into a slot, the way that slots are written. */
static void scale(const host_collective_t *c, unsigned char *to, const char *from, size_t count) {
    _Alignas(64) unsigned char tile[TILE_BYTES];
    const void *factor = c->task.scalar != NULL ? c->task.scalar : &c->task.factor;
    if (c->way != HOST_WAY_PAST || c->in_line) {
        host_premultiply(to, from, count, c->task.type, factor);
        return;
    }
    for (size_t at = 0, step = sizeof tile / c->size; at < count; at += step) {
        size_t some = count - at < step ? count - at : step;
        host_premultiply(tile, from + at * c->size, some, c->task.type, factor);
        host_copy_past(to + at * c->size, tile, some * c->size);
    }
}

static void give(host_collective_t *c) {
    const host_task_t *task = &c->task;
    ncclComm_t comm = c->kernel.comm;
    size_t count = chunk_at(c, c->given), bytes = count * c->size;
    unsigned char *to = data_of(c, comm->rank, comm->arrival + 1);
    for (size_t block = 0; c->gives && block < c->blocks; block++, to += bytes) {
        const char *from = (const char *)task->send + (block * task->count + c->given) * c->size;
        if (task->scaled)
            scale(c, to, from, count);
        else if (c->shape->spread && block == (size_t)comm->rank)
            continue; /* what is for itself it takes where it is */
        else if (c->way == HOST_WAY_PAST && !c->in_line)
            host_copy_past(to, from, bytes);
        else if (keeps_its_own(c))
            host_copy_twice(to, own_result(c, c->given), from, bytes);
        else
            memcpy(to, from, bytes);
    }
    if (c->gives && !c->in_line)
        atomic_fetch_add_explicit(&staged, c->blocks * bytes, memory_order_relaxed);
    if (c->given == 0)
        c->first = comm->arrival + 1;
    c->given += count;
    host_collective_arrive(c);
}

/* ---- take ---------------------------------------------------------------------------------------- */

/* Where the data begin that `rank` gave to this rank with the chunk that is taken now. */
static const unsigned char *gift_of(const host_collective_t *c, int rank, uint32_t arrival) {
    size_t own = c->shape->spread ? (size_t)c->kernel.comm->rank : 0;
    if (rank == c->kernel.comm->rank && !c->task.scaled)
        return (const unsigned char *)c->task.send + (own * c->task.count + c->taken) * c->size;
    return data_of(c, rank, arrival) + own * chunk_at(c, c->taken) * c->size;
}

static void reduce(const host_collective_t *c, uint32_t arrival) {
    const host_task_t *task = &c->task;
    const unsigned char *sources[HOST_MAX_RANKS];
    unsigned char *result = (unsigned char *)task->recv + c->taken * c->size;
    const int ranks = c->kernel.comm->ranks;
    for (int rank = 0; rank < ranks; rank++)
        sources[rank] = gift_of(c, rank, arrival);
    host_fold_t fold = {.sources = sources,
                        .results = &result,
                        .source_count = ranks,
                        .result_count = 1,
                        .count = chunk_at(c, c->taken),
                        .type = task->type,
                        .op = host_collective_op(c),
                        .divisor = task->divided ? ranks : 0,
                        .past_caches = host_collective_is_large(c) && task->send != task->recv};
    host_fold(&fold);
}

static void place(const host_collective_t *c, uint32_t arrival) {
    const host_task_t *task = &c->task;
    size_t bytes = chunk_at(c, c->taken) * c->size;
    int first = c->shape->from_root ? task->root : 0;
    int end = c->shape->from_root ? task->root + 1 : c->kernel.comm->ranks;
    for (int rank = first; rank < end; rank++) {
        if (rank == c->kernel.comm->rank && keeps_its_own(c))
            continue;
        size_t block = (size_t)(rank - first);
        unsigned char *to = (unsigned char *)task->recv + (block * task->count + c->taken) * c->size;
        const unsigned char *from = gift_of(c, rank, arrival);
        if (from != to && host_collective_is_large(c))
            host_copy_past(to, from, bytes);
        else if (from != to)
            memcpy(to, from, bytes);
    }
}

/* ---- the machine --------------------------------------------------------------------------------- */

static bool may_touch_all(const host_collective_t *c) {
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
    host_collective_t *c = (host_collective_t *)(void *)kernel;
    bool begins = c->phase == HOST_DECLARED || (c->phase == HOST_STAGED && c->taken == 0);
    if (!begins || host_config()->mode != HOST_STRICT)
        return;
    host_sketch_t own = host_sketch_of(&c->task);
    host_intent_say(kernel->comm, HOST_INTENT_KERNEL, c->sequence, own);
    kernel->stuck = host_intent_differs(kernel->comm, c->sequence, own);
}

static host_progress_t advance_staged(host_collective_t *c) {
    while (c->taken < c->task.count) {
        while (c->given < c->task.count && c->given <= c->taken + c->chunk)
            give(c);
        uint32_t arrival = c->first + (uint32_t)(c->taken / c->chunk);
        if (host_comm_stopped(c->kernel.comm) || !host_collective_all_arrived(c, arrival) ||
            (c->taken == 0 && is_mismatch(c, arrival)))
            return HOST_BLOCKED;
        if (c->takes && c->shape->reduces)
            reduce(c, arrival);
        else if (c->takes)
            place(c, arrival);
        c->taken += chunk_at(c, c->taken);
        c->kernel.work.moves++;
    }
    return HOST_DONE;
}

static host_phase_t set_out(host_collective_t *c) {
    if (!c->large)
        return HOST_STAGED;
    c->apart = !atomic_load_explicit(&c->kernel.clique->together, memory_order_relaxed);
    if (c->apart)
        host_way_begin(c);
    host_direct_declare(c);
    if (c->manifest.exposed)
        host_collective_arrive(c);
    else
        give(c);
    if (c->apart)
        host_way_pause(c);
    return HOST_DECLARED;
}

/* After an arrival: nobody goes on before all have come. */
static host_phase_t go_on(host_collective_t *c) {
    switch (c->phase) {
    case HOST_DECLARED:
        if (is_mismatch(c, c->arrival))
            return HOST_DECLARED;
        if (c->apart)
            host_way_resume(c);
        /* In the faithful mode ranks that disagree corrupt each other's data, but nobody's memory. */
        return find_other(c, c->arrival) != 0 ? HOST_STAGED : host_direct_agree(c);
    case HOST_MAPPED:
        return host_direct_confirm(c);
    default:
        c->kernel.exposed = false;
        return HOST_FINISHED;
    }
}

static host_progress_t finish(host_collective_t *c) {
    if (c->apart)
        host_way_end(c);
    return HOST_DONE;
}

static host_progress_t advance(host_kernel_t *kernel) {
    host_collective_t *c = (host_collective_t *)(void *)kernel;
    for (;;) {
        switch (c->phase) {
        case HOST_SETTING_OUT:
            if (!may_touch_all(c)) {
                kernel->work.status = CUDA_ERROR_ILLEGAL_ADDRESS;
                return HOST_DONE;
            }
            c->phase = set_out(c);
            break;
        case HOST_STAGED:
            return advance_staged(c) == HOST_DONE ? finish(c) : HOST_BLOCKED;
        case HOST_DIRECT:
            if (host_direct_work(c) == HOST_BLOCKED)
                return HOST_BLOCKED;
            host_collective_arrive(c);
            c->phase = HOST_WORKED;
            break;
        case HOST_FINISHED:
            return finish(c);
        default:
            if (!host_collective_all_arrived(c, c->arrival))
                return HOST_BLOCKED;
            c->phase = go_on(c);
            if (kernel->stuck)
                return HOST_BLOCKED;
            kernel->work.moves++;
        }
    }
}

static void drop(host_kernel_t *kernel) {
    free(((host_collective_t *)(void *)kernel)->peers);
}

host_kernel_t *host_collective_new(ncclComm_t comm, const host_task_t *task) {
    host_collective_t *c = calloc(1, sizeof *c);
    if (c == NULL)
        return NULL;
    c->task = *task;
    c->shape = &host_shapes[task->function];
    c->sequence = ++comm->sequence;
    c->size = host_type_size(task->type);
    c->gives = !c->shape->root_gives || comm->rank == task->root;
    c->takes = !c->shape->root_takes || comm->rank == task->root;
    c->blocks = c->shape->spread ? (size_t)comm->ranks : 1;
    bool widens = !c->shape->reduces && !c->shape->from_root;
    c->kernel.work.bytes = task->count * c->size * (widens ? (size_t)comm->ranks : c->blocks);
    size_t share = HOST_LINE_BYTES / c->blocks;
    c->in_line = task->count <= share / c->size;
    if (c->in_line)
        c->chunk = task->count;
    else
        c->chunk = HOST_SLOT_BYTES / (c->blocks * c->size) / 64 * 64; /* whole cache lines, and vectors */
    c->kernel.advance = advance;
    c->kernel.linger = linger;
    c->kernel.drop = drop;
    c->kernel.name = c->shape->name;
    c->large = c->kernel.work.bytes > HOST_POLL_BYTES;
    c->way = HOST_WAY_CACHED;
    size_t desk = (size_t)HOST_SLOTS * HOST_SLOT_BYTES / (size_t)comm->ranks / DESK_STEP * DESK_STEP;
    c->desk = desk < DESK_BYTES ? desk : DESK_BYTES;
    return &c->kernel;
}
