from pynccl._native.abi cimport pn_one_sided_t
from pynccl._native.issue cimport call_t
from pynccl._native.ops cimport Operations
from pynccl._native.register cimport Lease
from pynccl._native.view cimport view_t
from pynccl._native.work cimport Work

cdef class Side:
    cdef pn_one_sided_t *c

cdef class OneSided(Operations):
    cdef Work start_side(self, call_t *call, Side side, view_t *view, object keep)
    cdef Lease window_lease(self, object window, str name)
