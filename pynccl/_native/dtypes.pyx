"""Which dtypes an operation takes, and as which of NCCL's they travel.

What only moves data takes every dtype, as bytes where NCCL has none. A reduction takes NCCL's
own; booleans, of which "any" is the largest and "all" the smallest byte; and complex numbers,
whose sum and average are those of their two parts.
"""

from pynccl._native.abi cimport kDLBool, kDLComplex
from pynccl._native.handles cimport CommHandle
from pynccl._native.issue cimport call_t
from pynccl._native.operators cimport PreMulSum
from pynccl._native.view cimport KIND_OPAQUE, dtype_of, view_t

from pynccl.errors import ConfigError, InvalidBufferError
from pynccl.types import BOOLEAN_REDUCTIONS, COMPLEX_REDUCTIONS, DTYPES, REDUCTIONS

cdef dict OPS = REDUCTIONS
cdef dict BOOLEAN = BOOLEAN_REDUCTIONS
cdef tuple COMPLEX = COMPLEX_REDUCTIONS
cdef int UINT8 = DTYPES["uint8"]
# The parts of a complex number, by its bits.
cdef dict PARTS = {32: DTYPES["float16"], 64: DTYPES["float32"], 128: DTYPES["float64"]}


cdef int moved(call_t *call, view_t *view) except -1:
    """The type as which the elements of an operation that only moves them travel."""
    call.redop = 0
    call.unit = 1
    call.datatype = view.dtype
    if view.dtype < 0:
        call.datatype = UINT8
        call.unit = view.itemsize
    return 0


cdef int reduced(
    call_t *call, CommHandle comm, object op, object array, view_t *view
) except -1:
    """The operator and the type of a reduction.

    Raises:
        ConfigError: there is no such operator. InvalidBufferError: not for this dtype.
        UsageError: the operator is of another communicator, or destroyed.
    """
    if type(op) is PreMulSum:
        call.unit = 1
        call.datatype = view.dtype
        if view.kind == kDLComplex and view.bits in PARTS:
            call.unit = 2
            call.datatype = PARTS[view.bits]
        call.redop = (<PreMulSum>op).code_for(comm, call.datatype, array, view)
        return 0
    code = OPS.get(op) if type(op) is str else None
    if code is not None and view.dtype >= 0:
        call.redop = code
        call.datatype = view.dtype
        call.unit = 1
        return 0
    if type(op) is not str or (code is None and op not in BOOLEAN):
        raise ConfigError(f"op must be one of {', '.join({**OPS, **BOOLEAN})}, or a "
                          f"pre_mul_sum, not {op!r}")
    if view.kind == kDLBool and view.itemsize == 1:
        if op not in BOOLEAN:
            raise InvalidBufferError(
                f"op {op!r} is not for bool, which reduces with {', '.join(BOOLEAN)} only"
            )
        call.redop = OPS[BOOLEAN[op]]
        call.datatype = UINT8
        call.unit = 1
        return 0
    if view.kind == kDLComplex and view.bits in PARTS:
        if op not in COMPLEX:
            raise InvalidBufferError(
                f"op {op!r} is not for {dtype_of(array, view)}, which reduces with "
                f"{' and '.join(COMPLEX)} only"
            )
        call.redop = code
        call.datatype = PARTS[view.bits]
        call.unit = 2
        return 0
    if code is None and view.dtype >= 0:
        raise InvalidBufferError(
            f"op {op!r} is for bool only, not for {dtype_of(array, view)}, which reduces with "
            f"{', '.join(OPS)}"
        )
    raise InvalidBufferError(
        f"{dtype_of(array, view)} can be moved but not reduced; reductions take "
        f"{', '.join(DTYPES)}, bool ({', '.join(BOOLEAN)}) and complex numbers "
        f"({', '.join(COMPLEX)})"
    )


cdef int same_type(object x, view_t *send, object out, view_t *recv) except -1:
    if send.kind == recv.kind and send.itemsize == recv.itemsize:
        if send.kind != KIND_OPAQUE or x is out:
            return 0
        # Bytes to NCCL, but not the same to their library: dates of other units, records.
        ours, theirs = getattr(x, "dtype", None), getattr(out, "dtype", None)
        if ours is None or theirs is None or ours == theirs:
            return 0
    raise InvalidBufferError(
        f"out has elements of {dtype_of(out, recv)} ({recv.itemsize} bytes), the input "
        f"has {dtype_of(x, send)} ({send.itemsize} bytes); they must be the same"
    )
