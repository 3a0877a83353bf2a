from pynccl._native.handles cimport CommHandle
from pynccl._native.issue cimport call_t
from pynccl._native.view cimport view_t

cdef int moved(call_t *call, view_t *view) except -1
cdef int reduced(
    call_t *call, CommHandle comm, object op, object array, view_t *view
) except -1
cdef int same_type(object x, view_t *send, object out, view_t *recv) except -1
