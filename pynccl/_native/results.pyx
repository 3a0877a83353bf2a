"""Results in the caller's own library: fresh arrays, and the way of strided ones and back.

A strided array travels through a scratch array of the same library, made and filled by that
library when the operation is called. Where the operation writes, the scratch is copied back
once the operation has ended well: when it is awaited, or else when it is let go of. On a GPU
both copies are put on the stream that was the library's current one at the call: the operation
waits for the first, and what is put on that stream after the await comes behind the second.
"""

from pynccl._native.abi cimport PN_MEMORY_DRIVER, PN_MEMORY_HOST
from pynccl._native.handles cimport CommHandle
from pynccl._native.memory cimport Array, allocate

import contextlib
import sys
import threading

import numpy

from pynccl._native.memory import type_name
from pynccl.errors import ConfigError, InvalidBufferError

cdef object ndarray = numpy.ndarray
# Types whose results are always fresh arrays: nothing may write into them.
cdef tuple IMMUTABLE = ("jax", "jaxlib")


cdef str library_of(object array):
    return type(array).__module__.partition(".")[0]


cdef tuple shape_of(object array):
    shape = getattr(array, "shape", None)
    return tuple(shape) if shape is not None else (len(array),)


# ---- fresh arrays ----------------------------------------------------------------------------

cdef dict names = {}  # of the data types of arrays that cannot be written


cdef str name_of(object array):
    dtype = array.dtype
    name = names.get(dtype)
    if name is None:
        try:
            name = names[dtype] = type_name(dtype)
        except ConfigError:
            raise InvalidBufferError(
                f"cannot make a result of {dtype} for {library_of(array)}; pass out=, or pass "
                "the array as one of bytes"
            ) from None
    return name


cdef Array to_adopt(CommHandle comm, object array, tuple shape):
    """Memory for a result that `Adopted` turns into one of an immutable library."""
    return allocate(
        comm.engine, comm.c.device, shape, name_of(array),
        PN_MEMORY_DRIVER if comm.engine.is_cuda else PN_MEMORY_HOST,
    )


cdef object fresh_like(CommHandle comm, object array, tuple shape):
    """An uninitialised array of the caller's own library, dtype and device.

    For libraries with immutable arrays one of our own, which ending_of turns into one of theirs
    when it is full.
    """
    cls = type(array)
    if cls is Array:
        return (<Array>array).like(shape)
    if cls is ndarray:
        return numpy.empty(shape, array.dtype)
    module = library_of(array)
    if module == "torch":
        return array.new_empty(shape)
    if module in IMMUTABLE:
        return to_adopt(comm, array, shape)
    if hasattr(cls, "__array_namespace__"):
        namespace = array.__array_namespace__()
        return namespace.empty(shape, dtype=array.dtype, device=array.device)
    if isinstance(array, ndarray):
        return numpy.empty(shape, array.dtype)
    source = memoryview(array) if not hasattr(array, "dtype") else None
    if source is not None and source.format:
        return numpy.empty(shape, numpy.dtype(source.format))
    if module == "cupy":
        return sys.modules["cupy"].empty(shape, array.dtype)
    raise InvalidBufferError(f"cannot make a result array of type {cls.__name__}; pass out=")


# ---- what is left to do at the end -----------------------------------------------------------

cdef class Ending:
    """The rest of an operation on the host: done once, by whoever comes first."""

    cdef object result(self, object array):
        """What awaiting gives, of the array that the device has written."""
        return array

    cdef int released(self) except -1:
        """The operation is let go of; nobody may ever ask for its result."""
        return 0


def wide_types(jax):
    """A context in which JAX keeps 64 bits: whoever gave them had it so for a while."""
    for home in (jax, getattr(jax, "experimental", None)):  # the older place
        if hasattr(home, "enable_x64"):
            return home.enable_x64(True)
    return contextlib.nullcontext()


cdef class Adopted(Ending):
    """Turns an array of ours into one of JAX, which cannot be written; with no copy."""

    cdef object result(self, object array):
        if self.made is None:
            jax = sys.modules["jax"]
            with wide_types(jax) if array.itemsize >= 8 else contextlib.nullcontext():
                self.made = jax.dlpack.from_dlpack(array)
        return self.made


cdef Ending ending_of(object array):
    """What turns the fresh array for `array` into one of its library; None: it is one."""
    if library_of(array) not in IMMUTABLE:
        return None
    return Adopted.__new__(Adopted)


# ---- strided arrays --------------------------------------------------------------------------

cdef object detached(object array):
    """A torch tensor apart from its autograd graph, sharing its memory; others as they are."""
    return array.detach() if library_of(array) == "torch" else array


cdef object packed(CommHandle comm, object array, bint reads):
    """A contiguous array of the same shape and library, with the same elements if `reads`."""
    scratch = fresh_like(comm, array, shape_of(array))
    if reads:
        scratch[...] = detached(array)
    return scratch


cdef int writes_back(object scratch, object array, str name) except -1:
    """Refuse an array into which a scratch array could not be copied back."""
    steps = array.stride() if library_of(array) == "torch" else getattr(array, "strides", ())
    lengths = shape_of(array)
    for axis, step in enumerate(steps):
        if step == 0 and lengths[axis] > 1:
            raise InvalidBufferError(
                f"{name} cannot be written: all {lengths[axis]} rows of its axis {axis} are at "
                "the same place in memory"
            )
    try:
        detached(array)[:0] = scratch[:0]
    except Exception as error:
        raise InvalidBufferError(f"{name} cannot be written: {error}") from error
    return 0


def current_stream(array):
    """A function that gives a context on what is now the current stream of a GPU library."""
    module = library_of(array)
    if module == "torch" and array.is_cuda:
        cuda = sys.modules["torch"].cuda
        stream = cuda.current_stream(array.device)
        return lambda: cuda.stream(stream)
    if module == "cupy":
        return sys.modules["cupy"].cuda.get_current_stream
    return contextlib.nullcontext


cdef class Unpacked(Ending):
    """Copies a scratch array back into the strided one."""

    cdef object scratch
    cdef object array
    cdef object stream
    cdef object lock

    cdef object result(self, object array):
        # A thread that lets go of the operation may be copying just now.
        with self.lock:
            if self.scratch is not None:
                with self.stream():
                    detached(self.array)[...] = self.scratch
                self.scratch = None
        return self.array

    cdef int released(self) except -1:
        self.result(None)
        return 0


cdef Ending unpacked(object scratch, object array):
    cdef Unpacked made = Unpacked()
    made.late = True
    made.scratch = scratch
    made.array = array
    made.stream = current_stream(array)
    made.lock = threading.RLock()
    return made
