"""Wrong calls: the documented exception, nothing issued, and the next correct call works."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from cliques import abort, all_reduced, arrays, clique, reduce_all

import pynccl
from pynccl import ConfigError, UsageError, testing

X = np.zeros(4, np.float32)

WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    **{
        f"{what} {value!r}": (
            partial(call, value),
            ConfigError,
            rf"{what} must be a rank from 0 to 1, not {value!r}",
        )
        for what, call in {
            "root": lambda value, c: c.broadcast(X, value),
            "peer": lambda value, c: c.send(X, value),
        }.items()
        for value in (-1, 2, True, 1.0, 0.5, "1", None)
    },
    "root of reduce": (lambda c: c.reduce(X, root=7), ConfigError, "root must be"),
    "root of gather": (lambda c: c.gather(X, root=-2), ConfigError, "root must be"),
    "root of scatter": (lambda c: c.scatter(X, root=2), ConfigError, "root must be"),
    "peer of recv": (lambda c: c.recv(X, 2), ConfigError, "peer must be"),
    "op mean": (
        lambda c: c.all_reduce(X, op="mean"),
        ConfigError,
        "op must be one of sum, prod, max, min, avg, any, all, or a pre_mul_sum, not 'mean'",
    ),
    "op 0": (lambda c: c.all_reduce(X, op=0), ConfigError, "op must be one of"),
    "op None": (lambda c: c.reduce(X, op=None), ConfigError, "op must be one of"),
    "op list": (lambda c: c.reduce_scatter(X, op=["sum"]), ConfigError, "op must be one of"),
    "timeout -1": (
        lambda c: c.all_reduce(X, timeout=-1),
        ConfigError,
        "time-out is a number of seconds that is not negative, not -1",
    ),
    "timeout nan": (lambda c: c.barrier(timeout=math.nan), ConfigError, "time-out.*not nan"),
    "timeout word": (lambda c: c.barrier(timeout="soon"), ConfigError, "time-out.*'soon'"),
    "default timeout": (
        lambda c: setattr(c, "timeout", -0.5),
        ConfigError,
        "time-out.*not -0.5",
    ),
    "spin": (lambda c: setattr(c, "spin_us", -1), ConfigError, "spin_us must be 0 to 1000"),
    "current stream": (
        lambda c: c.all_reduce(X, stream="current"),
        UsageError,
        "a host array has no stream",
    ),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_call_is_refused(temper: str, name: str) -> None:
    call, kind, message = WRONG[name]
    async with clique(2) as comms:
        issued = [comm.issued for comm in comms]
        with testing.journal() as journal, pytest.raises(kind, match=message):
            call(comms[0])
        assert journal.nccl() == []
        assert [comm.issued for comm in comms] == issued
        await all_reduced(comms)


async def test_a_numpy_integer_is_a_rank(temper: str) -> None:
    async with clique(2) as comms:
        xs = arrays(comms)
        one = np.int64(1)
        await pynccl.wait(*(c.broadcast(x, one) for c, x in zip(comms, xs, strict=True)))
        assert xs[0].tolist() == [2.0] * 4


@pytest.mark.parametrize("color", [-1, -7, 1.5, "red", 2**31])
async def test_a_wrong_color(temper: str, color: Any) -> None:
    async with clique(2) as comms:
        with (
            testing.journal() as journal,
            pytest.raises(ConfigError, match=f"color.*{color!r}"),
        ):
            await comms[0].split(color)
        assert journal.nccl() == []
        await all_reduced(comms)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"ctas": 4}, "config has no setting 'ctas'; it has .*max_ctas"),
        ({"max_ctas": "many"}, "max_ctas.*'many'"),
        ({"min_ctas": None}, "min_ctas.*None"),
    ],
    ids=["unknown", "a word", "None"],
)
async def test_a_wrong_setting(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await pynccl.create_all(["cpu:0"], config=config)
    async with clique(2) as comms:
        with pytest.raises(ConfigError, match=message):
            await comms[0].split(0, config=config)
        await all_reduced(comms)


@pytest.mark.parametrize(
    ("size", "rank", "id_bytes", "message"),
    [
        (2, 2, 128, "rank 2 of 2 ranks does not exist"),
        (2, -1, 128, "rank -1 of 2"),
        (0, 0, 128, "rank 0 of 0"),
        (1, 0, 127, "unique id has 128 bytes, not 127"),
        (1, 0, 0, "unique id has 128 bytes, not 0"),
    ],
)
async def test_a_wrong_place(size: int, rank: int, id_bytes: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await pynccl.Communicator.create(size, rank, bytes(id_bytes), device="cpu")


@pytest.mark.parametrize("given", ["x" * 128, bytearray(128), None, 5])
async def test_a_unique_id_is_bytes(given: Any) -> None:
    with pytest.raises((ConfigError, TypeError), match="bytes"):
        await pynccl.Communicator.create(1, 0, given, device="cpu")


async def test_a_wrong_timeout_of_a_creation() -> None:
    unique_id = await pynccl.unique_id("cpu")
    create = pynccl.Communicator.create
    with pytest.raises(ConfigError, match="time-out"):
        await create(1, 0, unique_id, device="cpu", timeout=math.nan)
    await (await create(1, 0, unique_id, device="cpu")).close()  # the id is as good as new


async def test_a_closed_communicator(temper: str) -> None:
    async with clique(2) as comms:
        pass
    with testing.journal() as journal:
        with pytest.raises(UsageError, match="the communicator is closed"):
            comms[0].all_reduce(X)
        with pytest.raises(UsageError, match="closed"):
            await comms[0].split(0)
        await comms[0].close()  # again: nothing happens
        assert await comms[0].abort() == "clean"
    assert journal.nccl() == []


async def test_a_failed_communicator(temper: str) -> None:
    async with clique(2) as comms:
        with pytest.raises(pynccl.DeadlineError):
            await comms[0].all_reduce(arrays(comms)[0], timeout=0.01)
        assert comms[0].state == "failed"
        with testing.journal() as journal:
            with pytest.raises(UsageError, match=r"has failed.*all_reduce.*deadline") as wrong:
                comms[0].all_reduce(X)
            with pytest.raises(UsageError, match="has failed"):
                await comms[0].split(0)
        assert isinstance(wrong.value.__cause__, pynccl.DeadlineError)
        assert journal.nccl() == []
        await abort(comms)


# ---- groups ----------------------------------------------------------------------------------


async def test_awaiting_inside_an_open_group(temper: str) -> None:
    """It would never end: nothing of a group is issued before its block ends."""
    async with clique(1) as comms:
        x = arrays(comms)[0]
        with pytest.raises(UsageError, match="is still open"):
            async with pynccl.group():
                await comms[0].all_reduce(x)
        for ask in ("future", "wait"):
            with pytest.raises(UsageError, match=r"still open|event loop"):
                async with pynccl.group():
                    getattr(comms[0].all_reduce(x), ask)()
        async with pynccl.group():
            work = comms[0].all_reduce(x)
            assert not work.done()
            with pytest.raises(UsageError, match="has not ended"):
                work.result()
        assert work.done()
        await all_reduced(comms)


async def test_a_group_that_raises_issues_nothing(temper: str) -> None:
    async with clique(2, warm=True) as comms:
        xs = arrays(comms)
        works: list[Any] = []
        with (
            testing.journal() as journal,
            pytest.raises(ZeroDivisionError),
        ):
            async with pynccl.group():
                works += reduce_all(comms, xs)
                works.append(1 / 0)
        assert journal.nccl() == []
        assert [x[0] for x in xs] == [1.0, 2.0]
        for work in works:
            with pytest.raises(UsageError, match=r"never issued: the group.*exception"):
                await work
        await all_reduced(comms)


async def test_a_wrong_call_in_a_group_issues_nothing_of_it(temper: str) -> None:
    async with clique(2, warm=True) as comms:
        with (
            testing.journal() as journal,
            pytest.raises(ConfigError, match="peer"),
        ):
            async with pynccl.group():
                comms[0].send(X, 1)
                comms[1].recv(X, 9)
        assert journal.nccl() == []
        await all_reduced(comms)


async def test_a_group_serves_once(temper: str) -> None:
    async with clique(1) as comms:
        group = pynccl.group()
        with pytest.raises(UsageError, match="when its block has ended"):
            await group
        with group:
            comms[0].barrier()
        with pytest.raises(UsageError, match="can be used once"), group:
            pass
        assert await group == [None]
        assert await group == [None]
        await all_reduced(comms)


async def test_a_group_with_a_closed_communicator(temper: str) -> None:
    async with clique(1) as open_ones:
        async with clique(1) as closed_ones:
            pass
        with (
            testing.journal() as journal,
            pytest.raises(UsageError, match="is closed"),
        ):
            async with pynccl.group():
                good = open_ones[0].all_reduce(X)
                closed_ones[0].all_reduce(X)
        assert journal.nccl() == []
        with pytest.raises(UsageError, match="never issued"):
            await good
        await all_reduced(open_ones)


async def test_another_task_is_not_in_the_group(temper: str) -> None:
    async with clique(1, warm=True) as comms:
        async with pynccl.group() as group:
            await asyncio.create_task(all_reduced(comms))
            comms[0].barrier()
        assert len(group.works) == 1


async def test_wait_on_a_loop_thread(temper: str) -> None:
    async with clique(1) as comms:
        work = comms[0].all_reduce(arrays(comms)[0])
        with pytest.raises(UsageError, match=r"would block the event loop.*await"):
            work.wait()
        result = await asyncio.to_thread(work.wait)
        assert result.tolist() == [1.0] * 4


async def test_a_work_is_made_by_a_call_only() -> None:
    with pytest.raises(TypeError, match="calling an operation"):
        pynccl.Work()


@pytest.mark.parametrize("cls", [pynccl.Communicator, pynccl.Stream, pynccl.Event])
def test_help_shows_nothing_that_is_not_for_users(cls: type) -> None:
    assert [name for name in dir(cls) if name.startswith("native")] == []
