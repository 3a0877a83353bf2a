"""How communicators begin and end: ids, init, configuration, finalize, destroy, leaks."""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path

import nccl_ranks
import numpy as np
import pytest
from nccl_ranks import (
    ARGUMENT,
    CUDA,
    INTERNAL,
    REMOTE,
    SYSTEM,
    USAGE,
    NcclError,
    Rank,
    last_error,
)

FLOAT32, SUM = 7, 0


@pytest.fixture
def faithful(engine, temper):
    engine.set("mode", "faithful")
    yield
    engine.set("mode", "strict")


def what_the_process_holds() -> dict[str, list[str]]:
    """Open files, threads and shared mappings, as the kernel lists them."""
    own = Path("/proc/self")
    files = []
    for entry in (own / "fd").iterdir():
        try:
            files.append(str(entry.readlink()))
        except FileNotFoundError:  # the listing's own
            continue
    return {
        "files": sorted(name for name in files if "memfd" in name or "pidfd" in name),
        "maps": [x for x in (own / "maps").read_text().splitlines() if "memfd:pynccl" in x],
        "threads": [x.name for x in (own / "task").iterdir()],
    }


def settle(wanted: dict[str, list[str]]) -> dict[str, list[str]]:
    """What is held once kernels have let go, soon after the call that ends them."""
    held = what_the_process_holds()
    for _ in range(200):
        if held["files"] == wanted["files"] and held["maps"] == wanted["maps"]:
            break
        time.sleep(0.01)
        held = what_the_process_holds()
    return held


def some_work(rank: Rank) -> None:
    x = np.ones(100_000, dtype=np.float32)
    assert rank.all_reduce(x) == 0
    rank.synchronize()
    child = rank.split(rank.rank % 2)
    rank.must("ncclCommDestroy", child)
    rank.finish()


def leaves_nothing(rank: Rank) -> int:
    some_work(rank)
    nothing: dict[str, list[str]] = {"files": [], "maps": []}
    left = settle(nothing)
    return len(left["files"]) + len(left["maps"])


def test_nothing_is_left_between_processes(engine, temper):
    """Neither the segment nor what watches the process of the other rank."""
    given = {"PYNCCL_HOST_TEMPER": temper}
    assert nccl_ranks.run_processes(engine, 3, leaves_nothing, environment=given) == [0, 0, 0]


def stuck_work(rank: Rank) -> None:
    x = np.ones(100_000, dtype=np.float32)
    if rank.rank == 0:
        assert rank.all_reduce(x) == 0
        assert rank.pending(0.1)
    rank.abandon()


@pytest.mark.parametrize("body", [some_work, stuck_work])
def test_nothing_is_left(engine, temper, body):
    engine.set("runtime_connect", "0")
    nccl_ranks.run_threads(engine, 2, some_work)  # whatever is made once for the process
    before, live = what_the_process_holds(), engine.live()
    for _ in range(3):
        nccl_ranks.run_threads(engine, 2, body)
    after = settle(before)
    engine.set("runtime_connect", "1")
    assert after["files"] == before["files"]
    assert after["maps"] == before["maps"]
    for kind in ("communicators", "segments", "work_items", "groups_open"):
        assert engine.live()[kind] == live[kind], kind


def test_an_offer_ends_when_all_ranks_have_come(engine, temper):
    """The process that makes an id keeps one descriptor until all ranks have come."""
    nccl_ranks.run_threads(engine, 2, some_work)  # lets go of what tests before have offered
    before = what_the_process_holds()
    nccl_ranks.run_processes(engine, 2, some_work)
    assert len(what_the_process_holds()["files"]) == len(before["files"]) + 1
    nccl_ranks.run_threads(engine, 2, some_work)  # any later call that makes an id lets it go
    assert settle(before)["files"] == before["files"]


def dies_in_init(rank: Rank) -> None:
    raise AssertionError("not reached")


