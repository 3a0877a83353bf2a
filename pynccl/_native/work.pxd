from libc.stdint cimport int64_t

from pynccl._native.completion cimport Operation
from pynccl._native.engine cimport Engine
from pynccl._native.handles cimport CommHandle

cdef class Work(Operation):
    cdef Engine engine
    cdef CommHandle comm    # None for waits that belong to no communicator
    cdef int64_t spin_ns
    cdef object source      # the caller's input array, for the type of the result
    cdef object result_array
    cdef object error       # the exception, once it has been asked for
    cdef object group       # the group that records it and has not issued it yet
    cdef object timing      # two events, for a timed operation
    cdef bint converted
    cdef object __weakref__
    cdef bint poll(self) noexcept
    cdef object outcome(self)
    cdef object failure(self)
    cdef int submitted(self) except -1

cdef Work control_work(CommHandle comm, int kind, object timeout)
