from pynccl._native.handles cimport CommHandle
from pynccl._native.memory cimport Array

# What is left to do on the host, once, when an operation has ended well.
cdef class Ending:
    cdef bint late      # the result is not there, in no order of streams, before that
    cdef object result(self, object array)
    cdef int released(self) except -1

cdef class Adopted(Ending):
    cdef object made

cdef Array to_adopt(CommHandle comm, object array, tuple shape)
cdef object fresh_like(CommHandle comm, object array, tuple shape)
cdef Ending ending_of(object array)
cdef object packed(CommHandle comm, object array, bint reads)
cdef int writes_back(object scratch, object array, str name) except -1
cdef Ending unpacked(object scratch, object array)
cdef tuple shape_of(object array)
