"""Arrays at the door: any array library's object as a pointer, a count and a type.

The producer's memory is borrowed: the array itself, its buffer's memoryview or its DLPack
capsule is held by the operation, and never renamed or copied. What the door refuses, it refuses
with the shape and the cure.
"""

from cpython.buffer cimport (
    PyBUF_FORMAT,
    PyBUF_STRIDES,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.stdint cimport int64_t, uint8_t

from pynccl._native.abi cimport (
    DLPACK_FLAG_BITMASK_READ_ONLY,
    DLManagedTensor,
    DLManagedTensorVersioned,
    DLPackExchangeAPI,
    DLTensor,
    kDLBfloat,
    kDLBool,
    kDLComplex,
    kDLCPU,
    kDLCUDA,
    kDLCUDAHost,
    kDLCUDAManaged,
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
    kDLUInt,
)

import sys

import numpy

from pynccl.errors import InvalidBufferError
from pynccl.types import DTYPES

cdef object ndarray = numpy.ndarray
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
# Types whose arrays nothing may write into.
cdef tuple IMMUTABLE = ("jax", "jaxlib")


cdef str dtype_name(int code):
    return NAMES[code] if 0 <= code < len(NAMES) else "bytes"


cdef inline int code_of(uint8_t kind, int bits) noexcept nogil:
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
        return 10
    if kind == kDLFloat8_e5m2:
        return 11
    return -1


cdef inline uint8_t kind_of_format(const char *text) noexcept nogil:
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
    return str(dtype) if dtype is not None else f"buffer format {memoryview(array).format!r}"


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


cdef int from_tensor(DLTensor *tensor, view_t *view, str name) except -1:
    cdef int64_t count = 1, expected = 1
    cdef int axis
    if tensor.dtype.lanes != 1 or tensor.dtype.bits % 8:
        raise InvalidBufferError(
            f"{name} has elements of {tensor.dtype.bits} bits in {tensor.dtype.lanes} lanes "
            f"(DLPack type code {tensor.dtype.code}); expected one lane of whole bytes"
        )
    for axis in range(tensor.ndim):
        count *= tensor.shape[axis]
    if tensor.strides != NULL and count:
        for axis in range(tensor.ndim - 1, -1, -1):
            if tensor.shape[axis] != 1 and tensor.strides[axis] != expected:
                strided(name, tuple([tensor.shape[i] for i in range(tensor.ndim)]),
                        tuple([tensor.strides[i] for i in range(tensor.ndim)]), "elements")
            expected *= tensor.shape[axis]
    view.data = <char *>tensor.data + tensor.byte_offset
    view.count = count
    view.itemsize = tensor.dtype.bits // 8
    view.kind = tensor.dtype.code
    view.bits = tensor.dtype.bits
    view.dtype = code_of(view.kind, view.bits)
    view.device_type = tensor.device.device_type
    view.device_id = tensor.device.device_id
    view.ndim = tensor.ndim
    view.first = tensor.shape[0] if tensor.ndim else 1
    return 0


cdef int no_objects(object array, bytes format, str name) except -1:
    """Refuse pointers to Python objects: noise to another process, poison to this one."""
    numpys = isinstance(array, ndarray)
    if array.dtype.hasobject if numpys else b"O" in format:
        kind = f"dtype {array.dtype}" if numpys else f"format {format.decode()}"
        raise InvalidBufferError(f"{name} has {kind}, whose elements are Python objects")
    return 0


cdef object from_buffer(object array, view_t *view, str name):
    """The buffer protocol: NumPy's own arrays and whatever else is plain host memory."""
    cdef Py_buffer buffer
    cdef int64_t expected
    cdef int axis
    PyObject_GetBuffer(array, &buffer, PyBUF_STRIDES | PyBUF_FORMAT)
    try:
        expected = buffer.itemsize
        if buffer.len:
            for axis in range(buffer.ndim - 1, -1, -1):
                if buffer.strides == NULL:  # as of ctypes: contiguous
                    break
                if buffer.shape[axis] != 1 and buffer.strides[axis] != expected:
                    shape = tuple([buffer.shape[i] for i in range(buffer.ndim)])
                    steps = [buffer.strides[i] // buffer.itemsize for i in range(buffer.ndim)]
                    strided(name, shape, tuple(steps), "elements")
                expected *= buffer.shape[axis]
        view.data = buffer.buf
        view.count = buffer.len // buffer.itemsize if buffer.itemsize else 0
        view.itemsize = buffer.itemsize
        view.bits = <int>(8 * buffer.itemsize)
        # A buffer without a format is of bytes.
        view.kind = kDLUInt if buffer.format == NULL else kind_of_format(buffer.format)
        view.dtype = code_of(view.kind, view.bits)
        if view.kind == KIND_OPAQUE:
            no_objects(array, buffer.format, name)
        view.device_type = kDLCPU
        view.device_id = 0
        view.ndim = buffer.ndim
        view.first = buffer.shape[0] if buffer.ndim else 1
        view.readonly = buffer.readonly
    finally:
        PyBuffer_Release(&buffer)
    # An ndarray keeps its memory while it lives; other exporters may move it unless an export
    # is held.
    return array if type(array) is ndarray else memoryview(array)


cdef object from_ndarray(object array, view_t *view, str name):
    """NumPy arrays of types without a buffer format: bfloat16 and float8 from ml_dtypes."""
    dtype = array.dtype
    no_objects(array, b"", name)
    try:
        bare = (array if array.ndim else array.reshape(1)).view(f"V{dtype.itemsize}")
    except ValueError:
        bare = None
    if bare is None or not array.flags.c_contiguous:
        steps = tuple([s // dtype.itemsize for s in array.strides])
        strided(name, array.shape, steps, "elements")
    from_buffer(bare, view, name)
    view.kind = ADDED.get(dtype.name, KIND_OPAQUE)
    view.dtype = code_of(view.kind, view.bits)
    view.ndim = array.ndim
    view.first = array.shape[0] if array.ndim else 1
    return array


# ---- DLPack ----------------------------------------------------------------------------------

# The exchange table of each type that has one, found once; types without one are remembered
# too.
cdef dict tables = {}
cdef void *last_type = NULL
cdef DLPackExchangeAPI *last_table = NULL


cdef DLPackExchangeAPI *exchange_table(type cls):
    global last_type, last_table
    cdef DLPackExchangeAPI *table = NULL
    if <void *>cls == last_type:
        return last_table
    found = tables.get(cls)
    if found is None:
        try:
            capsule = cls.__dlpack_c_exchange_api__
        except AttributeError:
            capsule = False
        if capsule is not False and PyCapsule_IsValid(capsule, b"dlpack_exchange_api"):
            table = <DLPackExchangeAPI *>PyCapsule_GetPointer(capsule, b"dlpack_exchange_api")
            # A producer of another major version may offer an older table behind its own.
            while table != NULL and table.header.version.major != 1:
                table = <DLPackExchangeAPI *>table.header.prev_api
        tables[cls] = found = capsule if table != NULL else False
    elif found is not False:
        table = <DLPackExchangeAPI *>PyCapsule_GetPointer(found, b"dlpack_exchange_api")
        while table != NULL and table.header.version.major != 1:
            table = <DLPackExchangeAPI *>table.header.prev_api
    last_type = <void *>cls
    last_table = table
    return table


cdef object from_table(DLPackExchangeAPI *table, object array, view_t *view, str name):
    """The C exchange API: the fastest way in, with fewer checks by the producer."""
    cdef DLTensor tensor
    try:
        table.dltensor_from_py_object_no_sync(<void *>array, &tensor)
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise InvalidBufferError(f"{name} cannot be taken by DLPack: {first}") from error
    from_tensor(&tensor, view, name)
    if not hasattr(array, "untyped_storage"):
        return array
    # torch keeps these two as a promise: the memory holds other values than the tensor shows.
    if array.is_neg():
        raise InvalidBufferError(f"{name} is a lazy negation; pass {name}.resolve_neg()")
    if view.dtype < 0 and array.is_conj():
        raise InvalidBufferError(f"{name} is a lazy conjugate; pass {name}.resolve_conj()")
    # A tensor can be given other storage while the operation runs (`x.data = y`).
    return array, array.untyped_storage()


cdef object from_capsule(object array, view_t *view, bint is_cuda, size_t stream, str name):
    cdef DLManagedTensorVersioned *versioned
    cdef void *held
    method = array.__dlpack__
    device_type, _ = array.__dlpack_device__()
    on_gpu = int(device_type) in (kDLCUDA, kDLCUDAManaged)
    # Host memory has no stream; on a GPU the producer orders itself before the stream of the
    # operation.
    ordering = {"stream": stream} if on_gpu and is_cuda else {}
    try:
        capsule = method(max_version=(1, 1), **ordering)
    except TypeError:
        capsule = method(**ordering)
    if PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        held = PyCapsule_GetPointer(capsule, b"dltensor_versioned")
        versioned = <DLManagedTensorVersioned *>held
        if versioned.version.major != 1:
            raise InvalidBufferError(
                f"{name} speaks DLPack {versioned.version.major}.{versioned.version.minor}, "
                "expected 1.x"
            )
        view.readonly = (versioned.flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0
        from_tensor(&versioned.dl_tensor, view, name)
    elif PyCapsule_IsValid(capsule, b"dltensor"):
        view.readonly = False
        held = PyCapsule_GetPointer(capsule, b"dltensor")
        from_tensor(&(<DLManagedTensor *>held).dl_tensor, view, name)
    else:
        raise InvalidBufferError(
            f"{name}: {type(array).__name__}.__dlpack__() gave no unused DLPack capsule"
        )
    return capsule


cdef object view_of(object array, view_t *view, bint is_cuda, size_t stream, str name):
    """Fill `view`, and return what keeps the memory alive.

    Raises:
        InvalidBufferError: it is no array, or not contiguous, or on the wrong kind of device.
    """
    cdef DLPackExchangeAPI *table
    cls = type(array)
    view.fresh_result = False
    view.readonly = False
    if cls is ndarray:
        try:
            keep = from_buffer(array, view, name)
        except (ValueError, BufferError) as error:
            if isinstance(error, InvalidBufferError):
                raise
            keep = from_ndarray(array, view, name)
    else:
        table = exchange_table(cls)
        if table != NULL:
            keep = from_table(table, array, view, name)
        elif hasattr(cls, "__dlpack__"):
            keep = from_capsule(array, view, is_cuda, stream, name)
            module = cls.__module__.partition(".")[0]
            view.fresh_result = module in IMMUTABLE
            view.readonly = view.readonly or view.fresh_result
        elif isinstance(array, ndarray):
            keep = from_ndarray(array, view, name)
        else:
            try:
                keep = from_buffer(array, view, name)
            except TypeError:
                raise InvalidBufferError(
                    f"{name} must be an array with DLPack or the buffer protocol, "
                    f"not {cls.__name__}"
                ) from None
    if is_cuda:
        if view.device_type not in (kDLCUDA, kDLCUDAManaged):
            raise InvalidBufferError(
                f"{name} is in host memory, but this communicator is on a CUDA device; "
                'move the array there, or make the communicator with device="cpu"'
            )
    elif view.device_type not in (kDLCPU, kDLCUDAHost):
        raise InvalidBufferError(
            f"{name} is on a device (DLPack device type {view.device_type}), but this "
            "communicator is on the host engine; use a host array, or make the communicator "
            'with device="cuda:..."'
        )
    return keep


cdef bint producer_stream(object array, int device, size_t *handle) except? False:
    """The current work stream of the array's library; False if that is not known.

    By __dlpack__ the producer orders itself; the C exchange API leaves it to us. NULL is the
    legacy default stream.
    """
    cdef DLPackExchangeAPI *table = exchange_table(type(array))
    cdef void *stream = NULL
    if table != NULL and table.current_work_stream != NULL:
        table.current_work_stream(kDLCUDA, device, &stream)
        handle[0] = <size_t>stream if stream != NULL else 1
        return True
    return False
