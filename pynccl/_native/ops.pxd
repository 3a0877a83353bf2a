from pynccl._native.issue cimport Issuer
from pynccl._native.view cimport view_t
from pynccl._native.work cimport Work

cdef class Operations(Issuer):
    cdef Work like(
        self, int kind, object x, view_t *send, object keep, object out, int redop, int root,
        bint receives, object stream, bint timed, object timeout,
    )
