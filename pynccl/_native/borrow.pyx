"""Arrays at the door: any array library's object as a pointer, a count and a type.

The producer's memory is borrowed, and what is returned keeps it: the array itself, its buffer's
memoryview or its DLPack capsule. The ways in are tried from the fastest to the plainest:
pynccl's and NumPy's own types, DLPack's C exchange API, ``__dlpack__``,
``__cuda_array_interface__``, the buffer protocol.
"""

from cpython.buffer cimport (
    PyBUF_FORMAT,
    PyBUF_STRIDES,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from libc.stdint cimport int64_t

from pynccl._native.abi cimport (
    CU_MEMORYTYPE_HOST,
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    CUDA_SUCCESS,
    CUdeviceptr,
    CUresult,
    kDLBool,
    kDLComplex,
    kDLCPU,
    kDLCUDA,
    kDLCUDAHost,
    kDLCUDAManaged,
    kDLFloat,
    kDLInt,
    kDLUInt,
)
from pynccl._native.exchange cimport (
    BY_CUDA,
    BY_DLPACK,
    BY_NDARRAY,
    BY_TABLE,
    Door,
    add_producer,
    current_stream,
    door_of,
    from_capsule,
    from_table,
    order_t,
)
from pynccl._native.handles cimport CommHandle
from pynccl._native.memory cimport Array
from pynccl._native.view cimport (
    ADDED,
    KIND_OPAQUE,
    code_of,
    from_tensor,
    kind_of_format,
    strided,
    view_t,
)

import sys

import numpy

from pynccl.errors import InvalidBufferError

cdef object ndarray = numpy.ndarray


# ---- host memory -----------------------------------------------------------------------------

cdef int no_objects(object array, str name) except -1:
    """Refuse pointers to Python objects: noise to another process, poison to this one."""
    dtype = array.dtype if isinstance(array, ndarray) else numpy.asarray(array).dtype
    if dtype.hasobject:
        raise InvalidBufferError(f"{name} has dtype {dtype}, whose elements are Python objects")
    return 0


cdef object from_buffer(object array, view_t *view, str name):
    """The buffer protocol: NumPy's own arrays and whatever else is plain host memory."""
    cdef Py_buffer buffer
    cdef int64_t expected
    cdef int axis
    PyObject_GetBuffer(array, &buffer, PyBUF_STRIDES | PyBUF_FORMAT)
    try:
        expected = buffer.itemsize
        if buffer.len and buffer.strides != NULL:  # ctypes gives none: contiguous
            for axis in range(buffer.ndim - 1, -1, -1):
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
        view.device_type = kDLCPU
        view.device_id = 0
        view.ndim = buffer.ndim
        view.first = buffer.shape[0] if buffer.ndim else 1
        view.readonly = buffer.readonly
    finally:
        PyBuffer_Release(&buffer)
    if view.kind == KIND_OPAQUE:
        no_objects(array, name)
    # An ndarray keeps its memory while it lives; other exporters may move it unless an export
    # is held.
    return array if isinstance(array, ndarray) else memoryview(array)


cdef object from_ndarray(object array, view_t *view, str name):
    """NumPy's arrays, with those types too that have no buffer format (bfloat16, float8)."""
    try:
        return from_buffer(array, view, name)
    except (ValueError, BufferError) as error:
        if isinstance(error, InvalidBufferError):
            raise
    dtype = array.dtype
    no_objects(array, name)
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


# ---- the CUDA array interface ----------------------------------------------------------------

cdef str NATIVE = "|=<" if sys.byteorder == "little" else "|=>"
cdef dict LETTERS = {
    "f": kDLFloat, "i": kDLInt, "u": kDLUInt, "c": kDLComplex, "b": kDLBool,
}


cdef int where_is(CommHandle comm, size_t address, view_t *view) except -1:
    """The device of an address, by the driver, as DLPack spells it; type 0 if it has none."""
    cdef int ordinal = 0
    cdef unsigned int kind = 0
    cdef CUresult result
    with nogil:
        result = comm.engine.c.cuda.cuPointerGetAttribute(
            &kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, <CUdeviceptr>address)
        if result == CUDA_SUCCESS:
            result = comm.engine.c.cuda.cuPointerGetAttribute(
                &ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, <CUdeviceptr>address)
    view.device_type = 0
    if result == CUDA_SUCCESS:
        if not comm.engine.is_cuda:
            view.device_type = kDLCPU
        else:
            view.device_type = kDLCUDAHost if kind == CU_MEMORYTYPE_HOST else kDLCUDA
        view.device_id = ordinal
    return 0


cdef object from_cuda(object array, view_t *view, CommHandle comm, order_t *order, str name):
    """``__cuda_array_interface__``, versions 0 to 3."""
    cdef int64_t count = 1, expected, length
    try:
        fields = dict(array.__cuda_array_interface__)
        version = int(fields["version"])
        shape = tuple([int(length) for length in fields["shape"]])
        address, readonly = fields["data"]
        text = str(fields["typestr"])
        # Characters are of four bytes, dates have a unit behind.
        view.itemsize = int(text[2:].partition("[")[0]) * (4 if text[1] == "U" else 1)
        steps = fields.get("strides")
        stream = fields.get("stream")
    except Exception as error:
        raise InvalidBufferError(
            f"{name}: {type(array).__name__} has no good __cuda_array_interface__: {error!r}"
        ) from error
    if version > 3:
        raise InvalidBufferError(
            f"{name} has version {version} of the CUDA array interface, expected 0 to 3"
        )
    if fields.get("mask") is not None:
        raise InvalidBufferError(f"{name} is masked; pass an array without a mask")
    expected = view.itemsize
    for length in shape:
        count *= length
    if steps is not None and count:
        for length, step in zip(reversed(shape), reversed(tuple(steps))):
            if length != 1 and step != expected:
                strided(name, shape, tuple([s // view.itemsize for s in steps]), "elements")
            expected *= length
    view.data = <void *><size_t>(address or 0)
    view.count = count
    view.bits = <int>(8 * view.itemsize)
    view.ndim = len(shape)
    view.first = shape[0] if shape else 1
    view.readonly = bool(readonly)
    # The interface has no letters for bfloat16 and float8, but its dtype may have a name.
    view.kind = ADDED.get(getattr(getattr(array, "dtype", None), "name", ""), KIND_OPAQUE)
    if view.kind == KIND_OPAQUE and text[0] in NATIVE:
        view.kind = LETTERS.get(text[1], KIND_OPAQUE)
    if text[1] in "Ot":
        raise InvalidBufferError(f"{name} has elements of type {text}, which cannot be moved")
    view.dtype = code_of(view.kind, view.bits)
    view.device_type = kDLCUDA
    view.device_id = comm.device_ordinal
    if count:
        where_is(comm, <size_t>view.data, view)
    if view.device_type == 0:
        raise InvalidBufferError(
            f"{name} at {<size_t>view.data:#x} is no memory of the {comm.engine.name} engine's "
            "devices"
        )
    if stream is not None and comm.engine.is_cuda:
        if type(stream) is not int or stream <= 0:
            raise InvalidBufferError(
                f"{name} has stream {stream!r} in its CUDA array interface, expected None, 1, "
                "2 or a handle"
            )
        add_producer(order, stream, name)
    return array


# ---- the door --------------------------------------------------------------------------------

cdef int at_home(view_t *view, CommHandle comm, str name) except -1:
    """Refuse memory that is not where the communicator is."""
    if comm.engine.is_cuda:
        # Managed memory is on no device in particular; DLPack gives it number 0.
        if view.device_type == kDLCUDAManaged:
            return 0
        if view.device_type == kDLCUDA:
            if view.device_id == comm.device_ordinal:
                return 0
            raise InvalidBufferError(
                f"{name} is on cuda:{view.device_id}, this communicator is on "
                f"cuda:{comm.device_ordinal}"
            )
        if view.device_type in (kDLCPU, kDLCUDAHost):
            raise InvalidBufferError(
                f"{name} is in host memory, but this communicator is on a CUDA device; "
                'move the array there, or make the communicator with device="cpu"'
            )
        raise InvalidBufferError(
            f"{name} is on DLPack device type {view.device_type}, this communicator is on "
            f"cuda:{comm.device_ordinal}"
        )
    if view.device_type not in (kDLCPU, kDLCUDAHost):
        raise InvalidBufferError(
            f"{name} is on a device (DLPack device type {view.device_type}), but this "
            "communicator is on the host engine; use a host array, or make the communicator "
            'with device="cuda:..."'
        )
    return 0


cdef object from_own(Array array, view_t *view, CommHandle comm, order_t *order, str name):
    """pynccl's own, which knows its device also on the host engine."""
    if array.engine is not comm.engine or array.device_ordinal != comm.device_ordinal:
        raise InvalidBufferError(
            f"{name} is on {array.device}, this communicator is on {comm.engine.name} device "
            f"{comm.device_ordinal}"
        )
    from_tensor(&array.tensor, 0, view, name)
    # It has no stream: the legacy default one is where others work on it unless told otherwise.
    if order.on_gpu and order.sync:
        add_producer(order, 1, name)
    return array


cdef object by_door(object array, view_t *view, CommHandle comm, order_t *order, str name):
    """Any type but NumPy's own."""
    cdef Door door = door_of(type(array))
    cdef size_t stream
    if door.way == BY_TABLE:
        keep = from_table(door, array, view, name)
    elif door.way == BY_DLPACK:
        keep = from_capsule(door, array, view, comm, order, name)
    elif door.way == BY_NDARRAY:
        if door.is_masked and array.mask.any():
            raise InvalidBufferError(f"{name} is masked; pass {name}.filled()")
        keep = from_ndarray(array, view, name)
    elif door.way == BY_CUDA or hasattr(array, "__cuda_array_interface__"):
        keep = from_cuda(array, view, comm, order, name)
    else:
        try:
            keep = from_buffer(array, view, name)
        except TypeError:
            raise InvalidBufferError(
                f"{name} must be an array with DLPack or the buffer protocol, "
                f"not {type(array).__name__}"
            ) from None
    view.fresh_result = door.is_jax
    view.readonly = view.readonly or door.is_jax
    at_home(view, comm, name)
    if order.on_gpu and order.sync:
        if current_stream(door, array, comm.device_ordinal, &stream):
            add_producer(order, stream, name)
    return keep


cdef object view_of(
    object array, view_t *view, CommHandle comm, order_t *order, str name
):
    """Fill `view`, and return what keeps the memory alive.

    Raises:
        InvalidBufferError: it is no array, or not contiguous, or on the wrong kind of device.
    """
    view.fresh_result = False
    if type(array) is Array:
        return from_own(array, view, comm, order, name)
    if type(array) is not ndarray:
        return by_door(array, view, comm, order, name)
    keep = from_ndarray(array, view, name)
    at_home(view, comm, name)
    return keep
