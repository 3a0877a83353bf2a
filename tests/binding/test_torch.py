"""What only torch's tensors can do: change their storage, promise values, have no memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import pynccl
from pynccl.errors import InvalidBufferError

try:
    import torch
except ImportError:
    pytest.skip("no torch: waits for PyTorch", allow_module_level=True)


async def two() -> list[Any]:
    return await pynccl.create_all(["cpu:0", "cpu:1"])


async def test_storage_that_is_replaced_while_the_operation_runs(temper: str) -> None:
    comms = await two()
    a, b = torch.ones(1 << 20), torch.ones(1 << 20)
    work = comms[0].all_reduce(a)
    a.data = torch.zeros(1)
    gc.collect()
    await pynccl.wait(work, comms[1].all_reduce(b))
    assert b.min() == b.max() == 2.0
    for comm in comms:
        await comm.abort()


LAZY = {
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "negation": lambda: torch._neg_view(torch.ones(2)),
}


@pytest.mark.parametrize("kind", LAZY)
async def test_values_that_are_only_promised(kind: str, temper: str) -> None:
    comms = await two()
    with pytest.raises(InvalidBufferError, match=f"lazy {kind}.*resolve_"):
        comms[0].all_gather(LAZY[kind]())
    for comm in comms:
        await comm.abort()


async def test_tensors_without_memory(temper: str) -> None:
    comms = await two()
    for tensor in (torch.empty(3, device="meta"), torch.eye(3).to_sparse()):
        with pytest.raises(InvalidBufferError, match="x cannot be taken by DLPack") as raised:
            comms[0].all_gather(tensor)
        assert "\n" not in str(raised.value)
    for comm in comms:
        await comm.abort()
