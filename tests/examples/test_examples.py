"""The examples as a user starts them; the first one in all three ways."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMPI_", "PMI_", "SLURM_")


def environment(**more: str) -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    return {**plain, **more}


def finish(process: subprocess.Popen[str]) -> str:
    """Its output; it must end well, in time, and say nothing on stderr."""
    try:
        out, err = process.communicate(timeout=50)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0, (out, err)
    assert err == ""
    return out


def start(command: list[str], **more: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=environment(**more), stdout=pipe, stderr=pipe, text=True
    )


def script(name: str, *arguments: str) -> list[str]:
    return [sys.executable, os.fspath(EXAMPLES / name), *arguments]


def assert_four_sums(output: str) -> None:
    lines = sorted(output.split("\n"))
    wanted = [f"rank {r} of 4: [10.0, 10.0, 10.0, 10.0], the right sum" for r in range(4)]
    assert [line for line in lines if line] == wanted


@pytest.mark.parametrize("device", [[], ["--device", "cpu"]])
def test_all_reduce_alone(device: list[str]) -> None:
    assert_four_sums(finish(start(script("01_all_reduce.py", *device))))


def test_all_reduce_under_mpirun() -> None:
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert mpirun is not None, "the test extra brings Open MPI"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [mpirun, "--oversubscribe", "-n", "4", *script("01_all_reduce.py")]
    assert_four_sums(finish(start(command, **root)))


def test_all_reduce_by_hand() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    where = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [start(script("01_all_reduce.py"), RANK=str(rank), **where) for rank in range(4)]
    try:
        assert_four_sums("".join(finish(rank) for rank in ranks))
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ring(ranks: int) -> None:
    output = finish(start(script("02_send_recv.py", "--ranks", str(ranks))))
    assert output.count("has seen") == ranks


def test_group() -> None:
    output = finish(start(script("03_group.py", "--ranks", "3")))
    assert output.count("3 operations, all right") == 3
