/* What every kernel does around its own work: its turn, the device, injected faults, abort. */
#include "nccl.h"

#include <stdlib.h>

enum { LOOK_EVERY = 8 };

static void destroy(host_kernel_t *kernel) {
    if (kernel->drop != NULL)
        kernel->drop(kernel);
    free(kernel);
}

static void release(host_work_t *work) {
    host_kernel_t *kernel = (host_kernel_t *)(void *)work;
    if (kernel->on_device)
        host_device_leave(work->device, work);
    if (kernel->exposed)
        host_visitors_turn_out(kernel->comm);
    if (kernel->clique != NULL)
        host_clique_release(kernel->clique);
    if (!kernel->solo) {
        atomic_fetch_sub(&kernel->comm->kernels, 1);
        if (host_comm_stopped(kernel->comm))
            host_bell_ring(&kernel->comm->quiet);
    }
    host_comm_release(kernel->comm);
    destroy(kernel);
}

bool host_kernel_may_touch(int device, const void *pointer, size_t bytes) {
    const host_config_t *config = host_config();
    if (bytes == 0)
        return true;
    if (pointer == NULL)
        return false;
    if (config->temper == HOST_QUICK && !config->refuse_foreign)
        return true;
    host_memory_t memory;
    host_memory_find(pointer, &memory);
    if (!memory.own)
        return !config->refuse_foreign;
    size_t before = (size_t)((const char *)pointer - (const char *)memory.base);
    return (memory.device < 0 || memory.device == device) && before <= memory.bytes &&
           bytes <= memory.bytes - before;
}

/* True: the kernel has failed and is done. */
static bool take_fault(host_kernel_t *kernel) {
    ncclComm_t comm = kernel->comm;
    host_fault_t fault = host_fault_take("op", kernel->name, comm->rank);
    switch (fault.kind) {
    case HOST_FAULT_DELAY:
        kernel->not_before = host_now_ns() + fault.ns;
        return false;
    case HOST_FAULT_STUCK:
        kernel->stuck = true;
        return false;
    case HOST_FAULT_KILL:
        host_process_kill();
    case HOST_FAULT_FAIL:
    case HOST_FAULT_REMOTE:
        kernel->stuck = true;
        host_last_error("%s: injected fault at site op, rank %d", kernel->name, comm->rank);
        host_comm_set_state(comm, (ncclResult_t)fault.code);
        return false;
    case HOST_FAULT_IN_PROGRESS:
        atomic_store(&comm->polls, fault.ns);
        return false;
    case HOST_FAULT_CUDA_ERROR:
        kernel->work.status = (CUresult)fault.code;
        return true;
    default:
        return false;
    }
}

/* Several ranks on one device run at the same time, as they do on a GPU that has room for them. */
static bool enter_device(host_kernel_t *kernel) {
    if (kernel->on_device || kernel->off_device || host_config()->multi_rank)
        return true;
    kernel->on_device = host_device_enter(kernel->work.device, &kernel->work);
    return kernel->on_device;
}

/* Before its turn a kernel has touched nothing. */
static host_progress_t start(host_kernel_t *kernel, bool *failed) {
    ncclComm_t comm = kernel->comm;
    host_work_t *work = &kernel->work;
    work->bell = &comm->order->bell;
    if (atomic_load_explicit(&comm->order->turn, memory_order_acquire) != kernel->ticket)
        return HOST_BLOCKED;
    if (!enter_device(kernel))
        return HOST_BLOCKED;
    kernel->clique = atomic_load(&comm->clique);
    comm->offered = 0;
    host_clique_hold(kernel->clique);
    *failed = take_fault(kernel);
    return HOST_DONE;
}

static bool is_delayed(host_kernel_t *kernel) {
    kernel->work.unrung = kernel->not_before != 0 && host_now_ns() < kernel->not_before;
    return kernel->work.unrung;
}

