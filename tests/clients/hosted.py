"""Other programs on the host engine: run by `python -m pynccl host`, a process a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 110.0


def environment() -> dict[str, str]:
    """This process's, without what earlier tests or a user may have set for the engine."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYNCCL_", "NCCL_", "LD_", "CUDA_"))
    }
    library = os.environ.get("PYNCCL_HOST_LIBRARY")
    return {
        **kept,
        **({"PYNCCL_HOST_LIBRARY": library} if library else {}),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def start(
    command: list[str], *options: str, folder: Path | None = None, **variables: str
) -> subprocess.Popen[str]:
    """Start a command under `python -m pynccl host`."""
    return subprocess.Popen(
        [sys.executable, "-m", "pynccl", "host", *options, "--", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**environment(), **variables},
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The exit status and what was written; a process that does not end is killed."""
    try:
        out, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
        errors += f"\nkilled after {LIMIT_S:g} s"
    return process.returncode, out, errors


def run(command: list[str], *options: str, **variables: str) -> tuple[int, str, str]:
    """Start and finish one command."""
    return finish(start(command, *options, **variables))


def run_ranks(
    command: list[str], ranks: int, folder: Path, *options: str, **variables: str
) -> list[list[str]]:
    """Run `command RANK RANKS FILE` for each rank; gives the lines that each one wrote.

    The file is where rank 0 leaves the unique id. All must end with status 0 and say nothing on
    stderr.
    """
    exchange = str(folder / "unique-id")
    started = [
        start([*command, str(rank), str(ranks), exchange], *options, **variables)
        for rank in range(ranks)
    ]
    ends = [finish(process) for process in started]
    for rank, (status, _, errors) in enumerate(ends):
        assert (status, errors) == (0, ""), f"rank {rank} ended with {status}:\n{errors}"
    return [out.splitlines() for _, out, _ in ends]
