"""Memory of pynccl's own as arrays: what NCCL allocates, and every library can look at.

1. An Array holds one reference to its memory, as each of its slices and each view by DLPack
   does; the memory is freed natively, off every loop and without the GIL: src/bind/memory.c.
2. Exports never copy unless they are asked to. A consumer on a GPU names its stream, which is
   made to wait for the operations on the memory that have not ended; host memory has no stream,
   and holds what an operation gives when that has been awaited.
3. On a GPU the host never reads the memory; on the host engine it is ordinary memory as well.
"""

from cpython.buffer cimport PyBUF_FORMAT
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy

from pynccl._native.abi cimport (
    CUDA_SUCCESS,
    DLPACK_FLAG_BITMASK_IS_COPIED,
    PN_FROM_CUDA,
    PN_MEMORY_DRIVER,
    PN_MEMORY_HOST,
    PN_MEMORY_NCCL,
    CUresult,
    CUstream,
    DLManagedTensor,
    DLManagedTensorVersioned,
    kDLBfloat,
    kDLBool,
    kDLComplex,
    kDLCPU,
    kDLCUDA,
    kDLFloat,
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
    pn_device_t,
    pn_memory_drop,
    pn_memory_hold,
    pn_memory_kind_t,
    pn_memory_new,
    pn_memory_pending,
    pn_memory_serve,
    pn_memory_stop,
    pn_memory_view,
    pn_memory_view_unversioned,
    pn_op_order,
    pn_op_t,
    pn_outcome_t,
)
from pynccl._native.engine cimport Engine, cuda_exception, nccl_exception
from pynccl._native.handles cimport refuse_fork

import atexit

import numpy

from pynccl.errors import ConfigError

# ---- element types ---------------------------------------------------------------------------

# Name to DLPack's code and bits, and the buffer protocol's format where it has one.
TYPES = {
    "bool": (kDLBool, 8, b"?"),
    "int8": (kDLInt, 8, b"b"),
    "int16": (kDLInt, 16, b"h"),
    "int32": (kDLInt, 32, b"i"),
    "int64": (kDLInt, 64, b"q"),
    "uint8": (kDLUInt, 8, b"B"),
    "uint16": (kDLUInt, 16, b"H"),
    "uint32": (kDLUInt, 32, b"I"),
    "uint64": (kDLUInt, 64, b"Q"),
    "float16": (kDLFloat, 16, b"e"),
    "float32": (kDLFloat, 32, b"f"),
    "float64": (kDLFloat, 64, b"d"),
    "complex64": (kDLComplex, 64, b"Zf"),
    "complex128": (kDLComplex, 128, b"Zd"),
    "bfloat16": (kDLBfloat, 16, None),
    "float8_e3m4": (kDLFloat8_e3m4, 8, None),
    "float8_e4m3": (kDLFloat8_e4m3, 8, None),
    "float8_e4m3b11fnuz": (kDLFloat8_e4m3b11fnuz, 8, None),
    "float8_e4m3fn": (kDLFloat8_e4m3fn, 8, None),
    "float8_e4m3fnuz": (kDLFloat8_e4m3fnuz, 8, None),
    "float8_e5m2": (kDLFloat8_e5m2, 8, None),
    "float8_e5m2fnuz": (kDLFloat8_e5m2fnuz, 8, None),
    "float8_e8m0fnu": (kDLFloat8_e8m0fnu, 8, None),
}


def type_name(dtype):
    """The name of a data type, given as a name or as NumPy, ml_dtypes, JAX or torch have it.

    Raises:
        ConfigError: arrays of pynccl have no such type.
    """
    name = str(dtype)
    if name not in TYPES:
        name = name.removeprefix("torch.")
    if name not in TYPES:
        try:
            name = numpy.dtype(dtype).name
        except TypeError:
            name = ""
    if name not in TYPES:
        raise ConfigError(f"dtype must be one of {', '.join(TYPES)}, not {dtype!r}")
    return name


# ---- making ----------------------------------------------------------------------------------

last_engines = {}
cdef bint stops_at_exit = False


