from libc.stdint cimport int64_t

from pynccl._native.abi cimport pn_comm_t
from pynccl._native.engine cimport Engine

cdef class CommRecord:
    cdef pn_comm_t *c
    cdef Engine engine
    cdef object home            # a weak reference to the loop that made it, or None
    cdef bint failure_seen      # somebody has been told
    cdef str state(self)
    cdef object failure_exception(self)

cdef class CommHandle:
    cdef pn_comm_t *c
    cdef CommRecord record
    cdef readonly Engine engine
    cdef readonly int device_ordinal
    cdef int64_t timeout_ns
    cdef int64_t spin_ns
    cdef dict leases   # what is registered: see register.pyx
    cdef object __weakref__
    cdef int settle_here(self) except -1
    cdef int usable(self) except -1

cdef int refuse_fork() except -1
cdef object default_timeout_ns()


cdef class Unseen:
    cdef object error
    cdef str what
    cdef CommRecord record
    cdef bint follows       # it went with its communicator

cdef Unseen unseen_of(CommRecord record, str what, object error)
