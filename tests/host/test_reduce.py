"""The host engine's arithmetic and copies (src/host/reduce*.c, copy.c) against NumPy.

Their functions are hidden in the engine, so they are compiled here on their own: as released,
with every instruction of this machine (where a multiply may be fused with an add), and under
the sanitiser for undefined behaviour; each with every table of kernels that this processor has.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support import reference
from support.reference import BFLOAT16, DTYPES, E4M3, E5M2, bits, same

ROOM = Path(__file__).parents[2] / "src" / "host"
SOURCES = [*sorted(ROOM.glob("reduce*.c")), ROOM / "copy.c"]
BUILDS = {
    "release": ["-O3"],
    "native": ["-O3", "-march=native", "-ffp-contract=fast"],
    "sanitised": ["-O1", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"],
}
TABLES = ["portable", "avx2", "avx512"]
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3}
FLOATS = [dtype for dtype in DTYPES if not reference.is_integer(dtype)]
INTEGERS = [dtype for dtype in DTYPES if reference.is_integer(dtype)]
NARROW = [np.dtype(np.float16), BFLOAT16, E4M3, E5M2]


@pytest.fixture(scope="module", params=BUILDS)
def build(request, tmp_path_factory):
    target = tmp_path_factory.mktemp("reduce") / f"{request.param}.so"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, "-std=gnu11", "-fPIC", "-shared", *BUILDS[request.param]]
    subprocess.run([*command, "-o", target, *SOURCES], check=True, timeout=120)
    library = ctypes.CDLL(str(target))
    library.host_type_size.restype = ctypes.c_size_t
    library.host_reduce_choose.restype = ctypes.c_bool
    return library


@pytest.fixture(scope="module", params=TABLES)
def engine(build, request):
    """Return the library, told to use one of its tables of kernels."""
    if not build.host_reduce_choose(request.param.encode()):
        pytest.skip(f"this processor has no {request.param}")
    return build


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


def step(engine, a, b, op):
    result, count, code = np.empty_like(a), ctypes.c_size_t(a.size), DTYPES.index(a.dtype)
    engine.host_reduce(pointer(result), pointer(a), pointer(b), count, code, OPS[op])
    return result


def scale(engine, source, scalar, into=None):
    values = np.empty_like(source) if into is None else into
    code = DTYPES.index(source.dtype)
    engine.host_premultiply(
        pointer(values), pointer(source), ctypes.c_size_t(source.size), code, pointer(scalar)
    )
    return values


def every(dtype):
    """Return all bit patterns of a narrow type."""
    count = 1 << (8 * dtype.itemsize)
    return np.arange(count, dtype=f"u{dtype.itemsize}").view(dtype)


def assert_same(actual, wanted, *inputs):
    if same(actual, wanted):
        return
    wrong = bits(actual) != bits(wanted)
    got, want = bits(actual), bits(wanted)
    lines = [
        f"{[hex(bits(x)[i]) for x in inputs]} gave {got[i]:#x}, not {want[i]:#x}"
        for i in np.flatnonzero(wrong)[:5]
    ]
    pytest.fail(f"{wrong.sum()} of {wrong.size} {actual.dtype} differ: " + "; ".join(lines))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_type_size(engine, dtype):
    assert engine.host_type_size(DTYPES.index(dtype)) == dtype.itemsize
    assert engine.host_type_size(len(DTYPES)) == engine.host_type_size(-1) == 0


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_fp8_every_pair(engine, dtype, op):
    a, b = (side.ravel().copy() for side in np.meshgrid(every(dtype), every(dtype)))
    assert_same(step(engine, a, b, op), reference.combine(a, b, op), a, b)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=str)
def test_16_bits_every_pattern_with_chosen_and_random_partners(engine, dtype, op):
    a = every(dtype)
    generator = np.random.default_rng(5)
    edges = np.array([0, 1, 2, 0x7BFF, 0x7C00, 0x7C01, 0x7F7F, 0x7F80, 0x7F81, 0x7FFF, 0x3C00,
                      0x3F80, 0x3BFF, 0x0400, 0x0080, 0x2000, 0x1FFF], np.uint16)  # fmt: skip
    partners = [
        np.full(a.size, edge | sign, np.uint16) for edge in edges for sign in (0, 0x8000)
    ]
    partners += [generator.permutation(bits(a)) for _ in range(40)]
    near = bits(a).astype(np.int64)  # sums that cancel, and ties
    partners += [(near + d & 0xFFFF ^ 0x8000).astype(np.uint16) for d in (-2, -1, 0, 1, 2)]
    for partner in partners:
        b = partner.view(dtype)
        assert_same(step(engine, a, b, op), reference.combine(a, b, op), a, b)


def test_bfloat16_products_below_the_normal_range_round_once(engine):
    # Around 2^-133 float32 has lost digits as well: compare with the exact product, rounded.
    generator = np.random.default_rng(7)
    mantissa = generator.integers(0, 128, (2, 200_000), dtype=np.uint16)
    exponent = generator.integers(1, 115, 200_000, dtype=np.uint16)
    other = np.clip(generator.integers(114, 127, 200_000) - exponent, 0, 254).astype(np.uint16)
    a = (exponent << 7 | mantissa[0]).view(BFLOAT16)
    b = (other << 7 | mantissa[1]).view(BFLOAT16)
    exact = a.astype(np.float64) * b.astype(np.float64)
    wanted = np.rint(np.ldexp(exact, 133)).astype(np.uint16).view(BFLOAT16)
    assert_same(step(engine, a, b, "prod"), wanted, a, b)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float64)], ids=str)
def test_wide_floats(engine, dtype, op):
    a, b = (reference.sample(dtype, 100_003, [1, side]) for side in (1, 2))
    assert_same(step(engine, a, b, op), reference.combine(a, b, op), a, b)
    a, b = (np.random.default_rng(side).bytes(80_000) for side in (3, 4))
    a, b = np.frombuffer(a, dtype), np.frombuffer(b, dtype)
    assert_same(step(engine, a, b, op), reference.combine(a, b, op), a, b)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_wrap(engine, dtype, op):
    edges = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, 0, 1], dtype)
    a = np.concatenate([reference.sample(dtype, 10_001, [8]), edges.repeat(4)])
    b = np.concatenate([reference.sample(dtype, 10_001, [9]), np.tile(edges, 4)])
    assert_same(step(engine, a, b, op), reference.combine(a, b, op), a, b)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_negative_zero_is_below_positive_zero(engine, dtype):
    a, b = np.array([0.0, -0.0], dtype), np.array([-0.0, 0.0], dtype)
    assert np.signbit(step(engine, a, b, "min").astype(np.float64)).all()
    assert not np.signbit(step(engine, a, b, "max").astype(np.float64)).any()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_nan_loses_to_a_number(engine, dtype):
    a, b = np.array([np.nan, 1.0, np.nan], dtype), np.array([2.0, np.nan, np.nan], dtype)
    for op in ("min", "max"):
        assert list(step(engine, a, b, op)[:2]) == [2.0, 1.0]
        assert np.isnan(step(engine, a, b, op)[2].astype(np.float64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_premultiply(engine, dtype):
    source = every(dtype) if dtype in NARROW else reference.sample(dtype, 4099, [6])
    for scalar in reference.sample(dtype, 50, [7]):
        factor = np.array([scalar], dtype)
        wanted = reference.combine(source, factor, "prod")
        assert_same(scale(engine, source, factor), wanted, source)
        inside = source.copy()
        assert_same(scale(engine, inside, factor, into=inside), wanted, source)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_average_factor(engine, dtype):
    for ranks in [*range(1, 1025), 100_003]:
        factor = np.zeros(1, dtype)
        engine.host_average_factor(pointer(factor), DTYPES.index(dtype), ranks)
        assert_same(factor, reference.average_factor(dtype, ranks))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_divide_truncates(engine, dtype):
    edges = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, 0], dtype)
    values = np.concatenate([edges, reference.sample(dtype, 5000, [3])])
    for ranks in (1, 2, 3, 7, 8, 127, 128, 300, 1 << 20):
        result = values.copy()
        count = ctypes.c_size_t(values.size)
        engine.host_divide(pointer(result), count, DTYPES.index(dtype), ranks)
        wanted = [int(abs(int(v)) // ranks) * (-1 if v < 0 else 1) for v in values]
        assert [int(v) for v in result] == wanted


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_length_and_any_address(engine, dtype):
    # Tails shorter than a vector, and slices of a byte buffer; what lies beyond must stay.
    for count, offset in [(0, 0), (1, 1), (2, 3), (7, 0), (15, 5), (33, 1), (67, 7)]:
        a, b = (reference.sample(dtype, count, [4, side]) for side in (0, 1))
        raw = np.full(2 * offset + 2 * a.nbytes + 16, 0xA5, np.uint8)
        inner = raw[offset : offset + a.nbytes]
        inner[:] = a.view(np.uint8)
        size, code = ctypes.c_size_t(count), DTYPES.index(dtype)
        engine.host_reduce(pointer(inner), pointer(inner), pointer(b), size, code, 0)
        assert_same(inner.copy().view(dtype), reference.combine(a, b, "sum"), a, b)
        assert (np.delete(raw, np.s_[offset : offset + a.nbytes]) == 0xA5).all()


# ---- the reference itself, where a library or NCCL's rules have the answer -----------------


def test_reference_agrees_with_the_libraries():
    half = every(np.dtype(np.float16))
    other = np.random.default_rng(2).permutation(half)
    with np.errstate(all="ignore"):
        numpy_sum, brain = half + other, half.view(BFLOAT16) + other.view(BFLOAT16)
    number = ~np.isnan(numpy_sum)
    assert same(reference.combine(half, other, "sum")[number], numpy_sum[number])
    number = ~np.isnan(brain)
    ours = reference.combine(half.view(BFLOAT16), other.view(BFLOAT16), "sum")
    assert same(ours[number], brain[number])


def test_reference_rounds_after_each_step():
    # 2048 + 1 is a tie that goes to even, twice; a wider accumulator would say 2050.
    inputs = [np.array([value], np.float16) for value in (2048, 1, 1)]
    assert reference.reduced(inputs, "sum")[0] == 2048
    # The average multiplies first: a third, rounded, three times three.
    inputs = [np.array([3], np.float16)] * 3
    third = np.float16(np.float32(1 / 3))
    assert reference.reduced(inputs, "avg")[0] == third * 3 + third * 3 + third * 3
    # Wrapping comes before dividing.
    assert reference.reduced([np.array([100], np.int8)] * 2, "avg")[0] == -28
    # fp8 saturates at every step, and through half: 448 + 448 - 448 is 0.
    inputs = [np.array([value], E4M3) for value in (448, 448, -448)]
    assert reference.reduced(inputs, "sum")[0] == 0


def test_reference_places():
    inputs = [np.arange(4, dtype=np.int32) + 10 * rank for rank in range(2)]
    table = {
        ("all_gather", 0): [0, 1, 2, 3, 10, 11, 12, 13],
        ("reduce_scatter", 1): [14, 16],
        ("all_to_all", 0): [0, 1, 10, 11],
        ("all_to_all", 1): [2, 3, 12, 13],
        ("scatter", 0): [10, 11],
        ("broadcast", 0): [10, 11, 12, 13],
        ("reduce", 1): [10, 12, 14, 16],
        ("gather", 1): [0, 1, 2, 3, 10, 11, 12, 13],
    }
    for (operation, rank), wanted in table.items():
        assert list(reference.expected(operation, inputs, "sum", 1, rank)) == wanted
    for operation in ("reduce", "gather"):
        assert reference.expected(operation, inputs, "sum", 1, 0) is None


def test_comparison_sees_one_bit():
    for dtype in DTYPES:
        array = reference.sample(dtype, 64, [1])
        assert same(array, array.copy())
        other = array.copy()
        bits(other)[5] ^= 1
        assert not same(other, array)
    zero = np.zeros(1)
    assert not same(zero, -zero)
    assert same(np.array([np.nan]), -np.array([np.nan]))


# ---- copies past the caches ----------------------------------------------------------------


COPIES = {"x86_64": ["avx512", "sse2"], "aarch64": ["neon"]}.get(os.uname().machine, ["plain"])


@pytest.fixture(params=COPIES)
def copies(build, request):
    """Return the library, told to use one of its copies."""
    build.host_copy_choose.restype = ctypes.c_bool
    if not build.host_copy_choose(request.param.encode()):
        pytest.skip(f"this processor has no {request.param}")
    return build


# Less than a line, lines, what is left of them; buffers that begin in the middle of one.
@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 200, 4096, 10_007])
@pytest.mark.parametrize("skew", [0, 1, 63])
def test_copies_write_what_they_should_and_nothing_else(copies, nbytes, skew):
    source = np.frombuffer(np.random.default_rng(nbytes).bytes(nbytes + skew), np.uint8)[skew:]
    once, twice, slot = (np.full(nbytes + 256, 0x5A, np.uint8) for _ in range(3))
    size = ctypes.c_size_t(nbytes)
    copies.host_copy_past(pointer(once[64 + skew :]), pointer(source), size)
    copies.host_copy_twice(
        pointer(slot[65:]), pointer(twice[64 + skew :]), pointer(source), size
    )
    for found, begin in ((once, 64 + skew), (twice, 64 + skew), (slot, 65)):
        wanted = np.full(nbytes + 256, 0x5A, np.uint8)
        wanted[begin : begin + nbytes] = source
        assert (found == wanted).all()
