"""An exception where many ends are told, a Ctrl-C for one, loses none of the other ends."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import weakref
from typing import Any

import numpy as np
import pytest

import pynccl
from pynccl import errors, testing


class Loop(asyncio.SelectorEventLoop):
    """Ctrl-C may strike as the next callback is scheduled, which is then lost."""

    strike = False

    def call_soon(self, *arguments: Any, **keywords: Any) -> asyncio.Handle:
        if self.strike:
            self.strike = False
            raise KeyboardInterrupt
        return super().call_soon(*arguments, **keywords)


def test_ctrl_c_among_awaits_that_end_together_loses_no_other(temper: str) -> None:
    loop = Loop()

    async def begin() -> tuple[Any, list[asyncio.Task[Any]]]:
        (comm,) = await pynccl.create_all(["cpu:0"])

        async def one() -> None:
            await comm.all_reduce(np.ones(4, np.float32))

        with testing.faults("op:delay=50ms"):
            tasks = [loop.create_task(one()) for _ in range(4)]
            await asyncio.sleep(0.01)
        return comm, tasks

    async def go_on() -> None:
        ctypes.PyDLL(None).usleep(500_000)  # all have ended when the loop looks
        loop.strike = True
        await asyncio.wait(tasks)

    comm, tasks = loop.run_until_complete(begin())
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(go_on())
    done, pending = loop.run_until_complete(asyncio.wait(tasks, timeout=1))
    assert (len(done), len(pending)) == (3, 1)
    for task in pending:
        task.cancel()
    loop.run_until_complete(comm.close())
    loop.close()


class Trouble(Exception):
    """In the place of DeadlineError: one that cannot be made."""

    asked = 0

    def __init__(self, *_words: Any, **_facts: Any) -> None:
        Trouble.asked += 1
        raise ZeroDivisionError


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_among_operations_that_end_together_lets_go_of_them_all(
    temper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.SelectorEventLoop()
    loop.set_exception_handler(lambda _loop, _context: None)
    dead = []

    async def main() -> None:
        comms: list[Any] = await pynccl.create_all(["cpu:0", "cpu:1"])
        monkeypatch.setattr(errors, "DeadlineError", Trouble)
        for _ in range(4):
            x = np.ones(4, np.float32)
            dead.append(weakref.ref(x))
            comms[0].all_reduce(x, timeout=0.05)
            del x
        await asyncio.sleep(0.2)
        aborts = [loop.create_task(comm.abort()) for comm in comms]
        await asyncio.sleep(0)
        ctypes.PyDLL(None).usleep(500_000)  # it holds the interpreter, so that nobody drains
        await asyncio.wait(aborts)
        await asyncio.sleep(0.1)

    Trouble.asked = 0
    loop.run_until_complete(main())
    loop.close()
    monkeypatch.undo()
    gc.collect()
    assert Trouble.asked > 0
    assert [ref() for ref in dead] == [None] * 4
