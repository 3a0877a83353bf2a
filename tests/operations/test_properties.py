"""Any shape, layout, dtype and number of ranks: NumPy's result, or the documented refusal.

Where a call is refused, nothing has reached the engine, and the next call works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pynccl
from pynccl import InvalidBufferError, testing
from pynccl.types import BOOLEAN_REDUCTIONS, COMPLEX_REDUCTIONS, DTYPES, REDUCTIONS

KINDS = [
    *(np.dtype(t) for t in ("int8", "uint8", "int32", "int64", "uint64", "float32", "float64")),
    *(np.dtype(t) for t in ("bool", "int16", "complex64", "datetime64[s]", "S3", "V5")),
    *(np.dtype(getattr(ml_dtypes, t)) for t in ("bfloat16", "float8_e4m3fn", "int4")),
]
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
OPERATIONS = (*REDUCING, "broadcast", "all_gather", "all_to_all", "gather", "scatter")
DEALS = ("reduce_scatter", "all_to_all", "scatter")
LAYOUTS = ("C", "F", "every other", "reversed", "inner")
RANKS = (1, 2, 3)


class Cliques:
    """Communicators of each number of ranks, on one loop, for all examples of a test."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.comms = {
            n: self.run(pynccl.create_all([f"cpu:{i}" for i in range(n)])) for n in RANKS
        }

    def run(self, awaited: Any) -> Any:
        return self.loop.run_until_complete(awaited)

    def close(self) -> None:
        for comms in self.comms.values():
            self.run(asyncio.wait_for(_all(comm.close() for comm in comms), 20))
        self.comms.clear()
        self.loop.close()


async def _all(awaited: Iterator[Any]) -> list[Any]:
    return await asyncio.gather(*awaited)


@pytest.fixture
def cliques(temper: str) -> Iterator[Cliques]:
    made = Cliques()
    yield made
    made.close()


def laid_out(values: Any, layout: str) -> Any:
    """The same elements in other places of memory."""
    if layout == "F":
        return np.asfortranarray(values)
    if layout == "every other":
        wide = np.zeros((*values.shape[:-1], 2 * values.shape[-1]), values.dtype)
        wide[..., ::2] = values
        return wide[..., ::2]
    if layout == "reversed":
        return np.array(values[::-1])[::-1]
    if layout == "inner":
        wide = np.zeros(tuple(n + 2 for n in values.shape), values.dtype)
        inner = wide[tuple(slice(1, -1) for _ in values.shape)]
        inner[...] = values
        return inner
    return values.copy()


def takes(dtype: np.dtype[Any], op: str) -> bool:
    """Whether a reduction is documented for a dtype."""
    if dtype == np.bool_:
        return op in BOOLEAN_REDUCTIONS
    if dtype.kind == "c":
        return op in COMPLEX_REDUCTIONS
    return dtype.name in DTYPES and op in REDUCTIONS


def reduced(xs: list[Any], op: str) -> Any:
    """Small whole numbers, whose results every type holds exactly, reduced by NumPy."""
    dtype, both = xs[0].dtype, np.stack(xs)
    if dtype == np.bool_:
        return both.all(0) if op in ("all", "min") else both.any(0)
    wide = both.astype(np.complex128 if dtype.kind == "c" else np.float64)
    if op == "avg":
        return (wide.sum(0) / len(xs)).astype(dtype)
    folded = {"sum": np.sum, "prod": np.prod, "min": np.min, "max": np.max}[op](wide, 0)
    return folded.astype(dtype)


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """One operation, as all ranks call it."""
    dtype = draw(st.sampled_from(KINDS))
    return {
        "ranks": draw(st.sampled_from(RANKS)),
        "operation": draw(st.sampled_from(OPERATIONS)),
        "op": draw(st.sampled_from(["sum", "prod", "min", "max", "avg", "any", "all"])),
        "dtype": dtype,
        "shape": tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "pack": draw(st.booleans()),
        "stack": draw(st.booleans()),
        "root": draw(st.integers(0, 2)),
        "seed": draw(st.integers(0, 1 << 16)),
    }


def inputs(case: dict[str, Any]) -> list[Any]:
    """Each rank's elements: equal on all ranks for an average, so that it is exact."""
    dtype, shape = case["dtype"], case["shape"]
    made = []
    for rank in range(case["ranks"]):
        same = case["op"] == "avg"
        generator = np.random.default_rng([case["seed"], 0 if same else rank])
        if dtype.kind in "SVM" and dtype.name not in DTYPES and dtype.itemsize != 1:
            raw = generator.integers(1, 99, (*shape, dtype.itemsize), np.uint8)
            made.append(raw.view(dtype).reshape(shape) if raw.size else np.zeros(shape, dtype))
        else:
            made.append(generator.integers(0, 2, shape).astype(dtype))
    return made