def test_a_killed_process_leaves_nothing(engine, temper):
    def shared() -> set[str]:
        return {entry.name for entry in Path("/dev/shm").iterdir()}

    before = shared()
    environment = {"PYNCCL_HOST_FAULTS": "init:kill", "PYNCCL_HOST_TEMPER": temper}
    nccl_ranks.run_processes(
        engine, 2, dies_in_init, environment=environment, exits={0: -9, 1: -9}
    )
    end = time.monotonic() + 20  # what other programs make meanwhile goes with them
    while shared() - before and time.monotonic() < end:
        time.sleep(0.05)
    assert shared() - before == set()


# ---- ids and the exchange


def init(engine, unique, ranks, rank, device, out):
    """Init one rank on a thread of its own; its result goes into `out`, a dict."""
    out["comm"] = ctypes.c_void_p()

    def call():
        with nccl_ranks.on_device(engine, device):
            code = engine.ncclCommInitRank(ctypes.byref(out["comm"]), ranks, unique, rank)
            out["text"] = last_error(engine)
            out["code"] = code

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def init_all(engine, places):
    """Init each (ranks, rank, device) with one id; the results, once all have returned."""
    unique = nccl_ranks.unique_id(engine)
    outs = [{} for _ in places]
    threads = [
        init(engine, unique, *place, out) for place, out in zip(places, outs, strict=True)
    ]
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    return outs


def abort_all(engine, outs):
    for out in outs:
        assert engine.ncclCommAbort(out["comm"]) == 0


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ([(2, 0, 0), (3, 1, 1)], "disagree about their number"),
        ([(3, 0, 0), (3, 1, 1), (3, 1, 2)], "say that they are rank 1 of 3"),
        ([(2, 0, 4), (2, 1, 4)], "duplicate device: rank 0 and rank 1 both use device 4"),
    ],
    ids=["size", "rank", "device"],
)
def test_ranks_that_do_not_fit_are_told_so(engine, temper, places, text):
    before = engine.live()["communicators"]
    outs = init_all(engine, places)
    assert [out["code"] for out in outs] == [USAGE] * len(places)
    for out in outs:
        assert text in out["text"]
        code = ctypes.c_int()
        assert out["comm"].value  # it stays, to be aborted
        engine.ncclCommGetAsyncError(out["comm"], ctypes.byref(code))
        assert code.value == USAGE
    abort_all(engine, outs)
    assert engine.live()["communicators"] == before


def test_ranks_that_do_not_fit_hang_in_the_faithful_mode(engine, faithful):
    unique = nccl_ranks.unique_id(engine)
    outs = [{}, {}]
    threads = [init(engine, unique, 2 + r, r, r, outs[r]) for r in range(2)]
    time.sleep(0.3)
    assert all(thread.is_alive() for thread in threads)
    abort_all(engine, outs)
    for thread in threads:
        thread.join(5)
    assert [out["code"] for out in outs] == [INTERNAL, INTERNAL]


def test_several_ranks_may_share_a_device_where_it_is_allowed(engine, temper):
    engine.set("multi_rank", "1")
    try:
        outs = init_all(engine, [(2, 0, 4), (2, 1, 4)])
        assert [out["code"] for out in outs] == [0, 0]
        abort_all(engine, outs)
    finally:
        engine.set("multi_rank", "0")


def test_an_init_is_aborted_from_another_thread(engine, temper):
    """The handle is there before anything waits."""
    before = engine.live()["communicators"]
    out = {}
    thread = init(engine, nccl_ranks.unique_id(engine), 2, 0, 0, out)
    while not out["comm"].value:
        time.sleep(0.001)
    time.sleep(0.05)
    begun = time.monotonic()
    assert engine.ncclCommAbort(out["comm"]) == 0
    thread.join(5)
    assert time.monotonic() - begun < 1
    assert out["code"] == INTERNAL
    assert engine.live()["communicators"] == before


