from libc.stdint cimport int64_t

from pynccl._native.completion cimport Operation
from pynccl._native.engine cimport Engine
from pynccl._native.exchange cimport MOST_PRODUCERS
from pynccl._native.handles cimport CommHandle, CommRecord, Unseen
from pynccl._native.results cimport Ending

cdef class Work(Operation):
    cdef Engine engine
    cdef CommHandle comm    # None from its failure on
    cdef CommRecord record  # None for waits that belong to no communicator
    cdef int64_t spin_ns
    cdef object control     # the native block of a management call, or the one who answers
    cdef object result_array
    cdef Ending ending      # what is left to do for the result when the device is done
    cdef object group       # the group that records it and has not issued it yet
    cdef size_t producers[MOST_PRODUCERS]  # streams that we put in order with it
    cdef int producer_count
    cdef size_t aside       # where others have put themselves in order, if not on its stream
    cdef object timing      # two events, for a timed operation
    cdef bint seen          # somebody has been given its failure
    cdef Unseen unseen      # its failure, while nobody has asked for it
    cdef object __weakref__
    cdef bint poll(self) noexcept
    cdef object outcome(self)
    cdef object failure(self)
    cdef int submitted(self) except -1

cdef int begin_control(Work work, CommHandle comm, int kind, object timeout) except -1
cdef Work control_work(CommHandle comm, int kind, object timeout)
