"""Send, receive and barrier, on several ranks in each layout."""

from __future__ import annotations

import itertools

import programs
import pytest
from support.ranks import run_ranks

everywhere = pytest.mark.parametrize("layout", ["processes", "shared", "loops"])
tempers = pytest.mark.parametrize("temper", ["quick", "gpulike"])


@tempers
@everywhere
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_messages(ranks, layout, temper):
    values = run_ranks(layout, ranks, programs.messages, temper=temper, arguments=[ranks])
    assert list(itertools.chain(*values)) == []


@tempers
@everywhere
def test_nobody_leaves_a_barrier_before_all_have_come(layout, temper):
    values = run_ranks(layout, 3, programs.barriers, temper=temper)
    for turn in range(3):
        came, left = zip(*(value[turn] for value in values), strict=True)
        assert min(left) >= max(came)
        assert max(came) - min(came) > 0.05
