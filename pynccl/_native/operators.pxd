from pynccl._native.abi cimport pn_operator_t
from pynccl._native.handles cimport CommHandle, CommRecord
from pynccl._native.view cimport view_t

cdef class PreMulSum:
    cdef pn_operator_t *c       # NULL: destroyed
    cdef CommRecord record      # of the communicator that it serves
    cdef object comm_seen       # a weak reference to it: what has failed may hold us
    cdef str type_text
    cdef object scalar_kept     # what holds a scalar in device memory
    cdef int usable(self) except -1
    cdef int code_for(
        self, CommHandle comm, int datatype, object array, view_t *view
    ) except -1
    cdef object look(self, CommHandle comm, object scalar, view_t *view)
