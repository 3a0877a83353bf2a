from pynccl._native.issue cimport Issuer, call_t
from pynccl._native.view cimport view_t
from pynccl._native.work cimport Work

cdef int set_up(
    call_t *call, int kind, object stream, bint sync, object timeout, bint timed, bint pack,
    object config,
) except -1
cdef int rank_in_range(Operations comm, object rank, str name) except -1
cdef int writable(view_t *view, str name) except -1
cdef int apart(int kind, view_t *send, view_t *recv, size_t first) except -1

cdef class Operations(Issuer):
    cdef Work run(
        self, call_t *call, object x, object out, object op, bint receives, bint stack
    )
    cdef object compact(self, call_t *call, object array, str name, bint reads, bint writes)
    cdef Work take(self, call_t *call, object out, str name)
