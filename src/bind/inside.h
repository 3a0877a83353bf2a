/* One driver call each, between pn_enter and pn_leave (inside.c). */
#ifndef PYNCCL_BIND_INSIDE_H
#define PYNCCL_BIND_INSIDE_H

#include "bind.h"

CUresult pn_stream_destroy(pn_device_t *device, CUstream stream);
CUresult pn_stream_query(pn_device_t *device, CUstream stream);
CUresult pn_stream_wait(pn_device_t *device, CUstream stream, CUevent event);
CUresult pn_event_create(pn_device_t *device, CUevent *event, unsigned int flags);
CUresult pn_event_destroy(pn_device_t *device, CUevent event);
CUresult pn_event_record(pn_device_t *device, CUevent event, CUstream stream);
CUresult pn_event_query(pn_device_t *device, CUevent event);
CUresult pn_event_elapsed(pn_device_t *device, float *milliseconds, CUevent since, CUevent until);

#endif
