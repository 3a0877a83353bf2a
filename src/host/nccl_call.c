/* Collectives and point to point as they are called: argument checks in NCCL's order, then launch or queue.
 */
#include "nccl_group.h"

/* ---- checks -------------------------------------------------------------------------------------- */

typedef struct {
    const char *start;
    size_t bytes;
} extent_t;

static bool overlap(extent_t a, extent_t b) {
    return a.start < b.start + b.bytes && b.start < a.start + a.bytes;
}

/* Buffers may be the same where the operation is documented to work in place, and otherwise must be apart.
 * NCCL leaves anything else undefined; the strict mode says so. */
static ncclResult_t check_overlap(const char *function, ncclComm_t comm, const host_task_t *task) {
    const host_shape_t *shape = &host_shapes[task->function];
    bool gives = !shape->root_gives || comm->rank == task->root;
    bool takes = !shape->root_takes || comm->rank == task->root;
    if (!gives || !takes || comm->ranks == 1 || task->send == NULL || task->recv == NULL)
        return ncclSuccess;
    size_t block = task->count * host_type_size(task->type), ranks = (size_t)comm->ranks;
    size_t own = (size_t)comm->rank * block;
    bool wide_in = shape->spread, wide_out = !shape->reduces && !shape->from_root;
    extent_t in = {task->send, wide_in ? ranks * block : block};
    extent_t out = {task->recv, wide_out ? ranks * block : block};
    bool in_place =
        !(wide_in && wide_out) && in.start + (wide_in ? own : 0) == out.start + (wide_out ? own : 0);
    if (in_place || !overlap(in, out))
        return ncclSuccess;
    return host_fail(
        ncclInvalidArgument,
        "%s: the buffers overlap (send %p, %zu bytes; receive %p, %zu bytes) and are not in place", function,
        task->send, in.bytes, task->recv, out.bytes);
}

static bool is_float8(ncclDataType_t type) {
    return type == ncclFloat8e4m3 || type == ncclFloat8e5m2;
}

static ncclResult_t check(const char *function, ncclComm_t comm, host_task_t *task) {
    ncclResult_t result = host_comm_usable(comm, function);
    if (result != ncclSuccess)
        return result;
    bool message = task->function >= HOST_COLLECTIVES;
    if (task->root < 0 || task->root >= comm->ranks)
        return host_fail(ncclInvalidArgument, "%s: %s %d is not a rank of this communicator (it has %d)",
                         function, message ? "peer" : "root", task->root, comm->ranks);
    if ((int)task->type < 0 || task->type >= ncclNumTypes)
        return host_fail(ncclInvalidArgument, "%s: %d is no data type", function, (int)task->type);
    result = host_operator_resolve(comm, task, function);
    if (result != ncclSuccess || message || task->count == 0)
        return result;
    if (comm->ranks == 1 && task->scaled && is_float8(task->type))
        return host_fail(ncclInvalidArgument, "%s: no average of 8-bit floats on a communicator of one rank",
                         function);
    result = host_selection_check(function, task);
    if (result != ncclSuccess)
        return result;
    return host_config()->mode == HOST_STRICT ? check_overlap(function, comm, task) : ncclSuccess;
}

/* A communicator of one rank does its collectives at the call, even inside a group, on the caller's device.
 */
static ncclResult_t run_solo(ncclComm_t comm, const host_task_t *task) {
    if (host_comm_stopped(comm))
        return ncclSuccess;
    ncclResult_t result = host_launch_event(task, task->stream);
    if (result != ncclSuccess)
        return result;
    uint64_t capture = 0;
    if (host_stream_capturing(task->stream, &capture) == CUDA_SUCCESS && capture != 0)
        return host_capture_tasks(comm, task, task->stream);
    return host_kernel_submit(host_solo_new(task), comm, task->stream);
}

static ncclResult_t perform(ncclComm_t comm, const host_task_t *task) {
    bool collective = task->function < HOST_COLLECTIVES;
    if (collective && task->count == 0) /* dropped here, whatever the other ranks do */
        return ncclSuccess;
    if (collective && comm->ranks == 1)
        return run_solo(comm, task);
    if (host_group_depth() > 0)
        return host_group_add_task(comm, task);
    if (comm->config.blocking != 0)
        return host_launch_one(comm, task);
    host_group_start();
    return host_group_close(host_group_add_task(comm, task));
}

