"""The host engine built for aarch64 and run by an emulator: NEON, and a program on top of it.

Ranks are threads here: the emulator tells a process another start time than the kernel tells
the others, who then take it for gone.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "abi"))
import toolchain

ROOT = Path(__file__).parents[2]
HOST = ROOT / "src" / "host"
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
SYSTEM = Path("/usr/aarch64-linux-gnu")
FLAGS = ["-std=gnu11", "-O2", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
STRICT = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
ARITHMETIC = [*sorted(HOST.glob("reduce*.c")), HOST / "copy.c"]

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None,
        reason="no aarch64: waits for Debian's gcc-aarch64-linux-gnu and qemu-user",
    ),
]


def run(command: list[str | Path]) -> str:
    """Run what must end well within a minute or two; return its output."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def emulate(program: Path, **environment: str) -> str:
    """Run a program for aarch64."""
    given = [word for item in environment.items() for word in ("-E", "=".join(item))]
    return run([EMULATOR, "-L", SYSTEM, *given, program])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the engine under the names that programs look for, for aarch64."""
    folder = tmp_path_factory.mktemp("aarch64")
    jobs = [
        subprocess.Popen(
            [COMPILER, *FLAGS, *STRICT, "-c", source, "-o", folder / f"{source.stem}.o"]
        )
        for source in sorted(HOST.glob("*.c"))
    ]
    assert [job.wait() for job in jobs] == [0] * len(jobs)
    objects = sorted(folder.glob("*.o"))
    link = ["-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", "-lpthread", "-ldl", "-lm"]
    run([COMPILER, *objects, *link, "-Wl,-soname,libnccl.so.2", "-o", folder / "libnccl.so.2"])
    for name in ("libnccl.so", "libcuda.so"):
        (folder / name).symlink_to("libnccl.so.2")
    return folder


def test_neon_gives_the_same_bits(tmp_path: Path) -> None:
    program = ROOT / "tests" / "aarch64" / "arithmetic.c"
    sources: list[str | Path] = [program, *ARITHMETIC]
    here, there = tmp_path / "here", tmp_path / "there"
    run(["cc", *FLAGS, *sources, "-o", here])
    run([COMPILER, *FLAGS, *STRICT, *sources, "-o", there])
    wanted = run([here, "portable"])
    assert wanted == run([here, "best"])
    assert len(wanted.splitlines()) > 100
    assert emulate(there) == wanted


@pytest.mark.parametrize("temper", ["quick", "gpulike"])
def test_a_program_runs_on_the_engine(engine: Path, tmp_path: Path, temper: str) -> None:
    spec = importlib.util.find_spec("nvidia.nccl")
    assert spec is not None
    headers = Path(next(iter(spec.submodule_search_locations or ()))) / "include"
    stand_ins = toolchain.write_stand_ins(tmp_path)
    program = tmp_path / "together"
    places = ["-isystem", headers, "-isystem", stand_ins, "-L", engine]
    source = ROOT / "tests" / "aarch64" / "together.c"
    run([COMPILER, "-std=gnu11", *places, source, "-o", program, "-lnccl"])
    said = emulate(program, LD_LIBRARY_PATH=str(engine), PYNCCL_HOST_TEMPER=temper)
    assert said.split() == ["2", "30000", "1000003"]
