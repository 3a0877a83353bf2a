/* From the tasks of a group to kernels on streams. */
#include "nccl_group.h"

/* ---- two threads on one device ------------------------------------------------------------------- */

/* NCCL refuses launches by two threads on one device at the same time where it notices them. */
enum { DEVICES = 64 };
static _Atomic uint32_t launching[DEVICES];

static ncclResult_t take_device(int device) {
    uint32_t nobody = 0;
    if (host_config()->multi_rank || atomic_compare_exchange_strong(&launching[device % DEVICES], &nobody, 1))
        return ncclSuccess;
    return host_fail(ncclInvalidUsage, "two host threads launch on device %d at the same time", device);
}

static void give_device(int device) {
    if (!host_config()->multi_rank)
        atomic_store(&launching[device % DEVICES], 0);
}

/* Make the communicator's device the thread's; *before is what to restore, or -2 for nothing. */
static ncclResult_t switch_device(int device, int *before) {
    *before = -1;
    CUresult status = host_current_device(before, false);
    if (status == CUDA_SUCCESS && *before == device) {
        *before = -2;
        return ncclSuccess;
    }
    if (status != CUDA_SUCCESS)
        *before = -1;
    status = host_set_current_device(device);
    if (status != CUDA_SUCCESS)
        return host_fail(ncclUnhandledCudaError, "device %d cannot be used (CUDA error %d)", device,
                         (int)status);
    return ncclSuccess;
}

static void restore_device(int before) {
    if (before != -2)
        host_set_current_device(before);
}

/* *capture: of which the stream is part, 0 for none. */
static ncclResult_t check_stream(ncclComm_t comm, CUstream stream, uint64_t *capture) {
    int device;
    CUresult status = host_stream_device(stream, &device);
    if (status != CUDA_SUCCESS)
        return host_fail(ncclUnhandledCudaError, "the stream %p is not one of this engine's (CUDA error %d)",
                         (void *)stream, (int)status);
    if (device != comm->device)
        return host_fail(ncclUnhandledCudaError,
                         "the stream belongs to device %d, the communicator to device %d", device,
                         comm->device);
    status = host_stream_capturing(stream, capture);
    if (status != CUDA_SUCCESS)
        return host_fail(ncclUnhandledCudaError, "the stream's capture is broken (CUDA error %d)",
                         (int)status);
    return ncclSuccess;
}

/* ---- one operation outside a group --------------------------------------------------------------- */

/* The event of a call's config is reached when all before the kernel is done. NCCL has it when the kernel has
 * started everywhere, or at this same place where CUDA is older than 12.3. */
ncclResult_t host_launch_event(const host_task_t *task, CUstream stream) {
    CUresult status = task->launched != NULL ? host_event_record(task->launched, stream) : CUDA_SUCCESS;
    if (status == CUDA_SUCCESS)
        return ncclSuccess;
    return host_fail(ncclUnhandledCudaError, "the launch completion event cannot be recorded (CUDA error %d)",
                     (int)status);
}

static ncclResult_t launch_collective(ncclComm_t comm, const host_task_t *task, CUstream stream,
                                      uint64_t capture) {
    ncclResult_t result = host_launch_event(task, stream);
    if (result != ncclSuccess)
        return result;
    if (capture == 0)
        return host_kernel_submit(host_collective_new(comm, task), comm, stream);
    host_task_t alone = *task;
    alone.next = NULL;
    return host_capture_tasks(comm, &alone, stream);
}

static ncclResult_t launch_messages(ncclComm_t comm, const host_task_t *tasks, CUstream stream,
                                    uint64_t capture) {
    return capture == 0 ? host_kernel_submit(host_message_new(comm, tasks), comm, stream)
                        : host_capture_tasks(comm, tasks, stream);
}

static ncclResult_t launch_rma(host_plan_t *plan, CUstream stream, uint64_t capture) {
    if (capture != 0)
        return host_fail(ncclInvalidUsage, "the host engine does not capture one-sided operations");
    host_kernel_t *kernel = host_rma_new(plan->rma);
    plan->rma = kernel != NULL ? NULL : plan->rma;
    return host_kernel_submit(kernel, plan->comm, stream);
}

