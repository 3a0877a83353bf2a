from pynccl._native.abi cimport DLPackExchangeAPI
from pynccl._native.handles cimport CommHandle
from pynccl._native.view cimport view_t

cdef enum:
    BY_TABLE, BY_DLPACK, BY_NDARRAY, BY_CUDA, BY_BUFFER

cdef enum:
    MOST_PRODUCERS = 4      # of an input and an output: their libraries', and those they name

# How the arrays of one type are taken: found once a type.
cdef class Door:
    cdef object type        # a weak reference, which undoes this entry
    cdef DLPackExchangeAPI *table
    cdef int way
    cdef int form           # which arguments its __dlpack__ takes
    cdef bint is_torch
    cdef bint is_jax        # its arrays are immutable
    cdef bint is_masked     # NumPy's masked arrays
    cdef str library        # the first part of its module's name

# The order between an operation and what its arrays' producers have put on their streams.
cdef struct order_t:
    bint on_gpu
    bint sync               # False: the caller sees to the order
    bint told               # a producer has ordered itself before `stream`
    size_t stream           # what producers are told: as CUDA spells it, never 0
    size_t producers[MOST_PRODUCERS]  # streams that are put in order by us, before and behind
    int count

cdef Door door_of(type cls)
cdef object from_table(Door door, object array, view_t *view, str name)
cdef object from_capsule(
    Door door, object array, view_t *view, CommHandle comm, order_t *order, str name
)
cdef bint current_stream(Door door, object array, int device, size_t *handle) except? False
cdef int add_producer(order_t *order, size_t stream, str name) except -1
