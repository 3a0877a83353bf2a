from cpython.object cimport PyObject

from pynccl._native.abi cimport pn_one_sided_t, pn_uneven_t
from pynccl._native.exchange cimport order_t
from pynccl._native.handles cimport CommHandle
from pynccl._native.results cimport Ending
from pynccl._native.view cimport view_t
from pynccl._native.work cimport Work

cdef class Recorder:
    cdef readonly list works
    cdef object owner

# What all operations have in common. The objects are the caller's arguments, borrowed.
cdef struct call_t:
    int kind            # pn_kind_t
    int root            # or the peer
    int redop           # ncclRedOp_t
    int datatype        # ncclDataType_t, as which the elements travel
    size_t unit         # how many of these an element of the arrays is
    pn_uneven_t *uneven  # the blocks, where they are not all of one size
    PyObject *blocks    # their owner, who answers where the others are asked for theirs
    PyObject *stream
    PyObject *timeout
    PyObject *config
    bint timed
    bint pack
    pn_one_sided_t *side    # of a one-sided operation
    bint settled        # what follows is filled in, by the first array that is looked at
    size_t handle       # of the caller's stream, where there is one
    order_t order

cdef bint recording() except -1

cdef class Issuer(CommHandle):
    cdef Work start(
        self, call_t *call, view_t *send, view_t *recv, size_t count, object keep,
        object result, Ending ending,
    )
    cdef int time(self, Work work) except -1
    cdef int settle(self, call_t *call, object array) except -1
    cdef size_t stream_of(self, object stream, object array) except? 0
    cdef object look(self, call_t *call, object array, view_t *view, str name)
