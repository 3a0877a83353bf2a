/* In and out of every exported function: initialisation, fork, injected faults, the driver's own lock. */
#define _GNU_SOURCE
#include "driver.h"

#include <signal.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>

_Atomic uint32_t host_attention = HOST_ATTEND_INIT;
_Thread_local host_thread_t host_thread;

static pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic bool initialised;
static _Atomic bool
    forked; /* an initialised process has forked: as with a real driver, the child is refused */

void host_attend(uint32_t bit, bool on) {
    if (on)
        atomic_fetch_or_explicit(&host_attention, bit, memory_order_seq_cst);
    else
        atomic_fetch_and_explicit(&host_attention, ~bit, memory_order_seq_cst);
}

bool host_driver_initialised(void) {
    return atomic_load_explicit(&initialised, memory_order_acquire);
}

static void in_forked_child(void) {
    if (atomic_load(&initialised)) {
        atomic_store(&initialised, false);
        atomic_store(&forked, true);
        atomic_fetch_or(&host_attention, HOST_ATTEND_INIT);
    }
}

static CUresult injected(const char *function) {
    host_fault_t fault = host_fault_take("call", function, -1);
    switch (fault.kind) {
    case HOST_FAULT_DELAY:
        host_nap_ns(fault.ns);
        return CUDA_SUCCESS;
    case HOST_FAULT_STUCK:
        host_fault_stall(fault.ns);
        return CUDA_SUCCESS;
    case HOST_FAULT_FAIL:
        return (CUresult)fault.code;
    case HOST_FAULT_KILL:
        raise(SIGKILL);
        return CUDA_ERROR_UNKNOWN;
    case HOST_FAULT_CUDA_ERROR:
        if (host_thread.current != NULL)
            host_device_fail(host_thread.current->ordinal, (CUresult)fault.code);
        return (CUresult)fault.code;
    default:
        return CUDA_SUCCESS;
    }
}

CUresult host_enter_slowly(const char *function, host_need_t need) {
    host_config();
    if (host_thread.inside_function)
        return CUDA_ERROR_NOT_PERMITTED; /* a host function must not call the driver */
    uint32_t attention = atomic_load_explicit(&host_attention, memory_order_relaxed);
    if (attention & HOST_ATTEND_LOCK)
        host_driver_pass();
    if (need >= HOST_NEEDS_INIT && !host_driver_initialised())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (attention & HOST_ATTEND_FAULTS) {
        CUresult result = injected(function);
        if (result != CUDA_SUCCESS)
            return result;
    }
    if (need < HOST_NEEDS_CONTEXT)
        return CUDA_SUCCESS;
    if (host_thread.current == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    return host_device_alive(host_thread.current) ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

CUresult host_leave_slowly(const char *function, CUstream stream, const void *object, CUresult result) {
    if (host_journal_on()) {
        host_call_t call = {
            .device = host_thread.current != NULL ? host_thread.current->ordinal : -1,
            .result = result,
            .datatype = -1,
            .op = -1,
            .root = -1,
            .stream = (uint64_t)(uintptr_t)stream,
            .object = (uint64_t)(uintptr_t)object,
            .rank = -1,
        };
        snprintf(call.function, sizeof call.function, "%s", function);
        host_journal_add(&call);
    }
    return result;
}

/* ---- the driver's lock ---------------------------------------------------------------------------- */

static pthread_mutex_t driver_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int holders; /* threads of tests that hold it, or are about to */

void host_driver_lock(void) {
    pthread_mutex_lock(&driver_lock);
}

void host_driver_unlock(void) {
    pthread_mutex_unlock(&driver_lock);
}

void host_driver_pass(void) {
    pthread_mutex_lock(&driver_lock);
    pthread_mutex_unlock(&driver_lock);
}

typedef struct {
    int64_t ns;
    host_bell_t held;
    _Atomic int parties; /* the last of the two to leave frees */
} holder_t;

static void holder_leave(holder_t *holder) {
    if (atomic_fetch_sub(&holder->parties, 1) == 1)
        free(holder);
}

static void *hold(void *argument) {
    holder_t *holder = argument;
    host_driver_lock();
    host_bell_ring(&holder->held);
    host_nap_ns(holder->ns);
    host_driver_unlock();
    if (atomic_fetch_sub(&holders, 1) == 1)
        host_attend(HOST_ATTEND_LOCK, host_config()->temper == HOST_GPULIKE);
    holder_leave(holder);
    host_thread_end();
    return NULL;
}

void pn_host_hold_driver_lock(unsigned int milliseconds) {
    holder_t *holder = calloc(1, sizeof *holder);
    if (holder == NULL)
        return;
    holder->ns = (int64_t)milliseconds * 1000000;
    atomic_init(&holder->parties, 2);
    atomic_fetch_add(&holders, 1);
    host_attend(HOST_ATTEND_LOCK, true);
    if (host_thread_start(hold, holder, "pynccl-holder") == CUDA_SUCCESS) {
        while (host_bell_look(&holder->held) == 0)
            host_bell_wait(&holder->held, 0, -1);
    } else {
        atomic_fetch_sub(&holders, 1);
        holder_leave(holder);
    }
    holder_leave(holder);
}

/* ---- exported ------------------------------------------------------------------------------------- */

static CUresult initialise(unsigned int flags) {
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (atomic_load(&forked))
        return CUDA_ERROR_NOT_INITIALIZED;
    if (host_config()->devices == 0)
        return CUDA_ERROR_NO_DEVICE;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&init_lock);
    if (!host_driver_initialised()) {
        static bool watching_forks;
        if (!watching_forks)
            watching_forks = pthread_atfork(NULL, NULL, in_forked_child) == 0;
        result = host_pool_open(&host_stream_pool);
        if (result == CUDA_SUCCESS)
            result = host_pool_open(&host_event_pool);
        if (result == CUDA_SUCCESS) {
            atomic_store_explicit(&initialised, true, memory_order_release);
            host_attend(HOST_ATTEND_INIT, false);
        }
    }
    pthread_mutex_unlock(&init_lock);
    return result;
}

CUresult host_driver_initialise(void) {
    return HOST_LIKELY(host_driver_initialised()) ? CUDA_SUCCESS : initialise(0);
}

CUresult cuInit(unsigned int flags) {
    CUresult result = host_enter("cuInit", HOST_NEEDS_NOTHING);
    if (result == CUDA_SUCCESS)
        result = initialise(flags);
    return host_leave("cuInit", NULL, NULL, result);
}

CUresult cuDriverGetVersion(int *version) {
    CUresult result = host_enter("cuDriverGetVersion", HOST_NEEDS_NOTHING);
    if (result == CUDA_SUCCESS && version == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *version = HOST_DRIVER_VERSION;
    return host_leave("cuDriverGetVersion", NULL, NULL, result);
}
