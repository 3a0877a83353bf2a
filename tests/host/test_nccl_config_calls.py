"""Collectives with a config, simulated groups, and settings of the whole library."""

from __future__ import annotations

import ctypes

import nccl_ranks
import numpy as np
import pytest
from nccl_ranks import ARGUMENT, REMOTE, USAGE, Rank, last_error
from structs import coll_config, encryption, estimate, simulation

INT32, SUM = 2, 0


def every_function(rank: Rank) -> None:
    """Each collective does the same with a config as without."""
    n, ranks = 6, rank.ranks
    given = coll_config(selection=b"ring,tree", force=0)
    mine = np.arange(n * ranks, dtype=np.int32) * (rank.rank + 1)
    tail = (rank.comm, rank.stream)
    send = mine.ctypes.data
    for name, middle, size in (
        ("AllReduce", (SUM,), n),
        ("Reduce", (SUM, 1), n),
        ("Broadcast", (1,), n),
        ("AllGather", (), n * ranks),
        ("ReduceScatter", (SUM,), n),
        ("AlltoAll", (), n * ranks),
        ("Gather", (0,), n * ranks),
        ("Scatter", (0,), n),
    ):
        plain, configured = (np.full(size, -1, dtype=np.int32) for _ in range(2))
        head = (n, INT32, *middle)
        rank.must(f"nccl{name}", send, plain.ctypes.data, *head, *tail)
        rank.must(f"nccl{name}Config", send, configured.ctypes.data, *head, *tail, given)
        rank.synchronize()
        assert (plain == configured).all(), name
    rank.finish()


def test_every_collective_with_a_config(engine, temper):
    nccl_ranks.run_threads(engine, 2, every_function)


SELECTIONS = (
    (b"", 0), (b"  ", 0), (b"RING", 0), (b" ri ng ", 0), (b"tree,ring", 0), (b"^ring", 0),
    (b"ring+^RING_LL128", 0), (b"RING,", 0), (b"ring+", 0), (b"symk,ring", 0),
    (b"bogus", 1), (b"^", 1), (b",", 1), (b"+", 1), (b"ring+tree", 1), (b"ring,bogus", 1),
    (b"^^ring", 1), (b"x" * 500, 1), (b"_LL", 1),
    (b"NVLS", 2), (b"collnet", 2), (b"SYMK_RS", 2), (b"^ring+^tree", 2),
    (b"PAT", 1), (b"SYMK_ST", 1),
)  # fmt: skip


def select(rank: Rank) -> None:
    """A selection is accepted (0), refused at the call (1), or at the end of the group (2)."""
    data = np.zeros(1, dtype=np.int32)

    def call(given: object) -> int:
        code: int = rank.engine.ncclAllReduceConfig(
            data.ctypes.data, data.ctypes.data, 1, INT32, SUM, rank.comm, rank.stream, given
        )
        return code

    for text, outcome in SELECTIONS:
        late = outcome == 2 and rank.ranks > 1
        for force in (1, 0):
            early = outcome == 1 and force == 1
            rank.must("ncclGroupStart")
            assert call(coll_config(selection=text, force=force)) == (
                ARGUMENT if early else 0
            ), text
            end = rank.engine.ncclGroupEnd()
            assert end == (ARGUMENT if force and (early or late) else 0), text
        assert call(coll_config(selection=text)) == (ARGUMENT if outcome == 1 or late else 0), (
            text
        )
        rank.synchronize()
    rank.finish()


@pytest.mark.parametrize("ranks", [1, 2])
def test_selections_of_algorithms(engine, temper, ranks):
    nccl_ranks.run_threads(engine, ranks, select)


def no_selection(rank: Rank) -> None:
    """What is made of messages has no algorithms to select."""
    data = np.zeros(4, dtype=np.int32)
    tail = (rank.comm, rank.stream)
    code = rank.engine.ncclAlltoAllConfig(
        data.ctypes.data, data.ctypes.data + 8, 1, INT32, *tail, coll_config(selection=b"ring")
    )
    assert code == ARGUMENT
    assert "no algorithm" in last_error(rank.engine)
    rank.finish()


def test_exchanges_have_no_algorithms(engine, temper):
    nccl_ranks.run_threads(engine, 2, no_selection)


def events(rank: Rank) -> None:
    """The event of a config is recorded; a second one in a group is refused."""
    data = np.ones(1, dtype=np.int32)
    event = rank.engine.event()

    def call() -> int:
        code: int = rank.engine.ncclAllReduceConfig(
            data.ctypes.data, data.ctypes.data, 1, INT32, SUM, rank.comm, rank.stream,
            coll_config(event=event),
        )  # fmt: skip
        return code

    assert call() == 0
    rank.engine.must("cuEventSynchronize", event)
    rank.synchronize()
    assert data[0] == rank.ranks
    rank.must("ncclGroupStart")
    assert call() == 0
    assert call() == 0
    assert rank.engine.ncclGroupEnd() == USAGE
    rank.engine.must("cuEventDestroy_v2", event)
    rank.finish()


def test_launch_completion_events(engine, temper):
    nccl_ranks.run_threads(engine, 2, events)


def simulated(rank: Rank) -> None:
    """A simulated group launches nothing, and estimates its last collective."""
    data = np.full(1 << 18, rank.rank, dtype=np.int32)
    small, large = simulation(), simulation()
    for info, count in ((small, 1), (large, data.size)):
        rank.must("ncclGroupStart")
        assert rank.all_reduce(data, count=count) == 0
        rank.must("ncclGroupSimulateEnd", info)
    rank.synchronize()
    assert (data == rank.rank).all()
    assert 0 < estimate(small) < estimate(large)
    short, other = simulation(size=16), simulation()
    rank.must("ncclGroupStart")
    assert rank.all_reduce(data, count=1) == 0
    rank.must("ncclGroupSimulateEnd", short)
    assert estimate(short) == -1.0
    rank.must("ncclGroupStart")
    rank.must("ncclSend", data.ctypes.data, 1, INT32, 1 - rank.rank, rank.comm, rank.stream)
    rank.must("ncclGroupSimulateEnd", other)  # messages have no estimate
    assert estimate(other) == -1.0
    rank.must("ncclGroupStart")
    assert rank.all_reduce(data, count=1) == 0
    assert rank.engine.ncclGroupSimulateEnd(simulation(magic=1)) == ARGUMENT
    assert rank.engine.ncclGroupEnd() == USAGE
    rank.finish()


def test_simulated_groups(engine, temper):
    nccl_ranks.run_threads(engine, 2, simulated)


def set_key(engine: object, key: bytes | None) -> None:
    """Call ncclSetEncryption with this key, or with none."""
    given = encryption(mode=1, key=key) if key else encryption()
    assert engine.ncclSetEncryption(given) == 0


def join_with_key(rank: Rank, same: bool) -> int:
    """Split with a key of one's own: the ranks of the child must have the same one."""
    set_key(rank.engine, b"k" * 32 if same or rank.rank == 0 else b"q" * 40)
    child = ctypes.c_void_p()
    code: int = rank.engine.ncclCommSplit(rank.comm, 0, 0, ctypes.byref(child), None)
    if code == 0:
        rank.must("ncclCommFinalize", child)
        rank.must("ncclCommDestroy", child)
    rank.abandon()
    return code


@pytest.mark.parametrize(("same", "code"), [(True, 0), (False, REMOTE)])
def test_ranks_with_different_keys_do_not_meet(engine, same, code):
    assert nccl_ranks.run_processes(engine, 2, join_with_key, same) == [code, code]
