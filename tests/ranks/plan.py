"""The table of collectives: what a rank passes in each case, and what it must find afterwards.

A combination is operation, operator, dtype, number of elements, placement of the buffers, and
root. `combinations` lists all of them, `sample` a fixed choice that meets every operation,
operator and dtype. A `Case` is one combination as one rank sees it.

Buffers lie between margins and outputs are filled beforehand, so that a byte written outside,
or not written, shows. Inputs repeat a block whose length shares no factor with the chunks in
which an engine may cut a message; what a reduction gives repeats likewise and is computed once
a block.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal

import numpy as np
from support import reference
from support.reference import DTYPES, OPS, REDUCING, ROOTED, Array, Op, Operation

COUNTS = (0, 1, 7, 1024, 1000003)
MANY = COUNTS[-1]
PERIOD = 10007
MARGIN = 64
FILL = 0xA5

Placement = Literal["in place", "out", "fresh"]
#: `fresh` leaves the output to the callee, where the shape changes; all_to_all has no in place.
PLACEMENTS: dict[Operation, tuple[Placement, ...]] = {
    "all_reduce": ("in place", "out"),
    "broadcast": ("in place", "out"),
    "reduce": ("in place", "out"),
    "all_gather": ("in place", "out", "fresh"),
    "reduce_scatter": ("in place", "out", "fresh"),
    "all_to_all": ("out", "fresh"),
    "gather": ("in place", "out", "fresh"),
    "scatter": ("in place", "out", "fresh"),
}
#: Whether a rank gives, and takes, one block or one block for each rank.
SPREAD_SEND = {"reduce_scatter", "all_to_all", "scatter"}
SPREAD_RECV = {"all_gather", "all_to_all", "gather"}


@dataclass(frozen=True)
class Combination:
    operation: Operation
    op: Op
    dtype: int
    """NCCL's code."""
    count: int
    """Elements in a block; the largest number is that of all blocks together."""
    placement: Placement
    root: int

    def __str__(self) -> str:
        dtype = DTYPES[self.dtype]
        rooted = f" root {self.root}" if self.operation in ROOTED else ""
        reducing = f" {self.op}" if self.operation in REDUCING else ""
        return f"{self.operation}{reducing} {dtype} x {self.count} {self.placement}{rooted}"


def _kinds(ranks: int) -> Iterator[tuple[Operation, Op, int]]:
    for operation, dtype in product(PLACEMENTS, range(len(DTYPES))):
        for op in OPS if operation in REDUCING else OPS[:1]:
            # A one-rank average of fp8 is NCCL's gap: an error, see the tests of errors.
            if not (ranks == 1 and op == "avg" and DTYPES[dtype] in reference.LARGEST):
                yield operation, op, dtype


def combinations(ranks: int, seed: str) -> list[Combination]:
    """List all combinations, in an order and with roots that the seed decides."""
    choose = random.Random(seed)
    found = [
        Combination(operation, op, dtype, count, placement, choose.randrange(ranks))
        for operation, op, dtype in _kinds(ranks)
        for count, placement in product(COUNTS, PLACEMENTS[operation])
    ]
    choose.shuffle(found)
    return found


def sample(ranks: int, seed: str, many: int = 6) -> list[Combination]:
    """List one combination of each operation, operator and dtype, with `many` large ones."""
    choose = random.Random(seed)
    kinds = list(_kinds(ranks))
    choose.shuffle(kinds)
    return [
        Combination(
            operation,
            op,
            dtype,
            MANY if place < many else choose.choice(COUNTS[:-1]),
            choose.choice(PLACEMENTS[operation]),
            choose.randrange(ranks),
        )
        for place, (operation, op, dtype) in enumerate(kinds)
    ]


@lru_cache(maxsize=256)
def block(dtype: int, rank: int) -> Array:
    """Return the elements that a rank's inputs repeat."""
    return reference.sample(DTYPES[dtype], PERIOD, [dtype, rank])


@lru_cache(maxsize=128)
def reduced_block(dtype: int, op: Op, ranks: int) -> Array:
    """Return what the reduction of all ranks' inputs repeats."""
    return reference.reduced([block(dtype, rank) for rank in range(ranks)], op)