def test_an_id_serves_once(engine, temper):
    unique = nccl_ranks.unique_id(engine)
    for wanted in (0, USAGE):
        out = {}
        init(engine, unique, 1, 0, 0, out).join(10)
        assert out["code"] == wanted, out["text"]
        if wanted:
            assert "has served an init" in out["text"]
        abort_all(engine, [out])


def test_no_id(engine, temper):
    out = {}
    init(engine, nccl_ranks.id_from(bytes(128)), 1, 0, 0, out).join(10)
    assert out["code"] == SYSTEM
    abort_all(engine, [out])


def makes_an_id(rank: Rank) -> str:
    return bytes(nccl_ranks.unique_id(rank.engine)).hex()


def test_an_id_of_a_dead_process(engine, temper):
    (raw,) = nccl_ranks.run_processes(engine, 1, makes_an_id)
    out = {}
    init(engine, nccl_ranks.id_from(bytes.fromhex(raw)), 2, 0, 0, out).join(10)
    assert out["code"] == SYSTEM
    assert "is gone" in out["text"]
    abort_all(engine, [out])


def test_init_checks(engine, temper):
    unique = nccl_ranks.unique_id(engine)
    comm = ctypes.c_void_p(1)
    with nccl_ranks.on_device(engine, 0):
        assert engine.ncclCommInitRank(None, 1, unique, 0) == ARGUMENT
        for ranks, rank in ((0, 0), (2, 2), (2, -1), (-1, 0), (1000, 0)):
            assert engine.ncclCommInitRank(ctypes.byref(comm), ranks, unique, rank) == ARGUMENT
            assert not comm.value
    assert engine.ncclGroupEnd() == USAGE


# ---- configuration

GOOD = {
    "all unset": {},
    "version 0 hides what is new": {"version": 0, "blocking": 0, "graphUsageMode": 9},
    "2.17 has no traffic class": {"version": 21700, "trafficClass": 3, "collnetEnable": 7},
    "a struct from the future": {"size": 4000},
    "as short as can be": {"size": 16},
    "only minCTAs": {"minCTAs": 8},
}
BAD = {
    "too short for the magic": {"size": 8},
    "no magic": {"magic": 1},
    "blocking": {"blocking": 2},
    "CTAs": {"minCTAs": 9, "maxCTAs": 4},
    "maxCTAs": {"maxCTAs": 0},
    "splitShare": {"splitShare": 2},
    "CTAPolicy": {"CTAPolicy": 4},
    "channels": {"nChannelsPerNetPeer": 65},
    "graph usage": {"graphUsageMode": 3},
    "splitShare is old": {"version": 0, "splitShare": 2},
}


@pytest.mark.parametrize("members", GOOD.values(), ids=GOOD)
def test_a_configuration_is_taken(engine, members):
    with nccl_ranks.on_device(engine, 0):
        rank = Rank(engine, 0, 1, 0)
        rank.configure(nccl_ranks.unique_id(engine), **members)
        rank.finish()


@pytest.mark.parametrize("members", BAD.values(), ids=BAD)
def test_a_configuration_is_refused(engine, members):
    with nccl_ranks.on_device(engine, 0):
        rank = Rank(engine, 0, 1, 0)
        with pytest.raises(NcclError) as refused:
            rank.configure(nccl_ranks.unique_id(engine), **members)
        assert refused.value.code == ARGUMENT
        assert refused.value.text.startswith("config: ")
        assert not rank.comm.value
        engine.must("cuStreamDestroy_v2", rank.stream)
    assert engine.ncclGroupEnd() == USAGE


# ---- the end


@pytest.mark.misuse
def test_the_last_destroy_frees(engine, temper):
    """Of two communicators of a process, the first that is destroyed waits for nobody."""
    before = engine.live()
    outs = init_all(engine, [(2, 0, 0), (2, 1, 1)])
    assert engine.ncclCommDestroy(outs[0]["comm"]) == 0
    assert engine.live()["communicators"] == before["communicators"] + 2
    assert engine.ncclCommDestroy(outs[0]["comm"]) == ARGUMENT
    assert "destroyed or aborted before" in last_error(engine)
    assert engine.ncclCommDestroy(outs[1]["comm"]) == 0
    assert engine.live() == before
    count = ctypes.c_int()
    assert engine.ncclCommCount(outs[1]["comm"], ctypes.byref(count)) == ARGUMENT
    assert engine.ncclCommAbort(outs[1]["comm"]) == ARGUMENT


