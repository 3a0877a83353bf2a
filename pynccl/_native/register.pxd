from pynccl._native.abi cimport pn_registration_t
from pynccl._native.completion cimport Operation

cdef class Lease(Operation):
    cdef pn_registration_t r
    cdef readonly int uses
    cdef readonly bint over     # nobody else may join: it has failed, or is being ended
    cdef object making          # a weak reference to the Work that makes it
