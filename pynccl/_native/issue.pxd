from pynccl._native.handles cimport CommHandle
from pynccl._native.view cimport view_t
from pynccl._native.work cimport Work

cdef class Recorder:
    cdef readonly list works
    cdef object owner

cdef class Issuer(CommHandle):
    cdef Work start(
        self, int kind, view_t *send, view_t *recv, size_t count, int redop, int root,
        object stream, bint timed, object timeout, object array, object keep, object result,
        bint converted,
    )
    cdef int time(self, Work work) except -1
    cdef size_t stream_of(self, object stream, object array) except? 0
    cdef object look(self, object array, view_t *view, str name)
