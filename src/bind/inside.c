/* One driver call each, made with the device's context current. */
#include "inside.h"

#define INSIDE(name, call, ...)                                                                              \
    CUresult name(pn_device_t *device, __VA_ARGS__) {                                                        \
        pn_enter_t saved;                                                                                    \
        CUresult result = pn_enter(device, &saved);                                                          \
        if (result == CUDA_SUCCESS) {                                                                        \
            result = device->engine->cuda.call;                                                              \
            pn_leave(device, &saved);                                                                        \
        }                                                                                                    \
        return result;                                                                                       \
    }

INSIDE(pn_stream_destroy, cuStreamDestroy_v2(stream), CUstream stream)
INSIDE(pn_stream_query, cuStreamQuery(stream), CUstream stream)
INSIDE(pn_stream_wait, cuStreamWaitEvent(stream, event, 0), CUstream stream, CUevent event)
INSIDE(pn_event_create, cuEventCreate(event, flags), CUevent *event, unsigned int flags)
INSIDE(pn_event_destroy, cuEventDestroy_v2(event), CUevent event)
INSIDE(pn_event_record, cuEventRecord(event, stream), CUevent event, CUstream stream)
INSIDE(pn_event_query, cuEventQuery(event), CUevent event)
INSIDE(pn_event_elapsed, cuEventElapsedTime(milliseconds, since, until), float *milliseconds, CUevent since,
       CUevent until)