static ncclResult_t check_available(const host_task_t *task) {
    if (!task->unavailable)
        return ncclSuccess;
    return host_fail(ncclInvalidArgument, "%s: no algorithm of the selection is available here",
                     host_shapes[task->function].name);
}

static ncclResult_t launch_task(ncclComm_t comm, const host_task_t *task) {
    uint64_t capture;
    ncclResult_t result = check_stream(comm, task->stream, &capture);
    if (result != ncclSuccess)
        return result;
    return task->function < HOST_COLLECTIVES ? launch_collective(comm, task, task->stream, capture)
                                             : launch_messages(comm, task, task->stream, capture);
}

ncclResult_t host_launch_one(ncclComm_t comm, const host_task_t *task) {
    if (task->function >= HOST_COLLECTIVES && task->root == comm->rank)
        return host_fail(ncclInvalidUsage,
                         "rank %d: a message to itself needs its other half in the same group", comm->rank);
    ncclResult_t result = check_available(task);
    if (result == ncclSuccess)
        result = host_contact_one(comm, task);
    if (result != ncclSuccess || host_comm_stopped(comm))
        return result;
    int before, device = comm->device;
    result = take_device(device);
    if (result != ncclSuccess)
        return result;
    result = switch_device(device, &before);
    if (result == ncclSuccess) {
        result = launch_task(comm, task);
        restore_device(before);
    }
    give_device(device);
    return result;
}

/* ---- groups -------------------------------------------------------------------------------------- */

static bool goes_before(const host_plan_t *a, const host_plan_t *b) {
    return a->hash != b->hash ? a->hash < b->hash : a->comm->rank < b->comm->rank;
}

static void sort_plans(host_plan_t **plans) {
    host_plan_t *sorted = NULL;
    while (*plans != NULL) {
        host_plan_t *plan = *plans, **link = &sorted;
        *plans = plan->next;
        while (*link != NULL && !goes_before(plan, *link))
            link = &(*link)->next;
        plan->next = *link;
        *link = plan;
    }
    *plans = sorted;
}

static size_t traffic(const host_plan_t *plan, const host_task_t *task) {
    bool wide = task->function == HOST_ALL_GATHER || task->function == HOST_REDUCE_SCATTER;
    return task->count * host_type_size(task->type) * (wide ? (size_t)plan->comm->ranks : 1);
}

/* Big ones first, as NCCL schedules them; not the order of the calls, on which nobody may rely in a group. */
static void sort_collectives(host_plan_t *plan) {
    host_task_t *sorted = NULL;
    while (plan->collectives != NULL) {
        host_task_t *task = plan->collectives, **link = &sorted;
        plan->collectives = task->next;
        while (*link != NULL && traffic(plan, *link) >= traffic(plan, task))
            link = &(*link)->next;
        task->next = *link;
        *link = task;
    }
    plan->collectives = sorted;
}

static ncclResult_t follow(CUstream waiter, CUstream signaller) {
    CUresult status = host_stream_follow(waiter, signaller);
    if (status == CUDA_SUCCESS)
        return ncclSuccess;
    return host_fail(ncclUnhandledCudaError, "streams of a group cannot be joined (CUDA error %d)",
                     (int)status);
}

/* All are part of one capture, or none is of any. */
static ncclResult_t check_streams(const host_plan_t *plan, uint64_t *capture) {
    ncclResult_t result = check_stream(plan->comm, plan->streams[0], capture);
    for (int i = 1; i < plan->stream_count && result == ncclSuccess; i++) {
        uint64_t other;
        result = check_stream(plan->comm, plan->streams[i], &other);
        if (result == ncclSuccess && other != *capture)
            result = host_fail(ncclInvalidUsage,
                               "the streams of a communicator in a group must all be captured by one graph, "
                               "or none of them");
    }
    return result;
}

