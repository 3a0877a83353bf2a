"""Programs that know nothing of pynccl run on the host engine unchanged, a process a rank."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import hosted
import pytest


def wheel() -> Path:
    """The folder of NVIDIA's own NCCL, which must lose."""
    spec = importlib.util.find_spec("nvidia.nccl")
    assert spec is not None
    return Path(next(iter(spec.submodule_search_locations or ())))


pytestmark = pytest.mark.timeout(240)  # several programs, each of which imports much

CHECKED = [
    "allreduce", "average", "broadcast", "allgather", "reduce_scatter", "alltoall", "scatter",
    "group", "split", "pre_mul_sum", "window",
]  # fmt: skip


@pytest.fixture(params=["quick", "gpulike"])
def temper(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_nccl4py(tmp_path: Path, temper: str) -> None:
    program = [sys.executable, str(hosted.PROGRAMS / "with_nccl4py.py")]
    lines = hosted.run_ranks(program, 2, tmp_path, "--temper", temper)
    for rank, said in enumerate(lines):
        assert said[0] == "communicator 2.32.3"
        assert [line for line in said[1:-1] if line not in ("reduce", "gather")] == CHECKED
        assert ("reduce" in said, "gather" in said) == (rank == 0, rank == 0)
        assert said[-1] == "done"


def test_a_ctypes_client_that_opens_the_wheel_by_its_path(tmp_path: Path, temper: str) -> None:
    real = wheel() / "lib" / "libnccl.so.2"
    program = [sys.executable, str(hosted.PROGRAMS / "with_ctypes.py")]
    lines = hosted.run_ranks(program, 3, tmp_path, "--temper", temper, WITH_LIBRARY=str(real))
    for said in lines:
        assert said == [
            "version 23203", "all_reduce", "all_gather", "reduce_scatter", "broadcast",
            "send_recv", "graph step 1", "graph step 2", "graph step 3", "done",
        ]  # fmt: skip


def test_a_c_program_linked_with_lnccl(tmp_path: Path, temper: str, stand_ins: Path) -> None:
    program = tmp_path / "linked"
    compiled = hosted.run(
        ["cc", "-std=gnu11", "-Wall", "-Werror", "-isystem", str(wheel() / "include"),
         "-isystem", str(stand_ins), str(hosted.PROGRAMS / "linked.c"), "-o", str(program),
         "-lnccl", "-lcuda"],
    )  # fmt: skip
    assert compiled == (0, "", "")
    lines = hosted.run_ranks([str(program)], 2, tmp_path, "--temper", temper)
    assert lines == [
        [f"device {rank} of NCCL 23203: the sum over 2 ranks is 3"] for rank in range(2)
    ]


def test_cuda_core(temper: str) -> None:
    program = [sys.executable, str(hosted.PROGRAMS / "with_cuda_core.py"), "3"]
    status, said, errors = hosted.run(program, "--devices", "3", "--temper", temper)
    assert (status, errors) == (0, "")
    names = "; ".join(f"pynccl host device {n}" for n in range(3))
    assert said.splitlines() == [
        f"devices; {names}", "streams", "buffers", "memory resources", "events and timing",
    ]  # fmt: skip
