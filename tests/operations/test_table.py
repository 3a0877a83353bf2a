"""The README's table of libraries, dtypes and operations: made by running every cell.

`pytest tests/operations --write-table` writes it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import libraries
import numpy as np
import pytest
from cliques import all_reduced, clique
from libraries import DTYPES, Library

import pynccl
from pynccl import InvalidBufferError, testing
from pynccl.types import BOOLEAN_REDUCTIONS, REDUCTIONS

README = Path(__file__).parents[2] / "README.md"
MARKED = re.compile(r"(<!-- dtypes -->\n).*?(\n<!-- end -->)", re.S)
RANKS = 2
OPS = (*REDUCTIONS, *(op for op in BOOLEAN_REDUCTIONS if op not in REDUCTIONS))


def is_opaque(dtype: np.dtype[Any]) -> bool:
    """Whether there is nothing to compute with."""
    return dtype.names is not None or dtype.kind in "SM"


def inputs(dtype: np.dtype[Any]) -> list[libraries.Array]:
    """Rows that differ from rank to rank, and whose reductions every type holds exactly."""
    if is_opaque(dtype):
        raw = np.arange(RANKS * 4 * dtype.itemsize, dtype=np.uint8)
        return list(raw.view(dtype).reshape(RANKS, 4))
    values = np.array([[1, 3, 0, 2], [3, 1, 2, 0]])
    return list((values % 2 if dtype == np.bool_ else values).astype(dtype))


def moved(xs: list[libraries.Array]) -> dict[str, list[Any]]:
    """What each operation that moves data gives each rank, of such inputs."""
    joined = np.concatenate(xs)
    exchanged = [np.concatenate([x[2 * r : 2 * r + 2] for x in xs]) for r in range(RANKS)]
    return {
        "broadcast": [xs[0]] * RANKS,
        "all_gather": [joined] * RANKS,
        "all_to_all": exchanged,
        "gather": [joined, None],
        "scatter": [xs[0][:2], xs[0][2:]],
        "send": [None, xs[0]],
        "all_gather_v": [joined] * RANKS,
        "all_to_all_v": exchanged,
        "gather_v": [joined, None],
        "scatter_v": [xs[0][:2], xs[0][2:]],
    }


def reduced(xs: list[libraries.Array], op: str) -> libraries.Array:
    """The reduction over the ranks, by NumPy."""
    dtype = xs[0].dtype
    both = np.stack(xs)
    if dtype == np.bool_:
        found = both.all(0) if op in ("all", "min") else both.any(0)
    elif op == "avg":
        exact = both.astype(np.complex128 if dtype.kind == "c" else np.float64).sum(0) / RANKS
        found = exact
    else:
        wide = both.astype(np.float64) if dtype.kind not in "iuc" else both
        found = {"sum": np.sum, "prod": np.prod, "min": np.min, "max": np.max}[op](wide, 0)
    made: libraries.Array = found.astype(dtype)
    return made


def can_say(dtype: np.dtype[Any], op: str) -> bool:
    """Whether there is a result that NumPy knows; if not, the call has to be refused."""
    return not is_opaque(dtype) and (op in REDUCTIONS or dtype == np.bool_)


def call(comm: Any, operation: str, xs: list[Any], small: Any, op: str | None) -> Any:
    """Call an operation on one rank; `small` is an array of half the rows, to be written."""
    x = xs[comm.rank]
    if operation == "send":
        return comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)
    if operation == "broadcast":
        return comm.broadcast(x, out=None)
    if operation in ("scatter", "scatter_v"):
        given = {"counts": [2, 2]} if operation == "scatter_v" else {}
        if comm.rank == 0:
            return getattr(comm, operation)(x, **given)
        return getattr(comm, operation)(None, out=small, **given)
    if operation == "all_to_all_v":
        return comm.all_to_all_v(x, [2, 2])
    if operation == "reduce_scatter_v":
        return comm.reduce_scatter_v(x, [2, 2], op=op)
    return getattr(comm, operation)(x) if op is None else getattr(comm, operation)(x, op=op)


async def runs(
    comms: list[Any],
    library: Library,
    operation: str,
    xs: list[Any],
    wanted: list[Any],
    op: str | None = None,
) -> bool:
    """Whether an operation takes such arrays; what it gives must be right then."""
    arrays = [library.make(x) for x in xs]
    small = library.make(xs[1][:2])
    if library.name == "JAX" and operation in ("send", "scatter", "scatter_v"):
        # Nothing writes into an array of JAX: its values go to one that NumPy can write.
        small = np.empty_like(xs[1][:2])
        arrays[1] = np.empty_like(xs[1]) if operation == "send" else arrays[1]
    before = [comm.issued for comm in comms]
    try:
        works = [call(comm, operation, arrays, small, op) for comm in comms]
    except InvalidBufferError as refusal:
        text = str(refusal)
    else:
        text = ""
    if text:
        assert [comm.issued for comm in comms] == before
        assert op is None or "reduce" in text
        return False
    results = await pynccl.wait(*works)
    for result, right in zip(results, wanted, strict=True):
        assert (result is None) == (right is None)
        if right is not None:
            in_numpy = library.name == "JAX" and type(result) is np.ndarray
            found = result.tobytes() if in_numpy else libraries.bytes_of(library, result)
            assert found == right.tobytes(), (library.name, operation, op, xs[0].dtype)
            assert in_numpy or isinstance(result, library.kind)
    return True


async def cell(comms: list[Any], library: Library, dtype: np.dtype[Any]) -> str:
    """What one library's arrays of one dtype can do, in words."""
    xs = inputs(dtype)
    try:
        library.make(xs[0])
    except (AttributeError, TypeError, NotImplementedError):
        return "-"
    answers = {
        name: await runs(comms, library, name, xs, wanted) for name, wanted in moved(xs).items()
    }
    assert len(set(answers.values())) == 1, answers
    if not all(answers.values()):
        return "refused"
    ops = []
    for op in OPS:
        found = set()
        for name in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_v"):
            whole = reduced(xs, op) if can_say(dtype, op) else xs[0]
            wanted = {
                "all_reduce": [whole] * RANKS,
                "reduce": [whole, None],
            }.get(name, [whole[:2], whole[2:]])
            found.add(await runs(comms, library, name, xs, wanted, op))
        assert len(found) == 1, (op, dtype)
        if found == {True}:
            ops.append(op)
    return ", ".join(["moved", *ops])


