/* Host functions: called by the stream's worker, never by a poller, and not at all once the context failed.
 */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>

typedef struct {
    host_work_t work;
    CUhostFn function;
    void *argument;
} function_work_t;

static host_progress_t step(host_work_t *work) {
    function_work_t *call = (function_work_t *)work;
    host_fault_t fault = host_fault_take("host_function", "cuLaunchHostFunc", -1);
    if (fault.kind == HOST_FAULT_SKIP)
        return HOST_DONE;
    if (fault.kind == HOST_FAULT_DELAY)
        host_nap_ns(fault.ns);
    bool locked = host_config()->temper == HOST_GPULIKE;
    if (locked)
        host_driver_lock();
    host_thread.inside_function = true;
    call->function(call->argument);
    host_thread.inside_function = false;
    if (locked)
        host_driver_unlock();
    return HOST_DONE;
}

static void release(host_work_t *work) {
    free(work);
}

static host_work_t *again(const host_work_t *work) {
    return host_work_copy(work, sizeof(function_work_t));
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn fn, void *userData) {
    CUresult result = host_enter("cuLaunchHostFunc", HOST_NEEDS_CONTEXT);
    function_work_t *call = NULL;
    if (result == CUDA_SUCCESS && fn == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && (call = calloc(1, sizeof *call)) == NULL)
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS) {
        call->work =
            (host_work_t){.step = step, .release = release, .again = again, .kind = HOST_WORK_HOST_FUNCTION};
        call->function = fn;
        call->argument = userData;
        result = host_stream_submit(stream, &call->work);
        if (result != CUDA_SUCCESS)
            free(call);
    }
    return host_leave("cuLaunchHostFunc", stream, userData, result);
}