def finalize_twice(rank: Rank) -> None:
    x = np.ones(1000, dtype=np.float32)
    assert rank.all_reduce(x) == 0
    rank.must("ncclCommFinalize", rank.comm)
    assert (x == rank.ranks).all()  # all that was issued is done
    assert rank.engine.ncclCommFinalize(rank.comm) == ARGUMENT
    assert rank.all_reduce(x) == USAGE
    rank.must("ncclCommDestroy", rank.comm)
    rank.synchronize()
    rank.engine.must("cuStreamDestroy_v2", rank.stream)


def test_finalize(engine, temper):
    nccl_ranks.run_threads(engine, 2, finalize_twice)


def late(rank: Rank) -> float:
    if rank.rank == 1:
        time.sleep(0.4)
    begun = time.monotonic()
    rank.must("ncclCommDestroy", rank.comm)
    rank.engine.must("cuStreamDestroy_v2", rank.stream)
    return time.monotonic() - begun


def test_destroy_waits_for_the_other_processes(engine, temper):
    waited, _ = nccl_ranks.run_processes(engine, 2, late)
    assert waited > 0.2


def test_one_thread_finalizes_two_ranks_in_a_group(engine, temper):
    outs = init_all(engine, [(2, 0, 0), (2, 1, 1)])
    nccl_ranks.must(engine, "ncclGroupStart")
    for out in outs:
        assert engine.ncclCommFinalize(out["comm"]) == 0
    nccl_ranks.must(engine, "ncclGroupEnd")
    for out in outs:
        nccl_ranks.must(engine, "ncclCommDestroy", out["comm"])


@pytest.mark.misuse
def test_an_abort_in_a_group_strikes_at_once_and_reclaims_at_the_end(engine, temper):
    engine.set("runtime_connect", "0")
    outs = init_all(engine, [(2, 0, 0), (2, 1, 1)])
    x = np.ones(1, dtype=np.float32)
    with nccl_ranks.on_device(engine, 0):
        stream = engine.stream()
        address = x.ctypes.data
        code = engine.ncclAllReduce(address, address, 1, FLOAT32, SUM, outs[0]["comm"], stream)
        assert code == 0
        nccl_ranks.must(engine, "ncclGroupStart")
        nccl_ranks.must(engine, "ncclCommAbort", outs[0]["comm"])
        engine.must("cuStreamSynchronize", stream)  # the kernel has ended, before the group has
        count = ctypes.c_int()
        assert engine.ncclCommCount(outs[0]["comm"], ctypes.byref(count)) == 0
        nccl_ranks.must(engine, "ncclGroupEnd")
        assert engine.ncclCommCount(outs[0]["comm"], ctypes.byref(count)) == ARGUMENT
        engine.must("cuStreamDestroy_v2", stream)
    nccl_ranks.must(engine, "ncclCommAbort", outs[1]["comm"])
    engine.set("runtime_connect", "1")


def leaves(rank: Rank) -> int:
    """In a process of its own: rank 0 aborts, and the other's finalize hears of it."""
    if rank.rank == 0:
        time.sleep(0.2)
        rank.abandon()
        return 0
    code: int = rank.engine.ncclCommFinalize(rank.comm)
    rank.abandon()
    return code


def test_finalize_hears_of_an_abort(engine, temper):
    assert nccl_ranks.run_processes(engine, 2, leaves) == [0, REMOTE]


