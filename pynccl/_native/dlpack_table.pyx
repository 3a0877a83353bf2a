"""The C exchange API of DLPack: pynccl's arrays for consumers that call no Python.

The table lies beside the class (memory.pxd), whose attribute ``__dlpack_c_exchange_api__`` is
made with it; its functions are put in here.
"""

from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t, uint8_t

from pynccl._native.abi cimport (
    PN_DLPACK_MAJOR,
    PN_DLPACK_MINOR,
    DLDeviceType,
    DLManagedTensorVersioned,
    DLTensor,
    kDLCPU,
    kDLCUDA,
    pn_memory_of_tensor,
    pn_memory_set_allocator,
    pn_memory_view,
)
from pynccl._native.engine cimport Engine
from pynccl._native.memory cimport Array, exchange, last_engines, shaped

from pynccl._native.memory import TYPES
from pynccl.errors import InvalidBufferError


cdef str name_of(uint8_t code, uint8_t bits):
    for name, (known, width, _) in TYPES.items():
        if known == code and width == bits:
            return name
    raise InvalidBufferError(f"pynccl has no array of DLPack type {code} with {bits} bits")


cdef int borrow(void *array, DLTensor *out) except? -1:
    out[0] = (<Array>array).tensor
    return 0


cdef int export(void *array, DLManagedTensorVersioned **out) except? -1:
    cdef Array source = <Array>array
    out[0] = pn_memory_view(source.memory, &source.tensor, 0)
    if out[0] == NULL:
        raise MemoryError
    return 0


cdef int adopt(DLManagedTensorVersioned *tensor, void **out) except? -1:
    """Another library's tensor as an Array, which takes it over."""
    cdef DLTensor *found = &tensor.dl_tensor
    cdef Array made
    cdef int ordinal = found.device.device_id
    cdef int axis
    engine = None
    if found.device.device_type in (kDLCPU, kDLCUDA):
        engine = last_engines.get(found.device.device_type == kDLCUDA)
    if engine is None:
        raise InvalidBufferError(
            f"pynccl has no memory on DLPack device {found.device.device_type} yet"
        )
    if found.dtype.lanes != 1:
        raise InvalidBufferError(f"an Array has one lane, not {found.dtype.lanes}")
    made = shaped(
        engine, ordinal, tuple([found.shape[axis] for axis in range(found.ndim)]),
        name_of(found.dtype.code, found.dtype.bits),
    )
    for axis in range(found.ndim):
        if (
            found.strides != NULL and found.shape[axis] > 1
            and found.strides[axis] != made.tensor.strides[axis]
        ):
            raise InvalidBufferError("an Array is contiguous in C order, the tensor is not")
    made.memory = pn_memory_of_tensor((<Engine>engine).device(ordinal), tensor)
    if made.memory == NULL:
        raise MemoryError
    made.tensor.data = <char *>found.data + found.byte_offset
    Py_INCREF(made)
    out[0] = <void *>made
    return 0


cdef int work_stream(DLDeviceType kind, int32_t device, void **out) except? -1:
    """Arrays of pynccl have no stream of their own: NULL, the legacy default stream."""
    out[0] = NULL
    return 0


exchange.header.version.major = PN_DLPACK_MAJOR
exchange.header.version.minor = PN_DLPACK_MINOR
exchange.header.prev_api = NULL
pn_memory_set_allocator(&exchange)
exchange.managed_tensor_from_py_object_no_sync = export
exchange.managed_tensor_to_py_object_no_sync = adopt
exchange.dltensor_from_py_object_no_sync = borrow
exchange.current_work_stream = work_stream
