from pynccl._native.handles cimport CommHandle
from pynccl._native.work cimport Work

cdef object configured(CommHandle comm, Work work, object config)
