from libc.stdint cimport int64_t, uint8_t

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

cdef object view_of(object array, view_t *view, bint is_cuda, size_t stream, str name)
cdef str dtype_name(int code)
cdef str dtype_of(object array, view_t *view)
cdef bint producer_stream(object array, int device, size_t *handle) except? False
