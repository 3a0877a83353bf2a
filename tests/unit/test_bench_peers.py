"""`bench --peers`: how a row is judged, and that a wrong result is no figure."""

from __future__ import annotations

import numpy as np
import pytest

from pynccl._tools import peers
from pynccl._tools.peers_child import ALL_REDUCES, MIB, MOVES, Case

BIG = f"all_reduce {64 * MIB}"


def registered(ours: float, bound: float, mpi: dict[str, float]) -> peers.Figure:
    row = next(row for row in peers.ROWS if row.case == "registered")
    times = {("ours", 2): {"registered": ours, "bound": bound, BIG: 9.0}}
    times |= {(name, 2): {BIG: time} for name, time in mpi.items()}
    return peers.figure(row, times, list(mpi), {})


def test_every_row_has_a_case():
    cases = {
        size: {f"all_reduce {nbytes}" for nbytes in sizes}
        for size, sizes in ALL_REDUCES.items()
    }
    cases[2] |= {"registered", *MOVES}
    assert all(row.case in cases[row.size] for row in peers.ROWS)


def test_registered_memory_is_judged_by_mpi_or_by_the_memory():
    mpi = {peers.OPEN_MPI: 36.0, peers.MPICH: 40.0}
    assert registered(6.0, 1.0, mpi).passed  # six times as fast as the better of the two
    assert not registered(6.1, 1.0, mpi).passed
    assert registered(8.9, 7.2, mpi).passed  # 80 % of what the memory can do
    assert not registered(9.1, 7.2, mpi).passed
    assert registered(6.0, 1.0, {}).must == {peers.BEST: 6}  # and judged by nobody


@pytest.mark.parametrize("name", ["all_reduce", *MOVES])
def test_a_wrong_result_is_refused(name):
    case = Case(name, 64, 1, 2)

    def turn() -> None:
        case.recv[:] = case.wanted
        if name == "broadcast":
            case.send[:] = case.wanted

    assert case.measure(turn, 1) > 0
    with pytest.raises(AssertionError, match=name):
        Case(name, 64, 1, 2).measure(lambda: None, 1)


def test_blocks_of_a_case():
    case = Case("reduce_scatter", 64, 1, 2)
    assert (case.send.size, case.recv.size) == (16, 8)
    assert np.array_equal(case.wanted, 2 * np.arange(8, 16) + 1)


def test_short_operations_are_those_of_a_caller_in_c():
    row = next(row for row in peers.ROWS if row.case == peers.SHORT and row.size == 4)
    times = {
        ("ours", 4): {peers.SHORT: 5.0, peers.IN_C: 3.0},
        (peers.MPICH, 4): {peers.SHORT: 6.0},
    }
    figure = peers.figure(row, times, [peers.MPICH], {})
    assert (figure.ours, figure.passed) == (3.0, True)
    assert figure.notes == {"the same called by ctypes, us": 5.0}
