"""Rank functions of the tests of collectives: the table of plan.py on a communicator."""

from __future__ import annotations

from typing import Any

import plan
from plan import Case

import pynccl

AT_ONCE = 8
"""Operations that are issued before the first of them is awaited."""


def issue(comm: Any, case: Case) -> Any:
    """Call the operation of a case; return its Work."""
    chosen = case.combination
    call = getattr(comm, chosen.operation)
    options: dict[str, Any] = {}
    if chosen.operation in plan.REDUCING:
        options["op"] = chosen.op
    if chosen.operation in plan.ROOTED:
        options["root"] = chosen.root
    if chosen.placement == "out" or (
        chosen.placement == "in place" and case.send is not case.recv
    ):
        options["out"] = case.recv
    return call(case.send, **options)


async def collectives(comm: Any, seed: str, complete: bool) -> list[str]:
    """Run the table, and return what was wrong.

    A third of it is awaited one by one, a third issued ahead, a third issued in groups.
    """
    table = plan.combinations if complete else plan.sample
    faults: list[str] = []
    chosen = table(comm.size, seed)
    for first in range(0, len(chosen), AT_ONCE):
        some = chosen[first : first + AT_ONCE]
        cases = [Case(combination, comm.rank, comm.size) for combination in some]
        way = first // AT_ONCE % 3
        if way == 0:
            results = [await issue(comm, case) for case in cases]
        elif way == 1:
            works = [issue(comm, case) for case in cases]
            results = [await work for work in works]
        else:
            async with pynccl.group():
                works = [issue(comm, case) for case in cases]
            results = [work.result() for work in works]
        found = [case.fault(result) for case, result in zip(cases, results, strict=True)]
        faults += [fault for fault in found if fault is not None]
        if len(faults) > 20:
            break
    return faults