class Case:
    """One combination as one rank sees it.

    `send` is what the rank gives and `recv` where it takes, None where it does not or where, as
    `fresh` says, it is to be given an array. After the operation, `fault` says what is wrong.
    """

    def __init__(self, combination: Combination, rank: int, ranks: int) -> None:
        self.combination, self.rank, self.ranks = combination, rank, ranks
        operation, how, root = combination.operation, combination.placement, combination.root
        # The count of a call: elements in a block.
        self.count = combination.count // (ranks if combination.count == MANY else 1)
        # Off the root, an out-of-place broadcast has an input too, which must not matter.
        gives_anyway = operation == "broadcast" and how == "out"
        self.gives = operation not in ("broadcast", "scatter") or rank == root or gives_anyway
        self.takes = operation not in ("reduce", "gather") or rank == root
        # Only the root of a scatter knows what a fresh array would be.
        self.fresh = how == "fresh" and self.takes and (operation != "scatter" or rank == root)
        self._own = slice(rank * self.count, (rank + 1) * self.count)
        self._raw: list[Array] = []
        self.send: Array | None = None
        self.recv: Array | None = None
        self._place()
        self._given = None if self.send is None else self.send.copy()

    def _place(self) -> None:
        sends, takes = self._size(SPREAD_SEND), self._size(SPREAD_RECV)
        if self.gives and self.takes and self.combination.placement == "in place":
            whole = self._filled(max(sends, takes))
            self.send = whole[self._own] if sends < takes else whole
            self.recv = whole[self._own] if takes < sends else whole
        else:
            self.send = self._filled(sends) if self.gives else None
            self.recv = self._filled(takes) if self.takes and not self.fresh else None
        if self.send is not None:
            self.send[:] = self._input(self.rank)

    def _size(self, spread: set[str]) -> int:
        return self.count * (self.ranks if self.combination.operation in spread else 1)

    def _filled(self, count: int) -> Array:
        """Return an array between margins; outputs show what was not written."""
        dtype = DTYPES[self.combination.dtype]
        size = count * dtype.itemsize
        raw = np.full(size + 2 * MARGIN, FILL, np.uint8)
        self._raw.append(raw)
        return raw[MARGIN : MARGIN + size].view(dtype)

    def _input(self, rank: int) -> Array:
        return np.resize(block(self.combination.dtype, rank), self._size(SPREAD_SEND))

    def expected(self) -> Array | None:
        """Return what the rank must hold afterwards; None where it takes nothing."""
        chosen = self.combination
        if chosen.operation in REDUCING:
            if not self.takes:
                return None
            reduced = reduced_block(chosen.dtype, chosen.op, self.ranks)
            whole = np.resize(reduced, self._size(SPREAD_SEND))
            return whole[self._own] if chosen.operation == "reduce_scatter" else whole
        inputs = [self._input(rank) for rank in range(self.ranks)]
        return reference.expected(chosen.operation, inputs, chosen.op, chosen.root, self.rank)

    def fault(self, given: Array | None) -> str | None:
        """Say what is wrong with the buffers, and with the array that was given back."""
        wanted = self.expected()
        if self.fresh == (given is self.recv):
            return f"{self}: the result given back is not the one asked for"
        if wanted is not None:
            assert given is not None
            actual = given.reshape(-1)
            if not reference.same(actual, wanted):
                return f"{self}: {_difference(actual, wanted)}"
        for raw in self._raw:
            if (raw[:MARGIN] != FILL).any() or (raw[-MARGIN:] != FILL).any():
                return f"{self}: wrote outside the buffer"
        if self.send is not None and self._given is not None:
            kept = self.send.copy()
            if self.recv is not None and np.may_share_memory(self.send, self.recv):
                changing = self._own if self.send.size > self.recv.size else slice(None)
                kept[changing] = self._given[changing]
            if not np.array_equal(kept.view(np.uint8), self._given.view(np.uint8)):
                return f"{self}: the input has changed"
        return None

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks}: {self.combination}"


def _difference(actual: Array, wanted: Array) -> str:
    if actual.dtype != wanted.dtype or actual.shape != wanted.shape:
        return f"{actual.dtype} {actual.shape}, not {wanted.dtype} {wanted.shape}"
    places = np.flatnonzero(reference.bits(actual) != reference.bits(wanted))
    at = int(places[0])
    return (
        f"{places.size} of {wanted.size} differ, first [{at}]: {actual[at]}, not {wanted[at]}"
    )
