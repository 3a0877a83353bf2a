/* Injected faults, as a call feels them; a kernel's are in nccl_kernel.c. */
#define _GNU_SOURCE
#include "nccl.h"

#include <sched.h>
#include <signal.h>
#include <unistd.h>

_Noreturn void host_process_kill(void) {
    for (;;)
        kill(getpid(), SIGKILL);
}

/* What some releases of NCCL did to the thread that made a communicator. */
static void narrow_affinity(void) {
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        return;
    CPU_ZERO(&one);
    for (size_t cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; cpu++)
        if (CPU_ISSET(cpu, &allowed))
            CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof one, &one);
}

static ncclResult_t delay(ncclComm_t comm, int64_t ns) {
    int64_t end = host_now_ns() + ns;
    for (int64_t left = ns; left > 0; left = end - host_now_ns()) {
        uint32_t seen = host_bell_look(&comm->quiet);
        if (host_comm_stopped(comm))
            return host_fail(ncclInternalError, "rank %d was aborted while delayed", comm->rank);
        host_bell_wait(&comm->quiet, seen, left);
    }
    return ncclSuccess;
}

ncclResult_t host_comm_fault(ncclComm_t comm, const char *site, const char *function) {
    host_fault_t fault = host_fault_take(site, function, comm->rank);
    switch (fault.kind) {
    case HOST_FAULT_DELAY:
        return delay(comm, fault.ns);
    case HOST_FAULT_STUCK:
        return host_comm_hang(comm, "stuck by an injected fault");
    case HOST_FAULT_KILL:
        host_process_kill();
    case HOST_FAULT_FAIL:
    case HOST_FAULT_REMOTE:
        return host_fail((ncclResult_t)fault.code, "%s: injected fault at site %s, rank %d", function, site,
                         comm->rank);
    case HOST_FAULT_CUDA_ERROR:
        host_device_fail(comm->device, (CUresult)fault.code);
        return host_fail(ncclUnhandledCudaError, "%s: injected CUDA error %d", function, fault.code);
    case HOST_FAULT_IN_PROGRESS:
        atomic_store(&comm->polls, fault.ns);
        return ncclSuccess;
    case HOST_FAULT_AFFINITY:
        narrow_affinity();
        return ncclSuccess;
    default:
        return ncclSuccess;
    }
}

ncclResult_t host_call_fault(const char *function, ncclComm_t comm) {
    host_fault_t fault = host_fault_take("call", function, comm != NULL ? comm->rank : -1);
    int device = 0;
    switch (fault.kind) {
    case HOST_FAULT_DELAY:
    case HOST_FAULT_STUCK:
        host_fault_stall(fault.ns);
        return ncclSuccess;
    case HOST_FAULT_KILL:
        host_process_kill();
    case HOST_FAULT_FAIL:
    case HOST_FAULT_REMOTE:
        return host_fail((ncclResult_t)fault.code, "%s: injected fault", function);
    case HOST_FAULT_CUDA_ERROR:
        if (host_current_device(&device, false) == CUDA_SUCCESS)
            host_device_fail(device, (CUresult)fault.code);
        return host_fail(ncclUnhandledCudaError, "%s: injected CUDA error %d", function, fault.code);
    case HOST_FAULT_IN_PROGRESS:
        if (comm == NULL)
            return ncclInProgress;
        atomic_store(&comm->polls, fault.ns);
        return ncclSuccess;
    default:
        return ncclSuccess;
    }
}

ncclResult_t host_reclaim_fault(ncclComm_t comm, const char *site, const char *function) {
    host_fault_t fault = host_fault_take(site, function, comm->rank);
    switch (fault.kind) {
    case HOST_FAULT_KILL:
        host_process_kill();
    case HOST_FAULT_STUCK:
    case HOST_FAULT_DELAY:
        host_fault_stall(fault.ns);
        return ncclSuccess;
    case HOST_FAULT_FAIL:
        return host_fail((ncclResult_t)fault.code, "%s: injected fault at site %s, rank %d", function, site,
                         comm->rank);
    case HOST_FAULT_IN_PROGRESS:
        return ncclInProgress;
    default:
        return ncclSuccess;
    }
}
