from libc.stdint cimport int64_t

from pynccl._native.abi cimport pn_mailbox_t, pn_op_t, pn_wait_t

cdef class Operation:
    cdef pn_op_t c
    cdef object keep
    cdef list waits         # pairs of (Reactor, futures), while it has not ended
    cdef int failed(self) except -1
    cdef int asked(self) except -1
    cdef int ended(self) except -1
    cdef int parted(self) except -1

cdef class Reactor:
    cdef pn_mailbox_t *box
    cdef object loop         # a weak reference
    cdef Py_ssize_t waiting  # waits that are addressed to its mailbox, or lie in it
    cdef object __weakref__
    cdef int drain_box(self) except -1
    cdef int deliver_all(self, pn_wait_t **waits, object loop) except -1
    cdef int tell(self, object loop, tuple token) except -1

cdef int drain_done() except -1
cdef bint gives_way(int64_t now) except -1
cdef Reactor reactor_of(object loop)
