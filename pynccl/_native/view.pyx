"""What the door lets in: a pointer, a count and a type, and the checks that all arrays share.

Elements that have a code of their own in DLPack keep it; every other fixed-size element is a
number of bytes. What is refused is refused with the shape and the cure.
"""

from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint64_t

from pynccl._native.abi cimport (
    DLPACK_FLAG_BITMASK_IS_COPIED,
    DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED,
    DLPACK_FLAG_BITMASK_READ_ONLY,
    DLTensor,
    kDLBfloat,
    kDLBool,
    kDLComplex,
    kDLFloat,
    kDLFloat4_e2m1fn,
    kDLFloat6_e2m3fn,
    kDLFloat6_e3m2fn,
    kDLFloat8_e3m4,
    kDLFloat8_e4m3,
    kDLFloat8_e4m3b11fnuz,
    kDLFloat8_e4m3fn,
    kDLFloat8_e4m3fnuz,
    kDLFloat8_e5m2,
    kDLFloat8_e5m2fnuz,
    kDLFloat8_e8m0fnu,
    kDLInt,
    kDLOpaqueHandle,
    kDLUInt,
)

import sys

from pynccl.errors import InvalidBufferError
from pynccl.types import DTYPES

cdef char NATIVE = c"<" if sys.byteorder == "little" else c">"
cdef tuple NAMES = tuple(DTYPES)
# DLPack type codes by what they are called: with the bits behind, and without.
cdef dict FAMILIES = {
    kDLInt: "int",
    kDLUInt: "uint",
    kDLFloat: "float",
    kDLBfloat: "bfloat",
    kDLComplex: "complex",
}
cdef dict KINDS = {
    kDLBool: "bool",
    kDLFloat8_e3m4: "float8_e3m4",
    kDLFloat8_e4m3: "float8_e4m3",
    kDLFloat8_e4m3b11fnuz: "float8_e4m3b11fnuz",
    kDLFloat8_e4m3fn: "float8_e4m3fn",
    kDLFloat8_e4m3fnuz: "float8_e4m3fnuz",
    kDLFloat8_e5m2: "float8_e5m2",
    kDLFloat8_e5m2fnuz: "float8_e5m2fnuz",
    kDLFloat8_e8m0fnu: "float8_e8m0fnu",
    kDLFloat6_e2m3fn: "float6_e2m3fn",
    kDLFloat6_e3m2fn: "float6_e3m2fn",
    kDLFloat4_e2m1fn: "float4_e2m1fn",
}
# NumPy's names of the types that other packages have added to it. Those of less than a byte are
# not here: NumPy keeps each in a byte of its own.
cdef dict ADDED = {
    "bfloat16": kDLBfloat,
    **{name: kind for kind, name in KINDS.items() if name.startswith("float8")},
}


cdef str dtype_name(int code):
    return NAMES[code] if 0 <= code < len(NAMES) else "bytes"


cdef int code_of(uint8_t kind, int bits) noexcept nogil:
    """The ncclDataType_t of a DLPack type with one lane, or -1."""
    if kind == kDLFloat:
        return 7 if bits == 32 else 6 if bits == 16 else 8 if bits == 64 else -1
    if kind == kDLInt:
        return 2 if bits == 32 else 4 if bits == 64 else 0 if bits == 8 else -1
    if kind == kDLUInt:
        return 1 if bits == 8 else 3 if bits == 32 else 5 if bits == 64 else -1
    if kind == kDLBfloat:
        return 9 if bits == 16 else -1
    if kind == kDLFloat8_e4m3fn:
        return 10 if bits == 8 else -1
    if kind == kDLFloat8_e5m2:
        return 11 if bits == 8 else -1
    return -1


cdef uint8_t kind_of_format(const char *text) noexcept nogil:
    """The DLPack type code of a buffer protocol format with one element in native order."""
    cdef bint pair
    if text[0] == c"@" or text[0] == c"=" or text[0] == NATIVE:
        text += 1
    pair = text[0] == c"Z"
    if pair:
        text += 1
    if text[0] == 0 or text[1] != 0:
        return KIND_OPAQUE
    if text[0] in (c"e", c"f", c"d", c"g"):
        return kDLComplex if pair else kDLFloat
    if pair:
        return KIND_OPAQUE
    if text[0] in (c"b", c"h", c"i", c"l", c"q", c"n"):
        return kDLInt
    if text[0] in (c"B", c"H", c"I", c"L", c"Q", c"N"):
        return kDLUInt
    return kDLBool if text[0] == c"?" else KIND_OPAQUE