async def table() -> str:
    """The table as the README has it: dtypes that behave alike on one line."""
    all_of_them = libraries.libraries()
    rows: dict[tuple[str, ...], list[str]] = {}
    async with clique(RANKS) as comms:
        for name, dtype in DTYPES.items():
            cells = tuple([await cell(comms, library, dtype) for library in all_of_them])
            rows.setdefault(cells, []).append(name)
        await all_reduced(comms)
    head = ["dtype", *(library.name for library in all_of_them)]
    lines = [head, ["---"] * len(head)]
    lines += [[", ".join(names), *cells] for cells, names in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
async def test_the_table_in_the_readme(temper: str, writes_table: bool) -> None:
    made = await table()
    text = README.read_text("utf-8")
    found = MARKED.search(text)
    assert found, "the README has no table between its marks"
    if writes_table:
        README.write_text(MARKED.sub(lambda m: f"{m[1]}{made}{m[2]}", text), "utf-8")
    else:
        assert found[0] == f"{found[1]}{made}{found[2]}"


async def test_a_cell_that_is_wrong_is_noticed(temper: str) -> None:
    """The comparison can fail: a result is compared with what it should not be."""
    numpy = libraries.libraries()[0]
    xs = inputs(np.dtype(np.float32))
    async with clique(RANKS) as comms:
        with pytest.raises(AssertionError):
            await runs(comms, numpy, "all_reduce", xs, [reduced(xs, "prod")] * RANKS, "sum")
        with testing.journal() as journal:
            assert not await runs(comms, numpy, "all_reduce", xs, [], "any")
        assert journal.nccl() == []
