"""Memory of pynccl's own between ranks: read where it lies, and written from outside."""

from __future__ import annotations

import memory_programs
import pytest
from support.ranks import run_ranks

everywhere = pytest.mark.parametrize("layout", ["processes", "shared", "loops"])
tempers = pytest.mark.parametrize("temper", ["quick", "gpulike"])


@tempers
@pytest.mark.parametrize("ranks", [2, 3])
def test_own_memory_is_not_staged_between_processes(ranks, temper):
    for staged in run_ranks("processes", ranks, memory_programs.unstaged, temper=temper):
        assert staged["own"] == 0
        assert staged["numpy"] > 0


@tempers
@everywhere
def test_puts_go_round(layout, temper):
    assert run_ranks(layout, 3, memory_programs.puts, temper=temper) == [True] * 3
