from pynccl._native.exchange cimport order_t
from pynccl._native.handles cimport CommHandle
from pynccl._native.view cimport view_t

cdef object view_of(
    object array, view_t *view, CommHandle comm, order_t *order, str name
)
