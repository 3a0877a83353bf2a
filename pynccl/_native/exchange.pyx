"""DLPack: tables and capsules of other libraries, borrowed and never renamed.

1. What a type offers is looked up once, misses included.
2. A capsule is held as it was given, so that its own destructor gives the memory back; a tensor
   of a table is given back here. Both happen where the operation is let go of: on whatever
   thread drains it, with the GIL, which a deleter may need and may take again.
3. A library that is asked for a capsule orders itself before the stream that it is told, in
   CUDA's convention: 1 the legacy default stream, 2 the thread's own, else a handle; -1 for no
   order. Host memory has no stream. A table does no ordering: it tells the current stream.
"""

from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.stdint cimport uint64_t

from pynccl._native.abi cimport (
    CUDA_SUCCESS,
    CUresult,
    CUstream,
    DLManagedTensor,
    DLManagedTensorVersioned,
    DLPackExchangeAPI,
    DLTensor,
    kDLCUDA,
    kDLCUDAManaged,
    pn_told_stream,
)
from pynccl._native.engine cimport cuda_exception
from pynccl._native.handles cimport CommHandle
from pynccl._native.view cimport from_tensor, view_t

import sys
import weakref
from functools import partial

import numpy

from pynccl.errors import InvalidBufferError

cdef extern from "Python.h":
    void PyErr_Fetch(PyObject **cls, PyObject **value, PyObject **trace)
    void PyErr_Restore(PyObject *cls, PyObject *value, PyObject *trace)

# What __dlpack__ is called with, newest first; older libraries do not know all of it.
cdef tuple FORMS = (
    {"max_version": (1, 1), "copy": False},
    {"max_version": (1, 1)},
    {},
)


# ---- what a type offers ----------------------------------------------------------------------

# By the address of the type, which is not kept alive by that: the last one is found again
# without a look into the dict.
cdef dict doors = {}
cdef void *last_type = NULL
cdef Door last_door = None


cdef Door door_of(type cls):
    global last_type, last_door
    if <void *>cls == last_type:
        return last_door
    found = doors.get(<size_t><void *>cls)
    if found is None:
        found = new_door(cls)
        doors[<size_t><void *>cls] = found
    last_type = <void *>cls
    last_door = found
    return last_door


def forget(address, reference):
    """The type at an address is gone, and the address may serve another one."""
    global last_type
    doors.pop(address, None)
    if <size_t>last_type == address:
        last_type = NULL


cdef Door new_door(type cls):
    cdef Door door = Door.__new__(Door)
    door.type = weakref.ref(cls, partial(forget, <size_t><void *>cls))
    door.library = str(getattr(cls, "__module__", "")).partition(".")[0]
    door.is_jax = door.library in ("jax", "jaxlib")
    door.is_torch = door.library == "torch" or hasattr(cls, "untyped_storage")
    # To JAX all three forms are the same: the plainest is a third quicker.
    door.form = len(FORMS) - 1 if door.is_jax else 0
    door.table = table_of(cls)
    if issubclass(cls, numpy.ndarray):
        door.way = BY_NDARRAY
        door.is_masked = issubclass(cls, numpy.ma.MaskedArray)
    elif door.table != NULL:
        door.way = BY_TABLE
    elif hasattr(cls, "__dlpack__"):
        door.way = BY_DLPACK
    elif hasattr(cls, "__cuda_array_interface__"):
        door.way = BY_CUDA
    else:
        door.way = BY_BUFFER
    return door


cdef DLPackExchangeAPI *table_of(type cls) except? NULL:
    """The type's table of exchange functions, of a version that is known here; or NULL."""
    cdef DLPackExchangeAPI *table = NULL
    capsule = getattr(cls, "__dlpack_c_exchange_api__", None)
    if PyCapsule_IsValid(capsule, b"dlpack_exchange_api"):
        table = <DLPackExchangeAPI *>PyCapsule_GetPointer(capsule, b"dlpack_exchange_api")
    # A library of another major version may offer an older table behind its own.
    while table != NULL and table.header.version.major != 1:
        table = <DLPackExchangeAPI *>table.header.prev_api
    if table != NULL and table.managed_tensor_from_py_object_no_sync == NULL:
        return NULL
    return table


# ---- the C exchange API ----------------------------------------------------------------------

cdef class Borrowed:
    """A tensor that a table has given: it goes back when this is dropped."""

    cdef DLManagedTensorVersioned *tensor

    def __dealloc__(self):
        cdef PyObject *cls
        cdef PyObject *value
        cdef PyObject *trace
        if self.tensor != NULL and self.tensor.deleter != NULL:
            # A refusal may be on its way, which a deleter in Python must not meet.
            PyErr_Fetch(&cls, &value, &trace)
            self.tensor.deleter(self.tensor)
            PyErr_Restore(cls, value, trace)


cdef object refused(object array, str name, object error):
    """The exception for an array whose library does not give it out."""
    why = str(error).partition("\n")[0] if error is not None else "its library does not say why"
    refusal = InvalidBufferError(
        f"{name} cannot be taken by DLPack from {type(array).__name__}: {why}"
    )
    refusal.__cause__ = error
    return refusal


cdef int later(int major, int minor, str name) except -1:
    raise InvalidBufferError(f"{name} speaks DLPack {major}.{minor}, expected 1.x")


