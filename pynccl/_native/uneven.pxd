from pynccl._native.abi cimport pn_part_t, pn_uneven_t
from pynccl._native.issue cimport call_t
from pynccl._native.onesided cimport OneSided
from pynccl._native.results cimport Ending
from pynccl._native.view cimport view_t
from pynccl._native.work cimport Work

cdef class Blocks:
    cdef pn_uneven_t c
    cdef int ranks
    cdef size_t row         # elements of the arrays in a row
    cdef size_t unit        # NCCL's elements in an element of the arrays
    cdef object x
    cdef object out         # the caller's; None: a fresh array
    cdef object target      # where it is received: out, or a contiguous array in its stead
    cdef object stream      # a context on the stream of x's library
    cdef bint receives
    cdef bint sync          # whether its library's stream is waited for
    cdef bytes refusal
    cdef int lay(self, pn_part_t *side, list rows) except -1
    cdef int put(self, pn_part_t *side, int rank, size_t rows) except -1

cdef class UnevenOperations(OneSided):
    cdef Blocks rows_of(self, call_t *call, object x, object given, view_t *view, object op)
    cdef Work submit(
        self, call_t *call, Blocks blocks, object x, view_t *send, object keep, object out,
        list rows, bint receives
    )
    cdef Work join(self, call_t *call, object x, list rows, object out, bint receives)
    cdef Work take_block(self, call_t *call, object out)
