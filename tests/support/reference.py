"""What every collective must give, computed with NumPy and ml_dtypes in rank order.

Independent of the host engine: no code of ours is called, and rounding is left to NumPy and
ml_dtypes. The rules are NCCL's: a step takes two elements and rounds to the element type at
once, fp8 goes through float16 and saturates, integers wrap, an average of floats multiplies
each input by 1/n beforehand and an average of integers divides the wrapped sum. Ranks are
combined in the order 0, 1, 2, ...

Arrays are one-dimensional and of one dtype; ranks are the positions in a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce as fold
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Op: TypeAlias = Literal["sum", "prod", "max", "min", "avg"]
Operation: TypeAlias = Literal[
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
]

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
E4M3: np.dtype[Any] = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2: np.dtype[Any] = np.dtype(ml_dtypes.float8_e5m2)

#: NCCL's data types in the order of their codes.
DTYPES: tuple[np.dtype[Any], ...] = (
    np.dtype(np.int8),
    np.dtype(np.uint8),
    np.dtype(np.int32),
    np.dtype(np.uint32),
    np.dtype(np.int64),
    np.dtype(np.uint64),
    np.dtype(np.float16),
    np.dtype(np.float32),
    np.dtype(np.float64),
    BFLOAT16,
    E4M3,
    E5M2,
)
OPS: tuple[Op, ...] = ("sum", "prod", "max", "min", "avg")
ROOTED: frozenset[Operation] = frozenset(("broadcast", "reduce", "gather", "scatter"))
REDUCING: frozenset[Operation] = frozenset(("all_reduce", "reduce", "reduce_scatter"))

#: The NaN that every conversion to a narrow type gives, as bits.
CANONICAL_NAN = {np.dtype(np.float16): 0x7FFF, BFLOAT16: 0x7FFF, E4M3: 0x7F, E5M2: 0x7F}
#: The largest finite number of each fp8 type, to which conversions saturate.
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def is_integer(dtype: np.dtype[Any]) -> bool:
    """Say whether NCCL treats the dtype as an integer."""
    return dtype.kind in "iu"


def bits(array: Array) -> Array:
    """View the elements as unsigned integers of their size."""
    return array.view(f"u{array.dtype.itemsize}")


def same(actual: Array, wanted: Array) -> bool:
    """Compare bit for bit; a NaN of float32 or float64 equals every other NaN.

    Which NaN an addition of wide floats gives is the processor's choice. Narrow types have one
    canonical NaN and no such freedom.
    """
    if actual.dtype != wanted.dtype or actual.shape != wanted.shape:
        return False
    differ = bits(actual) != bits(wanted)
    if wanted.dtype in (np.float32, np.float64):
        differ &= ~(np.isnan(actual) & np.isnan(wanted))
    return not differ.any()


def _narrow(values: Array, dtype: np.dtype[Any]) -> Array:
    """Round to the dtype, with the canonical NaN, saturating for fp8."""
    if dtype in LARGEST:
        largest = values.dtype.type(LARGEST[dtype])
        values = np.clip(values, -largest, largest)  # keeps NaN
    result = values.astype(dtype)
    if dtype in CANONICAL_NAN:
        bits(result)[np.isnan(values)] = CANONICAL_NAN[dtype]
    return result


def _extremum(a: Array, b: Array, op: Op) -> Array:
    if is_integer(a.dtype):
        return np.minimum(a, b) if op == "min" else np.maximum(a, b)
    dtype, wide = a.dtype, a.dtype if a.dtype == np.float32 else np.dtype(np.float64)
    a, b = a.astype(wide), b.astype(wide)
    result: Array = np.fmin(a, b) if op == "min" else np.fmax(a, b)
    zeros = (a == 0) & (b == 0)  # IEEE leaves the sign open; the GPU orders -0 below +0
    negative = np.signbit(a) | np.signbit(b) if op == "min" else np.signbit(a) & np.signbit(b)
    result[zeros] = np.where(negative[zeros], -0.0, 0.0)
    return _narrow(result, dtype)


def combine(a: Array, b: Array, op: Op) -> Array:
    """Take one step, `a op b`, in the element type."""
    with np.errstate(all="ignore"):
        if op in ("min", "max"):
            return _extremum(a, b, op)
        dtype = a.dtype
        if dtype == BFLOAT16:
            a, b = a.astype(np.float32), b.astype(np.float32)
        elif dtype in LARGEST:
            a, b = a.astype(np.float16), b.astype(np.float16)
        return _narrow(a + b if op == "sum" else a * b, dtype)


def average_factor(dtype: np.dtype[Any], ranks: int) -> Array:
    """Return 1/ranks as one element of a floating dtype: by way of float32, as NCCL does."""
    factor = np.array([1 / ranks])
    return factor if dtype == np.float64 else _narrow(factor.astype(np.float32), dtype)


def divide(values: Array, divisor: int) -> Array:
    """Divide integers, truncating towards zero."""
    quotient: Array
    if values.dtype.kind == "u":
        quotient = values.astype(np.uint64) // np.uint64(divisor)
    else:
        wide = values.astype(np.int64)
        floor, rest = np.divmod(wide, divisor)
        quotient = floor + ((rest != 0) & (wide < 0))
    return quotient.astype(values.dtype)


def reduced(inputs: Sequence[Array], op: Op) -> Array:
    """Combine the ranks' arrays element by element, in rank order."""
    if op != "avg":
        return fold(lambda a, b: combine(a, b, op), inputs[1:], inputs[0].copy())
    dtype, ranks = inputs[0].dtype, len(inputs)
    if is_integer(dtype):
        return divide(reduced(inputs, "sum"), ranks)
    factor = average_factor(dtype, ranks)
    return reduced([combine(array, factor, "prod") for array in inputs], "sum")


