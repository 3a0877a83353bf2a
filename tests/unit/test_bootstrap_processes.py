"""Ranks as real processes: killed, interrupted, forked, and started by mpiexec."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.meeting import close, free_port, meet, outcomes, rank, tcp, until

from pynccl._bootstrap import Session
from pynccl.errors import BootstrapError, ConfigError

TESTS = Path(__file__).parents[1]
ENVIRON = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
    "PYTHONUNBUFFERED": "1",
}


@contextmanager
def child(**task: object) -> Iterator[subprocess.Popen[str]]:
    """A rank in a process of its own, and of its own process group; killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "support.meeting_child", json.dumps(task)],
        env=ENVIRON,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)


async def said(process: subprocess.Popen[str], word: str) -> None:
    """Wait for a line of the child's."""
    assert process.stdout is not None
    loop = asyncio.get_running_loop()
    line = await loop.run_in_executor(None, process.stdout.readline)
    assert line.strip() == word, process.stderr and process.stderr.read()


async def losses(session: Session, seconds: float = 1.0) -> dict[int, float]:
    """The ranks lost within some seconds, each with the time it took."""
    start = time.monotonic()
    found: dict[int, float] = {}
    session.on_lost(lambda ranks, _: found.update({r: time.monotonic() - start for r in ranks}))
    await until(lambda: bool(found), seconds)
    return found


@pytest.mark.parametrize("fork", [False, True], ids=["", "with a forked child that lives on"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_seen_within_a_second(victim: int, fork: bool) -> None:
    async def main() -> None:
        address = tcp(free_port())
        with child(rank=victim, size=3, address=address, fork=fork) as process:
            here = [n for n in range(3) if n != victim]
            sessions = await asyncio.gather(*(rank(n, 3, address) for n in here))
            await asyncio.gather(*(session.report(True) for session in sessions))
            await said(process, "joining")
            await said(process, "joined")
            process.kill()
            for found in await asyncio.gather(*(losses(session) for session in sessions)):
                assert list(found) == [victim]
            await close(*sessions)

    asyncio.run(main())


def test_a_port_is_free_at_once_although_a_forked_child_of_rank_0_lives_on() -> None:
    async def main() -> None:
        address = tcp(free_port())
        with child(rank=0, size=2, address=address, fork=True) as process:
            first = await rank(1, 2, address)
            await first.report(True)
            await said(process, "joining")
            await said(process, "joined")
            process.kill()
            process.wait(10)
            await close(*await meet(2, address))
            await close(first)

    asyncio.run(main())


def test_thirty_attempts_in_a_row_on_one_port_each_after_a_kill() -> None:
    async def main() -> None:
        port = free_port()
        for attempt in range(30):
            victim = attempt % 2
            survivor = asyncio.ensure_future(rank(1 - victim, 3, tcp(port), timeout=0.2))
            with child(rank=victim, size=3, address=tcp(port)) as process:
                await said(process, "joining")
                process.kill()
            await outcomes(survivor)
        await close(*await meet(3, tcp(port)))

    asyncio.run(main())


@pytest.mark.parametrize("number", [0, 1])
def test_ctrl_c_ends_a_waiting_join(number: int) -> None:
    async def main() -> None:
        address = tcp(free_port())
        other = asyncio.ensure_future(rank(1 - number, 3, address))
        with child(rank=number, size=3, address=address) as process:
            await said(process, "joining")
            await asyncio.sleep(0.3)
            process.send_signal(signal.SIGINT)
            start = time.monotonic()
            loop = asyncio.get_running_loop()
            code = await loop.run_in_executor(None, process.wait, 10)
            assert time.monotonic() - start < 2.0
            assert code in (130, -signal.SIGINT)
        [error] = await outcomes(other)
        assert isinstance(error, BootstrapError)
        assert f"rank {number} gave up: it was cancelled" in str(error)

    asyncio.run(main())


# MPI


def mpiexec(task: dict[str, object], size: int = 3) -> subprocess.CompletedProcess[str]:
    """Run the child under Open MPI's mpiexec, which the test extra installs."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which("mpiexec", path=places)
    assert program is not None, "no mpiexec: install the test extra"
    command = [
        *(program, "--oversubscribe", "-n", str(size)),
        *(sys.executable, "-m", "support.meeting_child", json.dumps(task)),
    ]
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with subprocess.Popen(
        command,
        env={**ENVIRON, **as_root},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=45)
        except subprocess.TimeoutExpired:
            process.terminate()  # not kill: mpiexec has to end its ranks
            out, err = process.communicate(timeout=10)
            pytest.fail(f"mpiexec did not end: {out}{err}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.parametrize("address", ["env://", "mpi://"])
def test_mpiexec_alone_is_enough_and_ends_cleanly(address: str) -> None:
    done = mpiexec({"address": address, "leave": True, "times": 3})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split().count("joined") == 3


@pytest.mark.parametrize("level", ["multiple", "serialized", "funneled", "single"])
def test_a_program_that_initialised_mpi_itself(level: str) -> None:
    done = mpiexec({"address": "env://", "leave": True, "times": 2, "mpi": level}, size=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split().count("joined") == 2


def test_without_mpi4py_the_error_names_both_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import asyncio, sys; sys.modules['mpi4py'] = None\n"
        "from pynccl._bootstrap import join\n"
        "asyncio.run(join('mpi://', rank=0, size=2, hello={}, timeout=5))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=ENVIRON, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1
    [*_, last] = done.stderr.strip().splitlines()
    assert last.startswith(f"pynccl.errors.{ConfigError.__name__}")
    assert "pip install 'pynccl-aio[mpi]'" in last
    assert "MASTER_ADDR and MASTER_PORT" in last


def test_nothing_optional_is_imported_and_no_thread_started() -> None:
    script = (
        "import sys, threading, pynccl._bootstrap as b, asyncio\n"
        "assert not {'mpi4py', 'torch'} & set(sys.modules)\n"
        "assert threading.active_count() == 1\n"
        "assert asyncio.run(b.locate('env://', {})).size == 1\n"
    )
    subprocess.run([sys.executable, "-c", script], env=ENVIRON, check=True, timeout=30)


def test_an_mpi_attempt_that_was_given_up_does_not_disturb_the_next() -> None:
    """Rank 1 gives up twice before rank 0 comes again; old questions get no new answers."""
    done = mpiexec({"address": "mpi://", "leave": True, "give_up": 2}, size=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split().count("joined") == 2
    assert done.stdout.split().count("gave-up") == 2
