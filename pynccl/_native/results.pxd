# What is left to do on the host, once, when an operation has ended well.
cdef class Ending:
    cdef bint late      # the result is not there, in no order of streams, before that
    cdef object result(self, object array)
    cdef int released(self) except -1

cdef object fresh_like(object array, tuple shape)
cdef Ending ending_of(object array)
cdef object packed(object array, bint reads)
cdef int writes_back(object scratch, object array, str name) except -1
cdef Ending unpacked(object scratch, object array)
cdef tuple shape_of(object array)
