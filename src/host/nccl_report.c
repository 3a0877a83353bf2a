/* What a rank says of its operation, and the words for two ranks that do not agree (strict mode). */
#include "nccl.h"

#include <stdio.h>

const host_shape_t host_shapes[HOST_FUNCTIONS] = {
    [HOST_ALL_REDUCE] = {.name = "ncclAllReduce", .reduces = true},
    [HOST_REDUCE] = {.name = "ncclReduce", .rooted = true, .root_takes = true, .reduces = true},
    [HOST_BROADCAST] = {.name = "ncclBroadcast", .rooted = true, .root_gives = true, .from_root = true},
    [HOST_ALL_GATHER] = {.name = "ncclAllGather"},
    [HOST_REDUCE_SCATTER] = {.name = "ncclReduceScatter", .spread = true, .reduces = true},
    [HOST_ALL_TO_ALL] = {.name = "ncclAlltoAll", .spread = true},
    [HOST_GATHER] = {.name = "ncclGather", .rooted = true, .root_takes = true},
    [HOST_SCATTER] =
        {.name = "ncclScatter", .rooted = true, .root_gives = true, .spread = true, .from_root = true},
    [HOST_SEND] = {.name = "ncclSend"},
    [HOST_RECV] = {.name = "ncclRecv"},
};

static const char *const type_names[ncclNumTypes] = {"int8",    "uint8",    "int32",      "uint32",
                                                     "int64",   "uint64",   "float16",    "float32",
                                                     "float64", "bfloat16", "float8e4m3", "float8e5m2"};
static const char *const op_names[] = {"sum", "prod", "max", "min", "avg", "premulsum"};

host_sketch_t host_sketch_of(const host_task_t *task) {
    return (host_sketch_t){.count = task->count,
                           .function = (uint8_t)task->function,
                           .type = (uint8_t)task->type,
                           .op = (uint8_t)task->op,
                           .root = (uint8_t)task->root};
}

typedef struct {
    char text[160];
} words_t;

/* A sketch comes out of shared memory, so nothing in it is trusted as an index. */
static words_t describe(host_sketch_t sketch) {
    words_t words;
    if (sketch.function >= HOST_FUNCTIONS || sketch.type >= ncclNumTypes || sketch.op > HOST_USER_OP) {
        snprintf(words.text, sizeof words.text, "something unknown");
        return words;
    }
    const host_shape_t *shape = &host_shapes[sketch.function];
    int length = snprintf(words.text, sizeof words.text, "%s(count=%llu, %s", shape->name,
                          (unsigned long long)sketch.count, type_names[sketch.type]);
    if (shape->reduces)
        length +=
            snprintf(words.text + length, sizeof words.text - (size_t)length, ", %s", op_names[sketch.op]);
    if (shape->rooted)
        length +=
            snprintf(words.text + length, sizeof words.text - (size_t)length, ", root=%d", (int)sketch.root);
    snprintf(words.text + length, sizeof words.text - (size_t)length, ")");
    return words;
}

void host_report_mismatch(ncclComm_t comm, uint64_t sequence, int rank_a, host_sketch_t a, int rank_b,
                          host_sketch_t b) {
    words_t first = describe(a), second = describe(b);
    host_last_error("mismatch: operation %llu: rank %d calls %s, rank %d calls %s",
                    (unsigned long long)sequence, rank_a, first.text, rank_b, second.text);
    host_comm_set_state(comm, ncclInvalidUsage);
}

void host_report_message(ncclComm_t comm, uint32_t number, int from, host_sketch_t sent, int to,
                         host_sketch_t wanted) {
    words_t first = describe(sent), second = describe(wanted);
    host_last_error("mismatch: message %u from rank %d to rank %d: rank %d calls %s, rank %d calls %s",
                    (unsigned int)number, from, to, from, first.text, to, second.text);
    host_comm_set_state(comm, ncclInvalidUsage);
}

/* ---- ranks that wait in different calls ---------------------------------------------------------- */

static uint32_t pack(host_sketch_t sketch) {
    return (uint32_t)sketch.function | (uint32_t)sketch.type << 8 | (uint32_t)sketch.op << 16 |
           (uint32_t)sketch.root << 24;
}

void host_intent_say(ncclComm_t comm, host_intent_kind_t kind, uint64_t sequence, host_sketch_t sketch) {
    host_intent_t *intent = &comm->area->intent[kind];
    if (atomic_load_explicit(&intent->sequence, memory_order_relaxed) == sequence)
        return;
    atomic_store(&intent->sequence, 0);
    atomic_store(&intent->count, sketch.count);
    atomic_store(&intent->packed, pack(sketch));
    atomic_store(&intent->sequence, sequence);
}

static bool read_intent(host_intent_t *intent, uint64_t sequence, host_sketch_t *sketch) {
    if (atomic_load(&intent->sequence) != sequence)
        return false;
    uint64_t count = atomic_load(&intent->count);
    uint32_t packed = atomic_load(&intent->packed);
    *sketch = (host_sketch_t){.count = count,
                              .function = (uint8_t)packed,
                              .type = (uint8_t)(packed >> 8),
                              .op = (uint8_t)(packed >> 16),
                              .root = (uint8_t)(packed >> 24)};
    return atomic_load(&intent->sequence) == sequence;
}

/* The lower rank is named first, so that both sides say the same. */
static void report_pair(ncclComm_t comm, uint64_t sequence, host_sketch_t own, int rank,
                        host_sketch_t other) {
    if (comm->rank < rank)
        host_report_mismatch(comm, sequence, comm->rank, own, rank, other);
    else
        host_report_mismatch(comm, sequence, rank, other, comm->rank, own);
}

static bool find_intent(ncclComm_t comm, int rank, uint64_t sequence, host_sketch_t own) {
    host_intent_t *intents = host_segment_area(atomic_load(&comm->clique)->head, rank)->intent;
    for (int kind = 0; kind < 2; kind++) {
        host_sketch_t other;
        if (!read_intent(&intents[kind], sequence, &other) || host_sketch_same(own, other))
            continue;
        report_pair(comm, sequence, own, rank, other);
        return true;
    }
    return false;
}

bool host_intent_differs(ncclComm_t comm, uint64_t sequence, host_sketch_t own) {
    for (int rank = 0; rank < comm->ranks; rank++)
        if (rank != comm->rank && find_intent(comm, rank, sequence, own))
            return true;
    return false;
}

/* Had the peer been going to make its half of the message, it would have done so before its next collective.
 * Nothing is said of a message before that is certain, for until then it may wait for a late peer. */
bool host_intent_passes_by(ncclComm_t comm, host_intent_kind_t kind, uint64_t sequence, host_sketch_t own,
                           int peer) {
    if (!find_intent(comm, peer, sequence, own))
        return false;
    host_intent_say(comm, kind, sequence, own);
    return true;
}
