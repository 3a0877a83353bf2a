"""pynccl.testing: what it records, what it injects, and that it puts back what it found."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from cliques import abort, all_reduced, arrays, clique, reduce_all

import pynccl
from pynccl import ConfigError, UsageError, testing


async def test_the_journal_has_what_was_called(temper: str) -> None:
    async with clique(2, warm=True) as comms:
        with testing.journal() as journal:
            await pynccl.wait(*reduce_all(comms, arrays(comms, 7), op="max"))
            assert len(journal.named("ncclAllReduce")) == 2
        before = len(journal.calls)
        await all_reduced(comms)
        assert len(journal.calls) == before  # what comes behind the block is not in it
        calls = sorted(journal.named("ncclAllReduce"), key=lambda call: call.rank)
        assert [(c.rank, c.device, c.count) for c in calls] == [(0, 0, 7), (1, 1, 7)]
        assert {(c.datatype, c.op, c.result, c.group_depth) for c in calls} == {(7, 2, 0, 0)}
        assert len({c.comm for c in calls}) == len({c.stream for c in calls}) == 2
        assert all(c.thread != threading.get_native_id() for c in calls)  # lanes
        times = [c.time_ns for c in journal.calls]
        assert 0 < max(times) - min(times) < 1e9
        long = "cuThreadExchangeStreamCaptureMode"
        assert len(journal.named(long)) > 2  # a name that the engine cuts short


async def test_one_journal_at_a_time() -> None:
    with testing.journal(), pytest.raises(UsageError, match="kept already"), testing.journal():
        pass
    with testing.journal(capacity=2) as journal:
        async with clique(1):
            pass
    assert len(journal.calls) == 2


async def test_faults_strike_inside_the_block_only(temper: str) -> None:
    async with clique(1, warm=True) as comms:
        with testing.faults("call:fail=4,name=ncclAllReduce,times=1"):
            with pytest.raises(ConfigError, match=r"ncclAllReduce.*injected fault") as raised:
                await comms[0].all_reduce(np.zeros(4))
            assert raised.value.function == "ncclAllReduce"
            assert raised.value.result == 4
            await all_reduced(comms)
        with testing.faults("call:fail=4,name=ncclAllReduce"):
            pass
        await all_reduced(comms)


async def test_several_rules_at_once(temper: str) -> None:
    async with clique(2, warm=True) as comms:
        rules = ["op:delay=50ms,rank=0", "call:fail=3,name=ncclBroadcast,rank=1"]
        with testing.faults(rules):
            start = time.perf_counter()
            await all_reduced(comms)
            assert time.perf_counter() - start >= 0.05
            with pytest.raises(pynccl.InternalError, match="ncclBroadcast"):
                await comms[1].broadcast(np.zeros(4))
        await abort(comms)


@pytest.mark.parametrize(
    "rules", ["nonsense", "op", "op:melt", "event:kill", "op:delay=5", "op:delay=5ms,moon=1"]
)
def test_a_rule_that_is_not_understood(rules: str) -> None:
    with pytest.raises(ConfigError, match="refuses faults="), testing.faults(rules):
        pass


def test_settings_are_put_back() -> None:
    with testing.settings(temper="gpulike", mode="faithful"):
        wrong = testing.settings(mode="strict", temper="lukewarm")
        with pytest.raises(ConfigError, match="refuses temper='lukewarm'"), wrong:
            pass
        assert testing._in_force["mode"] == "faithful"
        with testing.temper("quick"):
            assert testing._in_force["temper"] == "quick"
        assert testing._in_force["temper"] == "gpulike"
    assert testing._in_force["temper"] == "quick"
    wrong = testing.settings(moon="full")
    with pytest.raises(ConfigError, match="no setting 'moon'; it has mode, temper"), wrong:
        pass


async def test_live_counts_the_engines_objects() -> None:
    before = testing.live()
    async with clique(3):
        now = testing.live()
        assert now["communicators"] == before["communicators"] + 3
        assert now["streams"] == before["streams"] + 3
    assert testing.live()["communicators"] == before["communicators"]


async def test_a_busy_driver(temper: str) -> None:
    """A query waits for the driver's lock, as on a GPU whose driver is in another call."""
    async with clique(1, warm=True) as comms:
        with testing.faults("op:delay=500ms"):
            works = reduce_all(comms, arrays(comms))
            testing.hold_driver_lock(0.25)
            start = time.perf_counter()
            assert not works[0].done()
            waited = time.perf_counter() - start > 0.15
            await works[0]
        assert waited