def expected(
    operation: Operation, inputs: Sequence[Array], op: Op, root: int, rank: int
) -> Array | None:
    """Return what `rank` must hold afterwards; None where it receives nothing.

    `inputs` holds every rank's array. For reduce_scatter and all_to_all (every rank) and for
    scatter (root) its length is a multiple of the number of ranks. `op` counts for reductions
    only, `root` for broadcast, reduce, gather and scatter.
    """
    ranks = len(inputs)

    def own(array: Array) -> Array:
        """Return the block of this rank."""
        block: Array = np.split(array, ranks)[rank].copy()
        return block

    if operation in ("reduce", "gather") and rank != root:
        return None
    if operation in ("all_reduce", "reduce"):
        return reduced(inputs, op)
    if operation == "reduce_scatter":
        return reduced([own(array) for array in inputs], op)
    if operation == "broadcast":
        return np.array(inputs[root])
    if operation == "scatter":
        return own(inputs[root])
    parts = [own(array) for array in inputs] if operation == "all_to_all" else list(inputs)
    joined: Array = np.concatenate(parts)
    return joined


def sample(dtype: np.dtype[Any], count: int, seed: Sequence[int]) -> Array:
    """Return `count` elements that exercise rounding, the same ones for the same seed.

    Integers and narrow floats take every bit pattern; wide floats are of mixed magnitude and
    sign, with zeros, subnormals, infinities and NaN among them.
    """
    generator = np.random.default_rng(seed)
    if is_integer(dtype) or dtype.itemsize <= 2:
        raw = generator.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
        return raw.view(dtype)
    values = generator.standard_normal(count) * 10.0 ** generator.integers(-6, 7, count)
    result: Array = values.astype(dtype)
    limits = np.finfo(dtype)
    special = np.array(
        [
            0.0,
            -0.0,
            limits.smallest_subnormal,
            -limits.tiny,
            limits.max,
            np.inf,
            -np.inf,
            np.nan,
        ]
    ).astype(dtype)
    places = generator.random(count) < 0.05
    result[places] = special[generator.integers(0, len(special), int(places.sum()))]
    return result
