"""The group depth that a failing call of NCCL leaves behind is noticed and taken back."""

from __future__ import annotations

from typing import Any

import pytest
from support.ranks import Temper, run_processes

import pynccl
from pynccl import testing

# Rank 1 dies when both have finalized; rank 0's destroy finds a communicator in error.
FAULTS = "call:delay=1s,name=ncclCommDestroy,rank=0;call:kill,name=ncclCommDestroy,rank=1"


async def close_beside_a_death(comm: Any) -> list[Any]:
    await comm.barrier()
    with testing.journal() as journal:
        with pytest.raises(pynccl.NcclError) as raised:
            await comm.close(timeout=10)
        open_groups = testing.live()["groups_open"]
    destroyed = journal.named("ncclCommDestroy")[-1]
    return [
        raised.value.function,
        destroyed.result != 0,
        pynccl.diagnostics()["group_depth_repairs"],
        open_groups,
    ]


@pytest.mark.parametrize("temper", ["quick", "gpulike"])
@pytest.mark.parametrize("leak", [True, False], ids=["leaks", "sound"])
def test_a_leaked_depth_is_repaired(temper: Temper, leak: bool) -> None:
    """Without the repair one group stays open on the lane, and no repair is counted."""
    values = run_processes(
        2,
        close_beside_a_death,
        temper=temper,
        env={
            "PYNCCL_HOST_FAULTS": FAULTS,
            "PYNCCL_HOST_QUIRKS": "depth-leak" if leak else "",
        },
        exits={1: -9},
    )
    function, failed, repairs, open_groups = values[0]
    assert (function, failed) == ("ncclCommDestroy", True)
    assert repairs == int(leak)
    assert open_groups == 0
