"""Reduction operators that a user makes: sums whose inputs are multiplied first.

1. An operator belongs to one communicator and one data type; any other use is refused by name.
2. Each operation that uses it holds it, and with it a scalar in device memory, which NCCL reads
   when the operation runs.
3. Closed or dropped, whichever comes first: it is destroyed natively behind the operations that
   were called before. What is left of it goes with its communicator.
"""

from libc.string cimport memset

from pynccl._native.abi cimport (
    pn_forked,
    pn_operator_end,
    pn_operator_new,
    pn_operator_t,
)
from pynccl._native.borrow cimport view_of
from pynccl._native.exchange cimport order_t
from pynccl._native.handles cimport CommHandle
from pynccl._native.view cimport dtype_of, view_t

import numbers
import weakref

import numpy

from pynccl._native.memory import type_name
from pynccl.errors import ConfigError, InvalidBufferError, NotSupportedError, UsageError
from pynccl.types import DTYPES


cdef class PreMulSum:
    """A sum of inputs that are multiplied by a scalar first; see ``pre_mul_sum``."""

    def __init__(self, CommHandle comm not None, scalar, dtype):
        cdef view_t view
        cdef bytes value
        cdef const char *raw
        comm.usable()
        name = type_name(dtype)
        if name not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {name}")
        self.record = comm.record
        self.comm_seen = weakref.ref(comm)
        self.type_text = name
        if isinstance(scalar, (numbers.Number, numpy.generic, numpy.ndarray)):
            value = encoded(scalar, name)
            raw = value
            self.c = pn_operator_new(comm.c, DTYPES[name], raw, False)
        else:
            self.scalar_kept = self.look(comm, scalar, &view)
            self.c = pn_operator_new(comm.c, DTYPES[name], view.data, True)
        if self.c == NULL:
            raise MemoryError

    cdef object look(self, CommHandle comm, object scalar, view_t *view):
        """A scalar in the communicator's device memory: one element of the very type."""
        cdef order_t order
        memset(&order, 0, sizeof(order_t))
        order.on_gpu = comm.engine.is_cuda
        keep = view_of(scalar, view, comm, &order, "scalar")
        if view.count != 1:
            raise InvalidBufferError(f"scalar has {view.count} elements, expected one")
        if view.dtype != DTYPES[self.type_text]:
            raise InvalidBufferError(
                f"scalar has elements of {dtype_of(scalar, view)}, the operator is for "
                f"{self.type_text}; in device memory it is read as it is"
            )
        return keep

    def __dealloc__(self):
        if self.c != NULL and not pn_forked:
            pn_operator_end(self.c)

    cdef int usable(self) except -1:
        if self.c == NULL:
            raise UsageError("op is a pre_mul_sum that has been destroyed")
        return 0

    cdef int code_for(
        self, CommHandle comm, int datatype, object array, view_t *view
    ) except -1:
        """What an operation's redop says; raises where the operator does not fit."""
        self.usable()
        if self.record is not comm.record:
            raise UsageError(
                f"op is a pre_mul_sum of another communicator (rank {self.record.c.rank} of "
                f"{self.record.c.size} on device {self.record.c.device.ordinal}); make one for "
                "each"
            )
        if datatype != DTYPES[self.type_text]:
            raise InvalidBufferError(
                f"op is a pre_mul_sum for {self.type_text}, the array has elements of "
                f"{dtype_of(array, view)}"
            )
        return self.c.code

    @property
    def comm(self):
        """The communicator that it serves; None when that is gone."""
        return self.comm_seen()

    @property
    def dtype(self):
        """The name of the type of its arrays."""
        return self.type_text

    @property
    def closed(self):
        """Whether it has been destroyed."""
        return self.c == NULL

    def close(self):
        """Destroy it (``ncclRedOpDestroy``), behind the operations that use it; never waits."""
        cdef pn_operator_t *ended = self.c
        self.c = NULL
        if ended != NULL and not pn_forked:
            with nogil:
                pn_operator_end(ended)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __repr__(self):
        return f"<PreMulSum of {self.type_text}{', destroyed' if self.c == NULL else ''}>"


def pre_mul_sum(comm, scalar, dtype):
    """Make an operator that multiplies, then sums (``ncclRedOpCreatePreMulSum``).

    ``with pre_mul_sum(comm, 0.5, "float32") as op: await comm.all_reduce(x, op=op)``. Each rank
    makes its own; the scalars may differ, and each multiplies its own rank's input, in the
    element type. It serves all_reduce, reduce and reduce_scatter of this communicator.

    Args:
        comm: the communicator.
        scalar: a number, or an array of NumPy with one element: the value now. Any other array
            of one element is device memory that is read when each operation runs; whatever
            writes it must have ended by then.
        dtype: the type of the arrays, as ``pynccl.empty`` takes it; a number must fit into it.

    Raises:
        ConfigError: no reduction has this type, or the number does not fit.
        InvalidBufferError: the scalar's array is of another type, size or device.
    """
    return PreMulSum(comm, scalar, dtype)


cdef bytes encoded(object scalar, str dtype):
    """A number in the element type, padded to 16 bytes."""
    source = numpy.asarray(scalar)
    number = source.reshape(-1).tolist()[0] if source.size == 1 else None
    # NumPy calls the types of ml_dtypes void, and integers beyond 64 bits objects.
    real = source.dtype.kind in "iuf" or source.dtype.name in DTYPES or type(number) is int
    if number is None or not real:
        raise ConfigError(f"scalar must be one real number, not {scalar!r}")
    if "int" in dtype:
        limits = numpy.iinfo(dtype)
        if number != number or number in (float("inf"), float("-inf")) or int(number) != number:
            raise ConfigError(
                f"scalar {number!r} is no integer, and the operator is for {dtype}"
            )
        if not limits.min <= number <= limits.max:
            raise ConfigError(
                f"scalar {number!r} does not fit into {dtype}: {limits.min} to {limits.max}"
            )
        return numpy.array(int(number), dtype).tobytes().ljust(16, b"\0")
    made = None
    try:
        with numpy.errstate(over="ignore"):
            made = numpy.array(float(number)).astype(element_type(dtype))
    except OverflowError:
        raise ConfigError(f"scalar {number!r} does not fit into {dtype}") from None
    if numpy.isfinite(float(number)) and not numpy.isfinite(made.astype(numpy.float64)):
        raise ConfigError(f"scalar {number!r} does not fit into {dtype}")
    return made.tobytes().ljust(16, b"\0")


cdef object element_type(str dtype):
    try:
        return numpy.dtype(dtype)
    except TypeError:
        pass
    try:
        import ml_dtypes
    except ImportError:
        raise NotSupportedError(
            f"a number becomes {dtype} by the package ml_dtypes, which is not installed; pass "
            "a scalar in device memory"
        ) from None
    return numpy.dtype(getattr(ml_dtypes, dtype))
