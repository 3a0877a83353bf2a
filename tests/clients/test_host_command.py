"""`python -m pynccl host`: who gets the engine, how it ends, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import hosted
import pytest
from test_clients import wheel

pytestmark = pytest.mark.timeout(240)  # several programs, each of which imports much

WHO = """
import ctypes, sys
for name in sys.argv[1:]:
    print(hasattr(ctypes.CDLL(name), "pn_host_set"))
"""
REAL = str(wheel() / "lib" / "libnccl.so.2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder, in which the command makes its own."""
    made = tmp_path / "temporary"
    made.mkdir()
    return made


def empties(folder: Path) -> bool:
    end = time.monotonic() + 10
    while any(folder.iterdir()) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(folder.iterdir())


# ---- who gets the engine


def test_the_engine_wins_by_every_name() -> None:
    names = ["libnccl.so.2", "libnccl.so", "libcuda.so.1", REAL, "/nowhere/libnccl.so.2"]
    ended = hosted.run([sys.executable, "-c", WHO, *names])
    assert ended == (0, "True\n" * len(names), "")


def test_without_the_auditor_a_path_wins() -> None:
    """What the auditor is for: without it, a client that opens a path gets that file."""
    command = [sys.executable, "-c", WHO, "libnccl.so.2", REAL]
    script = f"import os; del os.environ['LD_AUDIT']; os.execv({sys.executable!r}, {command})"
    assert hosted.run([sys.executable, "-c", script]) == (0, "True\nFalse\n", "")


def test_pathfinder_and_children_find_it() -> None:
    find = "import cuda.pathfinder as p; print(p.load_nvidia_dynamic_lib('nccl').abs_path)"
    status, said, errors = hosted.run(["sh", "-c", f'"{sys.executable}" -c "{find}"'])
    assert (status, errors) == (0, "")
    assert Path(said.strip()).parent.name.startswith("pynccl-host-")


def test_both_names_are_one_library_also_for_pynccl_itself() -> None:
    script = (
        "import ctypes, pynccl.testing as t;"
        "cuda = ctypes.CDLL('libcuda.so.1'); cuda.cuInit(0);"
        "before = t.live()['streams'];"
        "c = ctypes.c_void_p(); cuda.cuDevicePrimaryCtxRetain(ctypes.byref(c), 0);"
        "cuda.cuCtxSetCurrent(c); s = ctypes.c_void_p();"
        "cuda.cuStreamCreate(ctypes.byref(s), 1); print(t.live()['streams'] - before)"
    )
    assert hosted.run([sys.executable, "-c", script]) == (0, "1\n", "")


def test_options_and_variables_reach_the_engine() -> None:
    count = (
        "import ctypes; c = ctypes.CDLL('libcuda.so.1'); c.cuInit(0); n = ctypes.c_int();"
        "c.cuDeviceGetCount(ctypes.byref(n)); print(n.value)"
    )
    program = [sys.executable, "-c", count]
    assert hosted.run(program, "--devices", "3")[1] == "3\n"
    assert hosted.run(program, PYNCCL_HOST_DEVICES="5")[1] == "5\n"
    version = (
        "import ctypes; n = ctypes.CDLL('libnccl.so.2'); v = ctypes.c_int();"
        "names = 'ncclCommSplit pncclCommSplit ncclCommShrink pncclCommShrink ncclPutSignal';"
        "n.ncclGetVersion(ctypes.byref(v));"
        "print(v.value, *[hasattr(n, name) for name in names.split()])"
    )
    program = [sys.executable, "-c", version]
    assert hosted.run(program)[1] == "23203 True True True True True\n"
    older = "22105 True True False False False\n"
    assert hosted.run(program, "--nccl-version", "2.21.5") == (0, older, "")
    assert hosted.run(program, PYNCCL_HOST_NCCL_VERSION="2.21.5") == (0, older, "")
    newer = hosted.run(program, "--nccl-version", "2.27.3")[1]
    assert newer == "22703 True True True True False\n"
    fail = (
        "import ctypes; n = ctypes.CDLL('libnccl.so.2');"
        "print(n.ncclGroupStart(), n.ncclGroupEnd())"
    )
    rules = ("--faults", "call:fail=3,name=ncclGroupEnd")
    assert hosted.run([sys.executable, "-c", fail], *rules)[1] == "0 3\n"


# ---- how it ends


def test_the_exit_status_is_the_commands(folder: Path) -> None:
    ended = hosted.run(["sh", "-c", "cat; echo out; exit 7"], TMPDIR=str(folder))
    assert ended == (7, "out\n", "")
    assert empties(folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_are_the_commands(folder: Path, number: signal.Signals) -> None:
    process = hosted.start(["sh", "-c", "echo there; exec sleep 60"], TMPDIR=str(folder))
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    assert any(folder.iterdir())
    process.send_signal(number)
    assert hosted.finish(process)[0] == -number
    assert empties(folder)


def test_the_command_has_no_child_that_it_did_not_start(folder: Path) -> None:
    script = "import os; os.waitpid(-1, 0)"
    status, _, errors = hosted.run([sys.executable, "-c", script], TMPDIR=str(folder))
    assert status == 1
    assert "ChildProcessError" in errors
    assert empties(folder)


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        ([], 2, "no command"),
        (["sh"], 2, "unrecognized arguments: sh"),
        (["--temper", "mild", "--", "true"], 2, "invalid choice: 'mild'"),
        (["--devices", "many", "--", "true"], 2, "refuses devices='many'"),
        (["--faults", "break:everything", "--", "true"], 2, "refuses faults="),
        (["--", "pynccl-no-such-command"], 127, "No such file"),
        (["--", os.devnull], 126, "ermission denied"),
    ],
)
def test_what_cannot_run_is_told(
    folder: Path, arguments: list[str], status: int, complaint: str
) -> None:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options, command = arguments[:split], arguments[split + 1 :]
    ended, said, errors = hosted.run(command, *options, TMPDIR=str(folder))
    assert (ended, said) == (status, "")
    assert complaint in errors
    assert empties(folder)
