from libc.stdint cimport int64_t, uint8_t, uint64_t

from pynccl._native.abi cimport DLTensor

cdef enum:
    KIND_OPAQUE = 255       # elements of a kind that DLPack has no code for: bytes

# An array as plain C fields; `keep` (held by the caller beside it) owns the memory.
cdef struct view_t:
    void *data
    size_t count        # elements
    size_t itemsize     # bytes of one element
    int dtype           # ncclDataType_t, or -1: a type that can be moved but not reduced
    uint8_t kind        # DLDataTypeCode, or KIND_OPAQUE
    int bits            # of one element
    int device_type     # DLDeviceType
    int device_id
    int ndim
    int64_t first       # length of axis 0; 1 for a 0-d array
    bint readonly
    bint fresh_result   # immutable or foreign: results go to a new array even where they fit

cdef dict ADDED
cdef str dtype_name(int code)
cdef str dtype_of(object array, view_t *view)
cdef int code_of(uint8_t kind, int bits) noexcept nogil
cdef uint8_t kind_of_format(const char *text) noexcept nogil
cdef int strided(str name, tuple shape, tuple strides, str unit) except -1
cdef int from_tensor(DLTensor *tensor, uint64_t flags, view_t *view, str name) except -1