def expected(case: dict[str, Any], xs: list[Any]) -> list[Any]:
    """What each rank gets."""
    n, root, operation = case["ranks"], case["root"] % case["ranks"], case["operation"]
    if operation in REDUCING:
        whole = reduced(xs, case["op"])
        if operation == "all_reduce":
            return [whole] * n
        if operation == "reduce":
            return [whole if rank == root else None for rank in range(n)]
        return np.split(whole, n)
    if operation == "broadcast":
        return [xs[root]] * n
    if operation == "scatter":
        return np.split(xs[root], n)
    if operation == "all_to_all":
        return [np.concatenate([np.split(x, n)[rank] for x in xs]) for rank in range(n)]
    joined = np.stack(xs) if case["stack"] else np.concatenate(xs)
    return [joined if operation == "all_gather" or rank == root else None for rank in range(n)]


def refusal(case: dict[str, Any], x: Any) -> str | None:
    """Why the call is refused, in words of the message; None: it is not."""
    if not x.flags.c_contiguous and not case["pack"]:
        return "must be contiguous"
    if case["operation"] in REDUCING and not takes(case["dtype"], case["op"]):
        return "reduce"
    if case["operation"] in DEALS and case["shape"][0] % case["ranks"]:
        return "divided evenly"
    return None


def call(comm: Any, case: dict[str, Any], x: Any) -> Any:
    operation = case["operation"]
    options: dict[str, Any] = {"pack": case["pack"]}
    if operation in REDUCING:
        options["op"] = case["op"]
    if operation in ("reduce", "broadcast", "gather", "scatter"):
        options["root"] = case["root"] % case["ranks"]
    if operation in ("all_gather", "gather"):
        options["stack"] = case["stack"]
    if operation == "scatter" and comm.rank != options["root"]:
        shape = (case["shape"][0] // case["ranks"], *case["shape"][1:])
        return comm.scatter(None, out=np.zeros(shape, case["dtype"]), **options)
    return getattr(comm, operation)(x, **options)


def check(cliques: Cliques, case: dict[str, Any]) -> None:
    comms = cliques.comms[case["ranks"]]
    values = inputs(case)
    xs = [laid_out(x, case["layout"]) for x in values]
    why = refusal(case, xs[0])
    if why is not None:
        issued = [comm.issued for comm in comms]
        root = comms[case["root"] % case["ranks"]]
        with testing.journal() as journal, pytest.raises(InvalidBufferError, match=why):
            call(root, case, xs[root.rank])
        assert journal.calls == []
        assert [comm.issued for comm in comms] == issued
        xs, case = [np.ones(3) for _ in comms], {**case, "operation": "all_reduce", "op": "sum"}
        values = xs = [x.astype(np.float32) for x in xs]
        values = [x.copy() for x in xs]

    async def issue() -> list[Any]:
        return await pynccl.wait(*(call(c, case, x) for c, x in zip(comms, xs, strict=True)))

    results = cliques.run(issue())
    for result, right in zip(results, expected(case, values), strict=True):
        assert (result is None) == (right is None)
        if right is not None:
            assert result.shape == right.shape
            assert result.dtype == right.dtype
            assert result.tobytes() == right.tobytes()


def test_numpys_result_or_the_documented_refusal(cliques: Cliques, long: bool) -> None:
    @settings(
        max_examples=3000 if long else 150,
        deadline=None,
        derandomize=not long,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(calls())
    def examples(case: dict[str, Any]) -> None:
        check(cliques, case)

    examples()


def test_a_wrong_result_is_noticed(cliques: Cliques, monkeypatch: pytest.MonkeyPatch) -> None:
    """The property can fail: with an operation that does something else."""
    case = {
        "ranks": 2,
        "operation": "all_reduce",
        "op": "sum",
        "dtype": np.dtype("int32"),
        "shape": (4,),
        "layout": "C",
        "pack": False,
        "stack": False,
        "root": 0,
        "seed": 3,
    }
    check(cliques, case)
    monkeypatch.setitem(globals(), "expected", lambda case, xs: [xs[0] - 1] * 2)
    with pytest.raises(AssertionError):
        check(cliques, case)