def test_finalize_hears_of_an_abort_in_the_same_process(engine, temper):
    outs = init_all(engine, [(2, 0, 0), (2, 1, 1)])
    nccl_ranks.must(engine, "ncclCommAbort", outs[0]["comm"])
    assert engine.ncclCommFinalize(outs[1]["comm"]) == REMOTE
    assert "rank 0 was aborted" in last_error(engine)
    nccl_ranks.must(engine, "ncclCommAbort", outs[1]["comm"])


# ---- the depth that some calls of NCCL leave behind


@pytest.mark.parametrize("leak", [False, True])
def test_the_depth_leak_of_destroy(engine, temper, leak):
    # Aborts that other tests of this process gave up may still hold their groups open.
    before = engine.live()["groups_open"]
    engine.set("quirks", "depth-leak" if leak else "")
    engine.set("faults", "op:remote=6,rank=0")
    engine.set("runtime_connect", "0")
    outs = init_all(engine, [(2, 0, 0), (2, 1, 1)])
    with nccl_ranks.on_device(engine, 0):
        stream = engine.stream()
        engine.ncclAllReduce(8, 8, 1, FLOAT32, SUM, outs[0]["comm"], stream)
        code = ctypes.c_int()
        while not code.value:
            engine.cuStreamQuery(stream)
            engine.ncclCommGetAsyncError(outs[0]["comm"], ctypes.byref(code))
        assert engine.ncclCommDestroy(outs[0]["comm"]) == REMOTE
        assert engine.live()["groups_open"] - before == int(leak)
        assert engine.ncclGroupEnd() == (0 if leak else USAGE)
        engine.set("quirks", "")
        abort_all(engine, outs)
        engine.must("cuStreamDestroy_v2", stream)
    engine.set("runtime_connect", "1")


@pytest.mark.parametrize("leak", [False, True])
def test_the_depth_leak_of_init_all(engine, temper, leak):
    engine.set("quirks", "depth-leak" if leak else "")
    before = engine.live()
    comms = (ctypes.c_void_p * 40)()
    assert engine.ncclCommInitAll(comms, 40, None) == CUDA
    ends = [engine.ncclGroupEnd(), engine.ncclGroupEnd()]
    engine.set("quirks", "")
    for comm in comms:
        if comm:
            engine.ncclCommAbort(comm)
    assert ends == [INTERNAL if leak else USAGE, USAGE]
    after = engine.live()  # what tests before this one have left may be going still
    assert {kind: n for kind, n in after.items() if n > before[kind]} == {}


def test_versions_and_texts(engine):
    version = ctypes.c_int()
    nccl_ranks.must(engine, "ncclGetVersion", ctypes.byref(version))
    assert version.value == 23203
    assert engine.ncclGetErrorString(0) == b"no error"
    assert engine.ncclGetErrorString(9) == b"unknown result code"


def test_memory(engine, temper):
    with nccl_ranks.on_device(engine, 0):
        pointer = ctypes.c_void_p()
        nccl_ranks.must(engine, "ncclMemAlloc", ctypes.byref(pointer), 1 << 20)
        ctypes.memset(pointer.value, 7, 1 << 20)
        nccl_ranks.must(engine, "ncclMemFree", pointer)
        assert engine.ncclMemAlloc(None, 8) == CUDA
        nccl_ranks.must(engine, "ncclMemFree", None)


def registers(rank: Rank) -> None:
    engine, x = rank.engine, np.zeros(64, dtype=np.float32)
    handle = ctypes.c_void_p()
    rank.must("ncclCommRegister", rank.comm, x.ctypes.data, x.nbytes, ctypes.byref(handle))
    assert handle.value
    rank.must("ncclCommDeregister", rank.comm, handle)
    assert engine.ncclCommDeregister(rank.comm, handle) == USAGE
    rank.must("ncclCommDeregister", rank.comm, None)
    rank.must("ncclCommRegister", rank.comm, x.ctypes.data, x.nbytes, ctypes.byref(handle))
    rank.finish()


def test_registration(engine, temper):
    nccl_ranks.run_threads(engine, 2, registers)
