"""Every collective, dtype, operator, size and placement against the reference, bit for bit."""

from __future__ import annotations

import itertools

import numpy as np
import plan
import programs
import pytest
from plan import DTYPES, Case
from support import reference
from support.ranks import run_ranks


@pytest.mark.parametrize("temper", ["quick", "gpulike"])
@pytest.mark.parametrize("layout", ["processes", "shared", "loops"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_collectives(ranks, layout, temper, complete):
    values = run_ranks(
        layout,
        ranks,
        programs.collectives,
        temper=temper,
        arguments=[f"{ranks} {layout} {temper}", complete],
        timeout=1800.0 if complete else 120.0,
    )
    assert list(itertools.chain(*values)) == []


@pytest.mark.parametrize("setting", ["PYNCCL_TEST_LOOP=uvloop", "PYTHONASYNCIODEBUG=1"])
@pytest.mark.parametrize("layout", ["processes", "shared", "loops"])
def test_collectives_on_another_loop(layout, setting):
    env = dict([setting.split("=")])
    arguments = [f"{layout} {setting}", False]
    values = run_ranks(layout, 3, programs.collectives, arguments=arguments, env=env)
    assert list(itertools.chain(*values)) == []


def test_one_rank_has_no_average_of_fp8():
    # NCCL's gap: its one-rank path has no branch for it, and says invalid argument.
    [answers] = run_ranks("processes", 1, programs.average_of_fp8)
    assert all("ncclInvalidArgument" in answer for answer in answers)
    assert run_ranks("shared", 2, programs.average_of_fp8) == [["done", "done"]] * 2


# ---- the table and its check -----------------------------------------------------------------


def test_the_sample_meets_every_operation_operator_and_dtype():
    for ranks in (1, 3):
        chosen = plan.sample(ranks, "seed")
        kinds = {(c.operation, c.op, c.dtype) for c in chosen}
        assert kinds == {(c.operation, c.op, c.dtype) for c in plan.combinations(ranks, "seed")}
        assert len(chosen) == len(kinds) == 240 - (6 if ranks == 1 else 0)
        assert chosen == plan.sample(ranks, "seed")
        assert chosen != plan.sample(ranks, "other")
        assert sum(c.count == plan.MANY for c in chosen) == 6


def finished(operation, placement, rank=1, ranks=3, count=7, dtype=2):
    """Return a case whose result somebody has put in its place, and that result."""
    combination = plan.Combination(operation, "sum", dtype, count, placement, 1)
    case = Case(combination, rank, ranks)
    wanted = case.expected()
    if case.recv is None:
        return case, wanted
    case.recv[:] = wanted
    return case, case.recv


@pytest.mark.parametrize(
    ("operation", "placement"),
    [(op, how) for op, all_of_them in plan.PLACEMENTS.items() for how in all_of_them],
)
def test_a_right_result_is_right_and_a_wrong_one_is_not(operation, placement):
    for rank in (0, 1):
        case, result = finished(operation, placement, rank)
        assert case.fault(result) is None
        if result is None:
            assert operation in ("reduce", "gather")
            assert "not the one asked for" in case.fault(np.zeros(1))
            continue
        result[-1] ^= 1
        assert "1 of" in case.fault(result)


@pytest.mark.parametrize("operation", plan.PLACEMENTS)
def test_periodic_results_are_those_of_the_reference(operation):
    ranks, count, root = 3, plan.PERIOD + 5, 2
    for rank in range(ranks):
        chosen = plan.Combination(operation, "sum", 7, count, "out", root)
        cases = [Case(chosen, r, ranks) for r in range(ranks)]
        inputs = [np.zeros(0) if case.send is None else case.send for case in cases]
        wanted = reference.expected(operation, inputs, "sum", root, rank)
        actual = cases[rank].expected()
        assert (actual is None) == (wanted is None)
        assert actual is None or reference.same(actual, wanted)


def test_what_must_not_be_written_is_watched():
    case, result = finished("all_reduce", "out")
    assert case.send is not None
    case.send[0] ^= 1
    assert "input has changed" in case.fault(result)
    case, result = finished("reduce_scatter", "in place")
    case.send[0] ^= 1  # the block of rank 0; this is rank 1
    assert "input has changed" in case.fault(result)
    case, result = finished("reduce", "out", rank=0)
    case.send[0] ^= 1
    assert "input has changed" in case.fault(result)
    case, result = finished("all_gather", "fresh")
    assert "not the one asked for" in case.fault(None)
    assert "not int32" in case.fault(result.astype(np.int64))
    case, result = finished("all_gather", "out")
    assert "not the one asked for" in case.fault(result.copy())
    for place in (-1, 0):
        case, result = finished("all_gather", "out")
        case.recv.base[place] = 0
        assert "outside" in case.fault(result)


def test_in_place_is_where_nccl_wants_it():
    for operation, whole, part in [("all_gather", "recv", "send"), ("scatter", "send", "recv")]:
        case, _ = finished(operation, "in place", rank=1)
        size = DTYPES[2].itemsize
        start = getattr(case, whole).ctypes.data
        assert getattr(case, part).ctypes.data == start + 7 * size
        assert getattr(case, whole).size == 3 * getattr(case, part).size
