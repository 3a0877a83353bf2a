from pynccl._native.abi cimport CUevent, CUresult, pn_device_t
from pynccl._native.engine cimport Engine

cdef class DeviceObject:
    cdef pn_device_t *device
    cdef readonly Engine engine
    cdef readonly int device_ordinal
    cdef int on(self, Engine engine, int ordinal) except -1
    cdef int usable(self) except -1
    cdef int check(self, CUresult result, str function) except -1

cdef class EventHandle(DeviceObject):
    cdef CUevent c
    cdef bint owned
    cdef readonly bint timing