static ncclResult_t perform_checked(const char *function, ncclComm_t comm, host_task_t *task) {
    ncclResult_t result = host_comm_pin(comm, function);
    if (result != ncclSuccess)
        return result;
    if (host_misuse_watched())
        host_misuse_device(comm, function);
    result = check(function, comm, task);
    task->selection = NULL; /* it is the caller's, for the time of the call */
    if (result == ncclSuccess)
        result = perform(comm, task);
    result = host_comm_progress(comm, result);
    host_comm_unpin(comm);
    return result;
}

/* A bad config is refused before anything else is looked at, and does not poison the group. */
static ncclResult_t issue(const char *function, ncclComm_t comm, host_task_t *task,
                          const ncclCollConfig_t *config) {
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, function, comm);
    host_call_t *record = &entry.record;
    record->count = task->count;
    record->datatype = (int32_t)task->type;
    record->op = (int32_t)task->op;
    record->root = task->root;
    record->stream = (uint64_t)(uintptr_t)task->stream;
    record->object = (uint64_t)(uintptr_t)(task->recv != NULL ? task->recv : task->send);
    if (result == ncclSuccess) {
        result = host_coll_config_parse(function, config, task);
        if (result != ncclSuccess)
            return host_entry_end(&entry, result);
        result = perform_checked(function, comm, task);
    }
    host_group_poison(result);
    return host_entry_end(&entry, result);
}

/* ---- the calls ----------------------------------------------------------------------------------- */

/* Each collective is there twice: as it is, and with a config. `PARAMETERS` are those before the
 * communicator, and the rest says which members of the task they are. */
#define PARAMETERS(...) __VA_ARGS__
#define COLLECTIVE(name, kind, parameters, ...)                                                              \
    ncclResult_t nccl##name(parameters, ncclComm_t comm, cudaStream_t stream) {                              \
        host_task_t task = {.function = kind, .stream = stream, __VA_ARGS__};                                \
        return issue("nccl" #name, comm, &task, NULL);                                                       \
    }                                                                                                        \
    ncclResult_t nccl##name##Config(parameters, ncclComm_t comm, cudaStream_t stream,                        \
                                    const ncclCollConfig_t *config) {                                        \
        host_task_t task = {.function = kind, .stream = stream, __VA_ARGS__};                                \
        return issue("nccl" #name "Config", comm, &task, config);                                            \
    }

COLLECTIVE(AllReduce, HOST_ALL_REDUCE,
           PARAMETERS(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                      ncclRedOp_t op),
           .send = sendbuff, .recv = recvbuff, .count = count, .type = datatype, .op = op)

COLLECTIVE(Reduce, HOST_REDUCE,
           PARAMETERS(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                      ncclRedOp_t op, int root),
           .send = sendbuff, .recv = recvbuff, .count = count, .type = datatype, .op = op, .root = root)

COLLECTIVE(Broadcast, HOST_BROADCAST,
           PARAMETERS(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root),
           .send = sendbuff, .recv = recvbuff, .count = count, .type = datatype, .root = root)

COLLECTIVE(AllGather, HOST_ALL_GATHER,
           PARAMETERS(const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype),
           .send = sendbuff, .recv = recvbuff, .count = sendcount, .type = datatype)

COLLECTIVE(ReduceScatter, HOST_REDUCE_SCATTER,
           PARAMETERS(const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t datatype,
                      ncclRedOp_t op),
           .send = sendbuff, .recv = recvbuff, .count = recvcount, .type = datatype, .op = op)

COLLECTIVE(AlltoAll, HOST_ALL_TO_ALL,
           PARAMETERS(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype),
           .send = sendbuff, .recv = recvbuff, .count = count, .type = datatype)

COLLECTIVE(Gather, HOST_GATHER,
           PARAMETERS(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root),
           .send = sendbuff, .recv = recvbuff, .count = count, .type = datatype, .root = root)

COLLECTIVE(Scatter, HOST_SCATTER,
           PARAMETERS(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root),
           .send = sendbuff, .recv = recvbuff, .count = count, .type = datatype, .root = root)

ncclResult_t ncclBcast(void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
                       cudaStream_t stream) {
    host_task_t task = {.function = HOST_BROADCAST,
                        .send = buff,
                        .recv = buff,
                        .count = count,
                        .type = datatype,
                        .root = root,
                        .stream = stream};
    return issue("ncclBcast", comm, &task, NULL);
}

ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    host_task_t task = {.function = HOST_SEND,
                        .send = sendbuff,
                        .count = count,
                        .type = datatype,
                        .root = peer,
                        .stream = stream};
    return issue("ncclSend", comm, &task, NULL);
}

ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    host_task_t task = {.function = HOST_RECV,
                        .recv = recvbuff,
                        .count = count,
                        .type = datatype,
                        .root = peer,
                        .stream = stream};
    return issue("ncclRecv", comm, &task, NULL);
}
