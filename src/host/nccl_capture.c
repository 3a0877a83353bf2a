/* Operations on streams that are being captured. A node of a graph holds what was asked for; each launch of
 * the graph makes a kernel of it, which takes its place in the order of the communicator then, as NCCL's
 * does. While the graph lives, so does the communicator: to finalize, destroy or abort it waits.
 */
#include "nccl.h"

#include <stdlib.h>

typedef struct {
    host_work_t work; /* first: the graph's view of it */
    ncclComm_t comm;
    bool solo;
    int count;
    host_task_t tasks[];
} captured_t;

static host_work_t *again(const host_work_t *work) {
    const captured_t *captured = (const captured_t *)(const void *)work;
    const host_task_t *tasks = captured->tasks;
    ncclComm_t comm = captured->comm;
    host_kernel_t *kernel = captured->solo                       ? host_solo_new(tasks)
                            : tasks->function < HOST_COLLECTIVES ? host_collective_new(comm, tasks)
                                                                 : host_message_new(comm, tasks);
    if (kernel == NULL)
        return NULL;
    host_kernel_prepare(kernel, comm);
    return &kernel->work;
}

static void release(host_work_t *work) {
    captured_t *captured = (captured_t *)(void *)work;
    ncclComm_t comm = captured->comm;
    if (!captured->solo) { /* what one rank does alone is a copy, of which NCCL keeps no account */
        atomic_fetch_sub(&comm->graphs, 1);
        host_bell_ring(&comm->order->bell);
    }
    host_comm_release(comm);
    free(captured);
}

ncclResult_t host_capture_tasks(ncclComm_t comm, const host_task_t *tasks, CUstream stream) {
    int count = 0;
    for (const host_task_t *task = tasks; task != NULL; task = task->next)
        count++;
    captured_t *captured = calloc(1, sizeof *captured + (size_t)count * sizeof captured->tasks[0]);
    if (captured == NULL)
        return host_fail(ncclSystemError, "out of memory");
    captured->work = (host_work_t){.again = again, .release = release, .kind = HOST_WORK_KERNEL};
    captured->comm = comm;
    captured->solo = comm->ranks == 1 && tasks->function < HOST_COLLECTIVES;
    captured->count = count;
    for (int i = 0; i < count; i++, tasks = tasks->next) {
        captured->tasks[i] = *tasks;
        captured->tasks[i].next = i + 1 < count ? &captured->tasks[i + 1] : NULL;
    }
    host_comm_hold(comm);
    if (!captured->solo)
        atomic_fetch_add(&comm->graphs, 1);
    CUresult status = host_stream_submit(stream, &captured->work);
    if (status == CUDA_SUCCESS)
        return ncclSuccess;
    release(&captured->work);
    return host_fail(ncclUnhandledCudaError, "the operation cannot be captured (CUDA error %d)", (int)status);
}

void host_graphs_wait(ncclComm_t comm, bool until_stopped) {
    bool told = false;
    for (;;) {
        uint32_t seen = host_bell_look(&comm->order->bell);
        unsigned int left = atomic_load(&comm->graphs);
        if (left == 0 || (until_stopped && host_comm_stopped(comm)))
            return;
        if (!told)
            host_last_error("rank %d: %u operations in graphs that are not destroyed hold the communicator",
                            comm->rank, left);
        told = true;
        host_bell_wait(&comm->order->bell, seen, HOST_NAP_NS);
    }
}
