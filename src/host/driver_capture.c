/* Stream capture and graphs: not emulated yet. No stream ever captures, and whoever asks for it is told so.
 */
#define _GNU_SOURCE
#include "driver.h"

static CUresult refuse(const char *function, CUstream stream) {
    CUresult result = host_enter(function, HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS) {
        host_last_error("%s: the host engine does not capture streams", function);
        result = CUDA_ERROR_NOT_SUPPORTED;
    }
    return host_leave(function, stream, NULL, result);
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    CUresult result = host_enter("cuStreamIsCapturing", HOST_NEEDS_CONTEXT);
    CUstream found;
    if (result == CUDA_SUCCESS)
        result = status != NULL ? host_stream_resolve(stream, &found) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return host_leave("cuStreamIsCapturing", stream, NULL, result);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    CUresult result = host_enter("cuThreadExchangeStreamCaptureMode", HOST_NEEDS_INIT);
    if (result == CUDA_SUCCESS && (mode == NULL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        CUstreamCaptureMode before = host_thread.capture_mode;
        host_thread.capture_mode = *mode;
        *mode = before;
    }
    return host_leave("cuThreadExchangeStreamCaptureMode", NULL, NULL, result);
}

CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    (void)mode;
    return refuse("cuStreamBeginCapture_v2", stream);
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    (void)graph;
    return refuse("cuStreamEndCapture", stream);
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    (void)exec, (void)graph, (void)flags;
    return refuse("cuGraphInstantiateWithFlags", NULL);
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
    (void)exec;
    return refuse("cuGraphLaunch", stream);
}

CUresult cuGraphExecDestroy(CUgraphExec exec) {
    (void)exec;
    return refuse("cuGraphExecDestroy", NULL);
}

CUresult cuGraphDestroy(CUgraph graph) {
    (void)graph;
    return refuse("cuGraphDestroy", NULL);
}