/* All streams of the communicator form one barrier, and the kernels are on the one that was seen last. */
static ncclResult_t launch_kernels(host_plan_t *plan) {
    int others = plan->stream_count - 1;
    CUstream stream = plan->streams[others];
    uint64_t capture = 0;
    ncclResult_t result = check_streams(plan, &capture);
    for (int i = 0; i < others && result == ncclSuccess; i++)
        result = follow(stream, plan->streams[i]);
    if (plan->rma != NULL && result == ncclSuccess)
        result = launch_rma(plan, stream, capture);
    for (host_task_t *task = plan->collectives; task != NULL && result == ncclSuccess; task = task->next)
        result = launch_collective(plan->comm, task, stream, capture);
    if (plan->messages != NULL && result == ncclSuccess)
        result = launch_messages(plan->comm, plan->messages, stream, capture);
    for (int i = 0; i < others && result == ncclSuccess; i++)
        result = follow(plan->streams[i], stream);
    return result;
}

static ncclResult_t launch_plan(host_plan_t *plan) {
    if (host_comm_stopped(plan->comm))
        return ncclSuccess;
    sort_collectives(plan);
    int device = plan->comm->device;
    ncclResult_t result = take_device(device);
    if (result != ncclSuccess)
        return result;
    int before; /* restored once, by the end of the group */
    result = switch_device(device, &before);
    if (result == ncclSuccess)
        result = launch_kernels(plan);
    give_device(device);
    return result;
}

static ncclResult_t check_plan(const host_plan_t *plan) {
    ncclResult_t result = host_message_check(plan);
    const host_task_t *first = NULL;
    for (const host_task_t *task = plan->collectives; task != NULL && result == ncclSuccess;
         task = task->next) {
        result = check_available(task);
        if (task->launched == NULL)
            continue;
        if (first != NULL)
            result = host_fail(ncclInvalidUsage, "rank %d: two launch completion events in one group",
                               plan->comm->rank);
        first = task;
    }
    return result;
}

/* Ranks of one clique stand next to each other: all of them capture, or none. */
static ncclResult_t check_captures(const host_plan_t *plans) {
    const host_plan_t *before = NULL;
    bool captured = false;
    for (const host_plan_t *plan = plans; plan != NULL; before = plan, plan = plan->next) {
        uint64_t capture = 0;
        if (host_stream_capturing(plan->streams[0], &capture) != CUDA_SUCCESS)
            capture = 0; /* the launch will say what is wrong with the stream */
        if (before != NULL && before->hash == plan->hash && captured != (capture != 0))
            return host_fail(ncclInvalidUsage,
                             "ranks %d and %d of one communicator are in a group, and only one is captured",
                             before->comm->rank, plan->comm->rank);
        captured = capture != 0;
    }
    return ncclSuccess;
}

ncclResult_t host_launch_group(host_plan_t **plans) {
    sort_plans(plans);
    ncclResult_t result = check_captures(*plans);
    for (host_plan_t *plan = *plans; plan != NULL && result == ncclSuccess; plan = plan->next)
        result = check_plan(plan);
    if (result == ncclSuccess)
        result = host_contact(*plans, true);
    for (host_plan_t *plan = *plans; plan != NULL && result == ncclSuccess; plan = plan->next)
        result = launch_plan(plan);
    return result;
}

/* ---- simulation ---------------------------------------------------------------------------------- */

/* A model, not a measurement: what a chunk takes to go round, and a memory of 10 GB a second. */
static float estimate(const host_plan_t *plan, const host_task_t *task) {
    const float step_us = 2.0f, bytes_per_us = 10e3f;
    float ranks = (float)plan->comm->ranks;
    return step_us * ranks + (float)traffic(plan, task) * 2.0f * (ranks - 1.0f) / ranks / bytes_per_us;
}

/* As NCCL: all is done but the launch itself. The collectives' first contact is made, and so is collective.
 */
ncclResult_t host_launch_simulated(host_plan_t **plans, float *microseconds) {
    ncclResult_t result = ncclSuccess;
    sort_plans(plans);
    for (host_plan_t *plan = *plans; plan != NULL && result == ncclSuccess; plan = plan->next)
        result = check_plan(plan);
    if (result == ncclSuccess)
        result = host_contact(*plans, false);
    for (host_plan_t *plan = *plans; plan != NULL && result == ncclSuccess; plan = plan->next) {
        sort_collectives(plan);
        for (const host_task_t *task = plan->collectives; task != NULL; task = task->next)
            *microseconds = estimate(plan, task); /* the last one's stays */
    }
    return result;
}