/* What a blocked kernel does now and then: it may wait for somebody who is gone. */
static void look_around(host_kernel_t *kernel) {
    if (kernel->work.tries < HOST_PATIENCE && ++kernel->looks % LOOK_EVERY != 0)
        return; /* a look at the clock costs as much as the whole step */
    int64_t now = host_now_ns();
    if (now < kernel->next_look)
        return;
    bool first = kernel->next_look == 0;
    kernel->next_look = now + HOST_NAP_NS;
    if (first)
        return;
    host_clique_watch(kernel->clique);
    if (kernel->linger != NULL && !kernel->stuck)
        kernel->linger(kernel);
}

static host_progress_t run(host_kernel_t *kernel) {
    host_work_t *work = &kernel->work;
    ncclComm_t comm = kernel->comm;
    if (kernel->clique == NULL) {
        bool failed = false;
        if (start(kernel, &failed) == HOST_BLOCKED)
            return HOST_BLOCKED;
        if (failed)
            return HOST_DONE;
    }
    work->bell = &comm->area->bell;
    if (is_delayed(kernel))
        return HOST_BLOCKED;
    if (!kernel->stuck && kernel->advance(kernel) == HOST_DONE)
        return HOST_DONE;
    look_around(kernel);
    return HOST_BLOCKED;
}

static host_progress_t leave(host_kernel_t *kernel) {
    if (kernel->on_device) {
        host_device_leave(kernel->work.device, &kernel->work);
        kernel->on_device = false;
    }
    return HOST_DONE;
}

/* After an abort a kernel ends at once, as if it had succeeded; that is what the event says on a GPU too. */
static host_progress_t step(host_work_t *work) {
    host_kernel_t *kernel = (host_kernel_t *)(void *)work;
    ncclComm_t comm = kernel->comm;
    if (!host_comm_begin(comm))
        return leave(kernel);
    if (run(kernel) == HOST_BLOCKED) {
        host_comm_end(comm);
        return HOST_BLOCKED;
    }
    leave(kernel);
    atomic_store_explicit(&comm->order->turn, kernel->ticket + 1, memory_order_release);
    host_bell_ring(&comm->order->bell);
    host_comm_end(comm);
    return HOST_DONE;
}

/* On a communicator of one rank NCCL copies on the user's stream: in no order but the stream's, and whatever
 * has become of the communicator meanwhile. Only what a fault holds up ends with an abort. */
static host_progress_t step_solo(host_work_t *work) {
    host_kernel_t *kernel = (host_kernel_t *)(void *)work;
    ncclComm_t comm = kernel->comm;
    work->bell = &comm->order->bell;
    if (!kernel->started) {
        kernel->started = true;
        if (take_fault(kernel))
            return HOST_DONE;
    }
    if (is_delayed(kernel) || kernel->stuck)
        return host_comm_stopped(comm) ? HOST_DONE : HOST_BLOCKED;
    return kernel->advance(kernel);
}

void host_kernel_prepare(host_kernel_t *kernel, ncclComm_t comm) {
    kernel->work.step = kernel->solo ? step_solo : step;
    kernel->work.release = release;
    kernel->work.kind = HOST_WORK_KERNEL;
    kernel->comm = comm;
    if (!kernel->solo) {
        kernel->ticket = atomic_fetch_add(&comm->order->issued, 1);
        atomic_fetch_add(&comm->kernels, 1);
    }
    host_comm_hold(comm);
}

ncclResult_t host_kernel_submit(host_kernel_t *kernel, ncclComm_t comm, CUstream stream) {
    if (kernel == NULL)
        return host_fail(ncclSystemError, "out of memory");
    host_kernel_prepare(kernel, comm);
    bool solo = kernel->solo;
    const char *name = kernel->name;
    CUresult status = host_stream_submit(stream, &kernel->work);
    if (status == CUDA_SUCCESS)
        return ncclSuccess;
    if (!solo) {
        atomic_fetch_sub(&comm->order->issued, 1);
        atomic_fetch_sub(&comm->kernels, 1);
    }
    host_comm_release(comm);
    destroy(kernel);
    return host_fail(ncclUnhandledCudaError, "%s: the kernel cannot be launched (CUDA error %d)", name,
                     (int)status);
}