cdef str dtype_of(object array, view_t *view):
    """The dtype of an array in words, also where NCCL has none."""
    if view.kind in KINDS:
        return KINDS[view.kind]
    if view.kind in FAMILIES:
        return f"{FAMILIES[view.kind]}{view.bits}"
    if view.kind != KIND_OPAQUE:
        return f"DLPack type code {view.kind} of {view.bits} bits"
    dtype = getattr(array, "dtype", None)
    if dtype is not None:
        return str(dtype)
    try:
        return f"buffer format {memoryview(array).format!r}"
    except TypeError:
        return f"a dtype of {view.itemsize} bytes"


cdef int strided(str name, tuple shape, tuple strides, str unit) except -1:
    """Say which axis breaks C order."""
    expected, axis = 1, 0
    for axis in range(len(shape) - 1, -1, -1):
        if shape[axis] != 1 and strides[axis] != expected:
            break
        expected *= shape[axis]
    raise InvalidBufferError(
        f"{name} must be contiguous in C order, but axis {axis} of shape {shape} has a stride "
        f"of {strides[axis]} {unit} where {expected} is expected; pass a contiguous copy, or "
        "pack=True"
    )


cdef int malformed(DLTensor *tensor, str name) except -1:
    raise InvalidBufferError(
        f"{name} is no DLPack tensor: {tensor.ndim} axes, with a negative length, more "
        "elements than can be counted, or no memory"
    )


cdef int odd_elements(
    DLTensor *tensor, uint64_t flags, int64_t count, view_t *view, str name
) except -1:
    """Elements of less than a byte: padded to one each, or packed into rows of whole bytes."""
    cdef int bits = tensor.dtype.bits * tensor.dtype.lanes
    cdef int64_t row
    view.kind = KIND_OPAQUE
    view.bits = 8
    view.itemsize = 1
    view.dtype = -1
    cdef bint handles = tensor.dtype.code == kDLOpaqueHandle
    if not handles and 0 < bits < 8 and flags & DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED:
        view.count = count
        return 0
    if not handles and bits % 8 and tensor.ndim:
        # Eight elements are whole bytes, whatever their size. What is dealt out to ranks by
        # its first axis must be dealt in whole bytes, too.
        row = count // tensor.shape[0] if count else 0
        if (count % 8) * bits % 8 == 0 and ((row % 8) * bits % 8 == 0 or tensor.ndim == 1):
            view.count = count // 8 * bits + count % 8 * bits // 8
            if tensor.ndim == 1:
                view.first = view.count
            return 0
    raise InvalidBufferError(
        f"{name} has elements of {tensor.dtype.bits} bits in {tensor.dtype.lanes} lanes "
        f"(DLPack type code {tensor.dtype.code}); expected whole bytes, or rows of whole bytes"
    )


cdef int from_tensor(DLTensor *tensor, uint64_t flags, view_t *view, str name) except -1:
    """Take over a tensor's fields; `flags` are those of a versioned capsule."""
    cdef int64_t count = 1, expected = 1, length
    cdef int axis
    cdef int bits = tensor.dtype.bits * tensor.dtype.lanes
    if tensor.ndim < 0 or (tensor.ndim and tensor.shape == NULL):
        malformed(tensor, name)
    for axis in range(tensor.ndim):
        length = tensor.shape[axis]
        if length < 0 or (length > 1 and count > INT64_MAX // length):
            malformed(tensor, name)
        count *= length
    if (tensor.data == NULL and count) or count >> 41:
        malformed(tensor, name)
    if flags & DLPACK_FLAG_BITMASK_IS_COPIED:
        raise InvalidBufferError(
            f"{name} was exported as a copy, although its library was asked not to copy"
        )
    if tensor.strides != NULL and count:
        for axis in range(tensor.ndim - 1, -1, -1):
            if tensor.shape[axis] != 1 and tensor.strides[axis] != expected:
                strided(name, tuple([tensor.shape[i] for i in range(tensor.ndim)]),
                        tuple([tensor.strides[i] for i in range(tensor.ndim)]), "elements")
            expected *= tensor.shape[axis]
    view.data = <char *>tensor.data + tensor.byte_offset
    view.device_type = tensor.device.device_type
    view.device_id = tensor.device.device_id
    view.ndim = tensor.ndim
    view.first = tensor.shape[0] if tensor.ndim else 1
    view.readonly = (flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0
    if bits == 0 or bits % 8 or tensor.dtype.code == kDLOpaqueHandle:
        return odd_elements(tensor, flags, count, view, name)
    view.count = count
    view.itemsize = bits // 8
    view.bits = bits
    # Several lanes make one element, which has no code.
    view.kind = tensor.dtype.code if tensor.dtype.lanes == 1 else KIND_OPAQUE
    view.dtype = code_of(view.kind, bits)
    return 0
