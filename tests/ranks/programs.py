"""Rank functions: the table of plan.py on a communicator, messages, barriers."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import numpy as np
import plan
from plan import DTYPES, Case
from support import reference

import pynccl

AT_ONCE = 8
"""Operations that are issued before the first of them is awaited."""
MESSAGE_COUNTS = (0, 1, 7, 1024, 100_003)


def issue(comm: Any, case: Case) -> Any:
    """Call the operation of a case; return its Work."""
    chosen = case.combination
    call = getattr(comm, chosen.operation)
    options: dict[str, Any] = {}
    if chosen.operation in plan.REDUCING:
        options["op"] = chosen.op
    if chosen.operation in plan.ROOTED:
        options["root"] = chosen.root
    array = case.recv if case.send is None and chosen.operation == "broadcast" else case.send
    keeps_shape = "fresh" not in plan.PLACEMENTS[chosen.operation]
    if case.recv is not None and not (keeps_shape and case.recv is array):
        options["out"] = case.recv
    return call(array, **options)


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
    return faults[:20]  # not fewer operations: the others would wait


async def messages(comm: Any, seed: int) -> list[str]:
    """Send around the ring in groups, then from each rank to each; return what was wrong."""
    faults: list[str] = []

    def check(what: str, actual: plan.Array, wanted: plan.Array) -> None:
        if not reference.same(actual, wanted):
            faults.append(f"rank {comm.rank} of {comm.size}: {what}")

    def payload(dtype: int, count: int, sender: int) -> plan.Array:
        return reference.sample(DTYPES[dtype], count, [seed, dtype, count, sender])

    following, leading = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for dtype, count in itertools.product(range(len(DTYPES)), MESSAGE_COUNTS):
        arriving = np.zeros(count, DTYPES[dtype])
        async with pynccl.group():
            comm.send(payload(dtype, count, comm.rank), following)
            comm.recv(arriving, leading)
        check(f"{DTYPES[dtype]} x {count}", arriving, payload(dtype, count, leading))

    # Several to one peer in a group: they keep their order.
    inbox = [np.zeros(count, np.float32) for count in MESSAGE_COUNTS]
    async with pynccl.group():
        for count, into in zip(MESSAGE_COUNTS, inbox, strict=True):
            comm.send(payload(7, count, comm.rank), following)
            comm.recv(into, leading)
    for count, into in zip(MESSAGE_COUNTS, inbox, strict=True):
        check(f"in order x {count}", into, payload(7, count, leading))

    # One pair at a time, with no group.
    for sender, receiver in itertools.permutations(range(comm.size), 2):
        for count in MESSAGE_COUNTS:
            if comm.rank == sender:
                await comm.send(payload(4, count, sender), receiver)
            elif comm.rank == receiver:
                arriving = np.zeros(count, np.int64)
                await comm.recv(arriving, sender)
                check(f"{sender} to {receiver}", arriving, payload(4, count, sender))
    return faults


async def barriers(comm: Any) -> list[list[float]]:
    """Return when this rank came to each of three barriers, and when it left."""
    times = []
    for turn in range(3):
        await asyncio.sleep(0.05 * ((comm.rank + turn) % comm.size))
        came = time.monotonic()
        await comm.barrier()
        times.append([came, time.monotonic()])
    return times


async def average_of_fp8(comm: Any) -> list[str]:
    """Return what an average of each fp8 type says; the communicator must live on."""
    answers = []
    for dtype in (reference.E4M3, reference.E5M2):
        array = np.ones(4, dtype)
        try:
            await comm.all_reduce(array, op="avg")
            answers.append("done")
        except pynccl.ConfigError as error:
            answers.append(str(error))
        await comm.all_reduce(array)
        assert array.tolist() == [comm.size] * 4
    return answers