cdef object from_table(Door door, object array, view_t *view, str name):
    """The fastest way in: no capsule, and on torch no reference count."""
    cdef DLManagedTensorVersioned *managed = NULL
    cdef DLTensor tensor
    cdef Borrowed held
    cdef int result
    cdef bint borrows = door.is_torch and door.table.dltensor_from_py_object_no_sync != NULL
    try:
        if borrows:
            result = door.table.dltensor_from_py_object_no_sync(<void *>array, &tensor)
        else:
            result = door.table.managed_tensor_from_py_object_no_sync(<void *>array, &managed)
    except Exception as error:
        raise refused(array, name, error)
    if result != 0 or (not borrows and managed == NULL):
        raise refused(array, name, None)
    if borrows:
        from_tensor(&tensor, 0, view, name)
    else:
        held = Borrowed.__new__(Borrowed)
        held.tensor = managed
        if managed.version.major != 1:
            later(managed.version.major, managed.version.minor, name)
        from_tensor(&managed.dl_tensor, managed.flags, view, name)
    if not door.is_torch:
        return held
    # torch keeps these two as a promise: the memory holds other values than the tensor shows.
    if array.is_neg():
        raise InvalidBufferError(f"{name} is a lazy negation; pass {name}.resolve_neg()")
    if view.dtype < 0 and array.is_conj():
        raise InvalidBufferError(f"{name} is a lazy conjugate; pass {name}.resolve_conj()")
    # A tensor can be given other storage while the operation runs (`x.data = y`).
    return (array if borrows else held), array.untyped_storage()


# ---- capsules --------------------------------------------------------------------------------

cdef bint on_gpu(object array, str name) except? -1:
    """Whether an array says that it lives on a CUDA device."""
    try:
        kind, number = array.__dlpack_device__()
        return int(kind) in (kDLCUDA, kDLCUDAManaged) and int(number) >= 0
    except Exception as error:
        raise refused(array, f"{name}'s __dlpack_device__()", error)


cdef object told(Door door, CommHandle comm, order_t *order):
    """What a producer on a GPU is told as its consumer's stream."""
    cdef CUstream stream = NULL
    cdef CUresult result
    # XLA has no word for no order, and would take -1 for a handle.
    if not order.sync and not door.is_jax:
        return -1
    order.told = True
    if order.stream == 0:
        with nogil:
            result = pn_told_stream(comm.c, &stream)
        if result != CUDA_SUCCESS:
            raise cuda_exception(comm.engine, result, "cuStreamCreate", "a hand-off")
        order.stream = <size_t>stream
    return order.stream


cdef object capsule_of(Door door, object array, CommHandle comm, order_t *order, str name):
    """Ask for a capsule, in the newest form that the library understands."""
    cdef int form = door.form
    cdef bint ordered = False
    # On the host engine an array of a GPU is refused when its capsule tells where it is.
    if order.on_gpu and on_gpu(array, name):
        stream = told(door, comm, order)
        ordered = True
    while True:
        try:
            if ordered:
                capsule = array.__dlpack__(stream=stream, **FORMS[form])
            elif form == len(FORMS) - 1:
                capsule = array.__dlpack__()  # without a dict: a tenth quicker
            else:
                capsule = array.__dlpack__(**FORMS[form])
            door.form = form
            return capsule
        except TypeError as error:
            form += 1
            if form == len(FORMS):
                raise refused(array, name, error)
        except Exception as error:
            raise refused(array, name, error)


cdef object from_capsule(
    Door door, object array, view_t *view, CommHandle comm, order_t *order, str name
):
    cdef DLManagedTensorVersioned *versioned
    cdef DLManagedTensor *older
    cdef DLTensor *tensor
    cdef uint64_t flags
    capsule = capsule_of(door, array, comm, order, name)
    if PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        versioned = <DLManagedTensorVersioned *>PyCapsule_GetPointer(
            capsule, b"dltensor_versioned"
        )
        if versioned.version.major != 1:
            later(versioned.version.major, versioned.version.minor, name)
        tensor = &versioned.dl_tensor
        flags = versioned.flags
    elif PyCapsule_IsValid(capsule, b"dltensor"):
        older = <DLManagedTensor *>PyCapsule_GetPointer(capsule, b"dltensor")
        tensor = &older.dl_tensor
        flags = 0
    else:
        raise InvalidBufferError(
            f"{name}: {type(array).__name__}.__dlpack__() gave no unused DLPack capsule"
        )
    if door.is_jax and tensor.dtype.bits < 8:
        # XLA keeps each in a byte of its own, whatever the capsule says.
        raise InvalidBufferError(
            f"{name} has elements of {tensor.dtype.bits} bits, which JAX keeps in a byte each "
            "and exports as packed; pass them as uint8"
        )
    from_tensor(tensor, flags, view, name)
    return capsule


# ---- streams of producers --------------------------------------------------------------------

cdef int add_producer(order_t *order, size_t stream, str name) except -1:
    """Have the operation put in order with what is on a producer's stream."""
    cdef int i
    if not order.sync or stream == order.stream:
        return 0
    for i in range(order.count):
        if order.producers[i] == stream:
            return 0
    if order.count == MOST_PRODUCERS:
        raise InvalidBufferError(f"{name} is one array of too many streams")
    order.producers[order.count] = stream
    order.count += 1
    return 0


cdef bint current_stream(Door door, object array, int device, size_t *handle) except? False:
    """The stream on which the array's library puts its work now; False if that is not known.

    NULL is the legacy default stream.
    """
    cdef void *stream = NULL
    if door.table != NULL and door.table.current_work_stream != NULL:
        try:
            if door.table.current_work_stream(kDLCUDA, device, &stream):
                return False
        except Exception as error:
            raise refused(array, "the current stream", error)
        handle[0] = <size_t>stream
    elif door.library == "cupy":
        handle[0] = sys.modules["cupy"].cuda.get_current_stream().ptr
    elif door.library == "torch":  # before it had a table
        handle[0] = sys.modules["torch"].cuda.current_stream(device).cuda_stream
    else:
        return False
    if handle[0] == 0:
        handle[0] = 1
    return True