def stop():
    """Free no more memory; at exit."""
    with nogil:
        pn_memory_stop()


cdef Array shaped(Engine engine, int ordinal, tuple shape, str dtype):
    """An Array without memory yet."""
    cdef Array made = Array.__new__(Array)
    cdef int ndim = len(shape), axis
    cdef int64_t stride = 1
    code, bits, _ = TYPES[dtype]
    # Three rows: the shape, the strides in elements, and in bytes for the buffer protocol.
    made.extent = <int64_t *>PyMem_Malloc(3 * max(ndim, 1) * sizeof(int64_t))
    if made.extent == NULL:
        raise MemoryError
    for axis in range(ndim - 1, -1, -1):
        made.extent[axis] = shape[axis]
        made.extent[ndim + axis] = stride
        made.extent[2 * ndim + axis] = stride * (bits // 8)
        stride *= max(<int64_t>shape[axis], 1)
    made.engine = engine
    made.device_ordinal = ordinal
    made.type_text = dtype
    made.tensor.device.device_type = kDLCUDA if engine.is_cuda else kDLCPU
    made.tensor.device.device_id = ordinal if engine.is_cuda else 0
    made.tensor.ndim = ndim
    made.tensor.dtype.code = code
    made.tensor.dtype.bits = bits
    made.tensor.dtype.lanes = 1
    made.tensor.shape = made.extent
    made.tensor.strides = made.extent + ndim
    return made


cdef Array allocate(
    Engine engine, pn_device_t *device, tuple shape, str dtype, pn_memory_kind_t kind
):
    """An uninitialised Array of a checked shape and type on a device of the engine."""
    global stops_at_exit
    cdef pn_outcome_t why
    cdef const char *detail
    cdef int ordinal = device.ordinal
    if kind == PN_MEMORY_NCCL:
        engine.require("ncclMemAlloc")
        engine.require("ncclMemFree")
    count = 1
    for length in shape:
        count *= length
    nbytes = count * (TYPES[dtype][1] // 8)
    if nbytes >= 2**63:
        raise ConfigError(f"an array of shape {shape} and {dtype} has {nbytes} bytes")
    cdef Array made = shaped(engine, ordinal, shape, dtype)
    cdef size_t wanted = nbytes
    if kind == PN_MEMORY_HOST:
        made.memory = pn_memory_new(device, wanted, kind, &why)
    else:
        with nogil:
            made.memory = pn_memory_new(device, wanted, kind, &why)
    if made.memory == NULL and kind == PN_MEMORY_HOST:
        raise MemoryError(f"{nbytes} bytes for an array")
    if made.memory == NULL:
        what = f"{nbytes} bytes on {engine.name} device {ordinal}"
        if why.source == PN_FROM_CUDA:
            raise cuda_exception(engine, why.code, why.function.decode(), what)
        with nogil:
            detail = engine.c.nccl.ncclGetLastError(NULL)
        raise nccl_exception(
            why.code, why.function.decode(), what, detail.decode(errors="replace")
        )
    made.tensor.data = made.memory.base
    last_engines[bool(engine.is_cuda)] = engine
    pn_memory_serve(engine.c, engine.is_cuda)
    if not stops_at_exit:
        stops_at_exit = True
        atexit.register(stop)
    return made


def empty_array(Engine engine not None, int ordinal, tuple shape, str dtype, bint plain):
    """An uninitialised Array (``ncclMemAlloc``; plain: ``cuMemAlloc``); see pynccl.empty."""
    engine.usable()
    return allocate(
        engine, engine.device(ordinal), shape, dtype,
        PN_MEMORY_DRIVER if plain else PN_MEMORY_NCCL,
    )


# ---- the array -------------------------------------------------------------------------------

cdef class Array:
    """Memory of one device, in C order; made by ``pynccl.empty``.

    The operations of communicators on its device take it as it is. Any library with DLPack
    takes it without a copy (``torch.from_dlpack(x)``); on the host engine NumPy also by
    ``numpy.asarray(x)``, on a GPU CuPy and Numba also by ``__cuda_array_interface__``.

    It is freed when no array, no slice, no view and no operation uses it any more.
    """

    def __init__(self):
        raise TypeError("an Array is made by pynccl.empty()")

    def __dealloc__(self):
        if self.memory != NULL:
            pn_memory_drop(self.memory)
        PyMem_Free(self.extent)

    @property
    def dtype(self):
        """The name of its elements' type, such as ``"bfloat16"``."""
        return self.type_text

    @property
    def shape(self):
        """The lengths of its axes."""
        return tuple([self.extent[axis] for axis in range(self.tensor.ndim)])

    @property
    def ndim(self):
        """How many axes it has."""
        return self.tensor.ndim

    @property
    def size(self):
        """How many elements it has."""
        cdef int64_t count = 1
        for axis in range(self.tensor.ndim):
            count *= self.extent[axis]
        return count

    @property
    def itemsize(self):
        """Bytes of one element."""
        return self.tensor.dtype.bits // 8

    @property
    def nbytes(self):
        """Bytes of all elements."""
        return self.size * self.itemsize

    @property
    def ptr(self):
        """The address of its first element, as an int."""
        return <size_t>self.tensor.data

    @property
    def device(self):
        """Where it lives, as ``pynccl.empty`` takes it: ``"cuda:1"`` or ``"cpu:1"``."""
        return f"{'cuda' if self.engine.is_cuda else 'cpu'}:{self.device_ordinal}"

    def __len__(self):
        if not self.tensor.ndim:
            raise TypeError("an array without axes has no length")
        return self.extent[0]

    def __getitem__(self, index):
        """Rows of the first axis, ``x[i]`` or ``x[i:j]``, in the same memory."""
        rows = len(self)
        shape = self.shape
        if isinstance(index, slice):
            start, stop, step = index.indices(rows)
            if step != 1:
                raise IndexError(f"a slice of an Array has step 1, not {step}")
            shape = (max(stop - start, 0), *shape[1:])
        else:
            start = index + rows if index < 0 else index
            if not 0 <= start < rows:
                raise IndexError(f"row {index} of {rows} does not exist")
            shape = shape[1:]
        cdef Array made = shaped(self.engine, self.device_ordinal, shape, self.type_text)
        made.memory = pn_memory_hold(self.memory)
        made.tensor.data = (
            <char *>self.tensor.data + <int64_t>start * self.extent[2 * self.tensor.ndim]
        )
        return made

    def __repr__(self):
        return f"<pynccl.Array {self.type_text} {self.shape} on {self.device} at {self.ptr:#x}>"

    # ---- for others

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        if self.engine.is_cuda:
            raise BufferError("a buffer is host memory, and this array is on a GPU")
        text = TYPES[self.type_text][2]
        if text is None:
            raise BufferError(
                f"the buffer protocol has no format for {self.type_text}; use DLPack"
            )
        cdef int ndim = self.tensor.ndim
        buffer.buf = self.tensor.data
        buffer.obj = self
        buffer.len = self.nbytes
        buffer.itemsize = self.itemsize
        buffer.readonly = False
        buffer.format = <char *>text if flags & PyBUF_FORMAT else NULL
        buffer.ndim = ndim
        buffer.shape = <Py_ssize_t *>self.extent
        buffer.strides = <Py_ssize_t *>(self.extent + 2 * ndim)
        buffer.suboffsets = NULL
        buffer.internal = NULL

    @property
    def __cuda_array_interface__(self):
        """Version 3: address, shape and type, for consumers on the same GPU."""
        if not self.engine.is_cuda:
            raise AttributeError("this array is in host memory")
        if TYPES[self.type_text][2] is None:
            raise AttributeError(
                f"the CUDA array interface has no type {self.type_text}; use DLPack"
            )
        text = numpy.dtype(self.type_text).str
        return {
            "version": 3, "shape": self.shape, "typestr": text, "data": (self.ptr, False),
            "strides": None, "stream": None,
        }

    def __dlpack_device__(self):
        """DLPack's device type and number."""
        return self.tensor.device.device_type, self.tensor.device.device_id

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """The array as a capsule for ``from_dlpack``.

        Args:
            stream: on a GPU the consumer's stream, which waits for the operations on the memory
                that have not ended: None or 1 for the legacy default stream, 2 for the thread's
                own, -1 for no wait. None in host memory.
            max_version: the newest DLPack that the consumer understands; None is before 1.0.
            dl_device: its own device, or None.
            copy: True for a copy, on the host engine only.

        Raises:
            BufferError: it cannot be exported like that.
        """
        cdef Array source = self
        cdef DLManagedTensorVersioned *versioned
        cdef DLManagedTensor *plain
        cdef uint64_t flags = 0
        refuse_fork()
        here = self.__dlpack_device__()
        if dl_device is not None and tuple([int(part) for part in dl_device]) != here:
            raise BufferError(f"this array is on DLPack device {here}, not on {dl_device}")
        self.order_before(stream)
        if copy:
            source = self.copied()
            flags = DLPACK_FLAG_BITMASK_IS_COPIED
        if max_version is not None and max_version[0] >= 1:
            versioned = pn_memory_view(source.memory, &source.tensor, flags)
            if versioned == NULL:
                raise MemoryError
            return PyCapsule_New(versioned, b"dltensor_versioned", delete_versioned)
        plain = pn_memory_view_unversioned(source.memory, &source.tensor)
        if plain == NULL:
            raise MemoryError
        return PyCapsule_New(plain, b"dltensor", delete_unversioned)

    cdef int order_before(self, object stream) except -1:
        """Have the consumer's stream wait for what is still to be written or read."""
        cdef pn_op_t *found[64]
        cdef CUresult result = CUDA_SUCCESS
        cdef int count, i
        cdef CUstream handle
        if not self.engine.is_cuda:
            if stream is not None and stream != -1:
                raise BufferError(f"an array in host memory has no stream {stream!r}")
            return 0
        if stream is None:
            stream = 1
        if isinstance(stream, bool) or not isinstance(stream, int) or stream < -1:
            raise BufferError(f"a consumer's stream is -1, 1, 2 or a handle, not {stream!r}")
        if stream == 0:
            raise BufferError("stream 0 is ambiguous: pass 1 or 2 for a default stream")
        if stream == -1:
            return 0
        handle = <CUstream><size_t>stream
        count = pn_memory_pending(self.memory, found, 64)
        if count > 64:
            raise BufferError(f"{count} operations on this memory have not ended; await them")
        # Their owners are let go of with the GIL, which is ours until here.
        owners = [<object>found[i].owner for i in range(count)]
        for i in range(count):
            with nogil:
                result = pn_op_order(found[i], handle)
            if result != CUDA_SUCCESS:
                raise cuda_exception(
                    self.engine, result, "cuStreamWaitEvent", "a DLPack export"
                )
        del owners
        return 0

    cdef Array like(self, tuple shape):
        """A fresh one of the same type in memory of the same kind."""
        return allocate(
            self.engine, self.memory.device, shape, self.type_text, self.memory.kind
        )

    cdef Array copied(self):
        if self.engine.is_cuda:
            raise BufferError("copy=True is for host memory; copy on the consumer's side")
        cdef Array made = self.like(self.shape)
        cdef size_t nbytes = self.nbytes
        if nbytes:
            with nogil:
                memcpy(made.tensor.data, self.tensor.data, nbytes)
        return made

    __dlpack_c_exchange_api__ = PyCapsule_New(&exchange, b"dlpack_exchange_api", NULL)


cdef void delete_versioned(object capsule) noexcept:
    """The end of a capsule that no consumer has taken."""
    cdef DLManagedTensorVersioned *tensor
    if PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        tensor = <DLManagedTensorVersioned *>PyCapsule_GetPointer(
            capsule, b"dltensor_versioned"
        )
        tensor.deleter(tensor)


cdef void delete_unversioned(object capsule) noexcept:
    cdef DLManagedTensor *tensor
    if PyCapsule_IsValid(capsule, b"dltensor"):
        tensor = <DLManagedTensor *>PyCapsule_GetPointer(capsule, b"dltensor")
        tensor.deleter(tensor)
