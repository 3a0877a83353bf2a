"""Older releases: their version, which functions they lack, which structs they take."""

from __future__ import annotations

import ctypes

import nccl_ranks
import pytest
from nccl_ranks import ARGUMENT, USAGE, Rank, last_error

NEWEST = 23203


@pytest.fixture
def release(engine):
    """Sets the release that is imitated; the newest is back at the end."""
    yield lambda text: engine.set("nccl_version", text)
    engine.set("nccl_version", "2.32.3")


def version(engine) -> int:
    out = ctypes.c_int()
    assert engine.ncclGetVersion(ctypes.byref(out)) == 0
    return out.value


def test_the_version_is_told(engine, release):
    assert version(engine) == NEWEST
    release("2.21.5")
    assert version(engine) == 22105


@pytest.mark.parametrize("text", ["2.21", "2.21.5.1", "2.17.1", "2.33.0", "3", "", "2.x.1"])
def test_what_is_no_release_is_refused(engine, text):
    with pytest.raises(ValueError, match="nccl_version"):
        engine.set("nccl_version", text)
    assert version(engine) == NEWEST


@pytest.mark.parametrize(
    ("text", "function", "absent"),
    [
        ("2.21.5", b"ncclCommSplit", False),
        ("2.21.5", b"ncclMemAlloc", False),
        ("2.21.5", b"ncclGroupSimulateEnd", True),
        ("2.21.5", b"ncclCommShrink", True),
        ("2.21.5", b"ncclParamGetI32", True),
        ("2.18.1", b"ncclMemAlloc", True),
        ("2.28.3", b"ncclAlltoAll", False),
        ("2.28.3", b"ncclCommRevoke", True),
        ("2.28.7", b"ncclCommRevoke", False),
        ("2.31.2", b"ncclSetEncryption", True),
        ("2.32.3", b"ncclSetEncryption", False),
        ("2.21.5", b"cuInit", False),
    ],
)
def test_what_a_release_has(engine, release, text, function, absent):
    release(text)
    assert bool(engine.library.pn_host_absent(function)) is absent


def test_an_absent_function_is_refused_and_changes_nothing(engine, release):
    release("2.21.5")
    out = ctypes.c_void_p()
    assert engine.ncclCommGrow(None, 0, None, 0, ctypes.byref(out), None) == USAGE
    assert "2.21.5" in last_error(engine)
    assert "ncclCommGrow" in last_error(engine)
    assert engine.ncclGroupEnd() == USAGE
    with nccl_ranks.on_device(engine, 0):
        rank = Rank(engine, 0, 1, 0)
        rank.join(nccl_ranks.unique_id(engine))
        rank.finish()


CONFIGURATIONS = {
    # what a release did not know is ignored, whatever it says
    "2.21.5 of a newer struct": ("2.21.5", {"graphUsageMode": 9, "CTAPolicy": 9}, 0),
    "2.21.5 of its own struct": ("2.21.5", {"version": 22105, "size": 48, "splitShare": 1}, 0),
    "2.21.5 of a bad splitShare": ("2.21.5", {"splitShare": 2}, ARGUMENT),
    "2.27.3 of a bad policy": ("2.27.3", {"CTAPolicy": 9}, ARGUMENT),
    "2.27.3 of a newer member": ("2.27.3", {"nChannelsPerNetPeer": 999}, 0),
    # a struct too short for its magic number had the right one before 2.22
    "2.21.5 of 8 bytes": ("2.21.5", {"size": 8, "blocking": 5}, 0),
    "2.22.3 of 8 bytes": ("2.22.3", {"size": 8}, ARGUMENT),
    # minCTAs was compared with an unset maxCTAs up to 2.30.7
    "2.30.7 of minCTAs alone": ("2.30.7", {"minCTAs": 8}, ARGUMENT),
    "2.31.2 of minCTAs alone": ("2.31.2", {"minCTAs": 8}, 0),
    "2.30.7 of both": ("2.30.7", {"minCTAs": 8, "maxCTAs": 16}, 0),
    "2.31.2 of a new member": ("2.31.2", {"hostCftMode": 9}, ARGUMENT),
}


@pytest.mark.parametrize(
    ("text", "members", "code"), CONFIGURATIONS.values(), ids=CONFIGURATIONS
)
def test_structs_of_other_releases(engine, release, text, members, code):
    release(text)
    with nccl_ranks.on_device(engine, 0):
        rank = Rank(engine, 0, 1, 0)
        spot = ctypes.byref(rank.comm)
        given = nccl_ranks.config(**members)
        unique = nccl_ranks.unique_id(engine)
        assert engine.ncclCommInitRankConfig(spot, 1, unique, 0, given) == code
        if code == 0:
            rank.finish()
        else:
            assert not rank.comm.value
            engine.must("cuStreamDestroy_v2", rank.stream)


def mixed(rank: Rank, first: int) -> int:
    """The release is this process's own."""
    rank.engine.set("nccl_version", "2.30.7" if rank.rank == first else "2.32.3")
    comm = ctypes.c_void_p()
    child = rank.engine.ncclCommSplit(rank.comm, 0, 0, ctypes.byref(comm), None)
    rank.abandon()
    return int(child)


def test_ranks_of_different_releases_do_not_meet(engine):
    assert nccl_ranks.run_processes(engine, 2, mixed, 0) == [USAGE, USAGE]


BAD_ENVIRONMENT = {"NCCL_COMM_BLOCKING": "7", "NCCL_MAX_CTAS": "-3", "NCCL_MIN_CTAS": "many"}


def joined(rank: Rank) -> int:
    state = rank.state()
    rank.finish()
    return state


def test_bad_variables_are_ignored(engine):
    assert nccl_ranks.run_processes(engine, 2, joined, environment=BAD_ENVIRONMENT) == [0, 0]
