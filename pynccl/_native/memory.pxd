from libc.stdint cimport int64_t

from pynccl._native.abi cimport (
    DLPackExchangeAPI,
    DLTensor,
    pn_device_t,
    pn_memory_kind_t,
    pn_memory_t,
)
from pynccl._native.engine cimport Engine

cdef class Array:
    cdef pn_memory_t *memory
    cdef DLTensor tensor        # its shape and strides, in elements, lie in `extent`
    cdef int64_t *extent
    cdef Engine engine
    cdef int device_ordinal
    cdef str type_text
    cdef object __weakref__
    cdef int order_before(self, object stream) except -1
    cdef Array like(self, tuple shape)
    cdef Array copied(self)

cdef Array allocate(
    Engine engine, pn_device_t *device, tuple shape, str dtype, pn_memory_kind_t kind
)
cdef Array shaped(Engine engine, int ordinal, tuple shape, str dtype)

# The table of DLPack's C exchange API: filled by dlpack_table.pyx.
cdef DLPackExchangeAPI exchange
# The engines on which memory was made last: of the host's kind, and of the GPU's.
cdef dict last_engines
