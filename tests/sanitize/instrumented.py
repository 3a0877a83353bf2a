"""The host engine with a sanitizer in it, and Python beneath that sanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOST = sorted((ROOT / "src" / "host").glob("*.c"))
PLANTED = [Path(__file__).with_name("planted.c")]
SUPPRESSIONS = Path(__file__).with_name("thread.supp")

KINDS = {
    "address": ("address,undefined", ("libasan.so", "libubsan.so")),
    "thread": ("thread", ("libtsan.so",)),
}
"""What gcc calls each kind, and the libraries that must come before all others."""


class Unavailable(RuntimeError):
    """This machine cannot run a sanitizer; the text says why."""


def build(kind: str, sources: Sequence[Path], folder: Path) -> Path:
    """A shared object of these sources with a sanitizer in it."""
    library = folder / f"lib{sources[0].stem}_{kind}.so"
    flags = ["-std=gnu11", "-O1", "-g", "-fno-omit-frame-pointer", "-fvisibility=hidden"]
    flags += ["-ffp-contract=off", "-shared", "-fPIC", f"-fsanitize={KINDS[kind][0]}"]
    # Beside the address sanitizer this one has no log: what it finds ends the process.
    flags += ["-fno-sanitize-recover=undefined"]
    # What lies outside an object is the address sanitizer's to tell.
    flags += ["-fno-sanitize=object-size"]
    command = [*flags, *map(str, sources), "-o", str(library), "-lpthread", "-ldl", "-lm"]
    subprocess.run([os.environ.get("CC", "gcc"), *command], check=True, timeout=120)
    return library


@dataclass
class Outcome:
    """How a run beneath a sanitizer ended."""

    code: int
    output: str
    reports: str


def run(kind: str, library: Path, arguments: Sequence[str], *, timeout: float) -> Outcome:
    """Run Python beneath a sanitizer, on a host engine that has it.

    Args:
        kind: one of KINDS.
        library: what PYNCCL_HOST_LIBRARY names for the run.
        arguments: Python's.
        timeout: seconds.

    Raises:
        Unavailable: the sanitizer does not start here.
    """
    log = library.with_suffix(".log")
    for old in log.parent.glob(f"{log.name}.*"):
        old.unlink()
    # Who touches forbidden memory on purpose ends by the signal, as without a sanitizer.
    options = f"log_path={log}:print_stacktrace=1:handle_segv=0"
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(runtime(name) for name in KINDS[kind][1]),
        # Python's own allocations outlive it, and are none of the engine's.
        "ASAN_OPTIONS": f"{options}:detect_leaks=0",
        "UBSAN_OPTIONS": options,
        "TSAN_OPTIONS": f"{options}:suppressions={SUPPRESSIONS}:exitcode=0",
        "PYNCCL_HOST_LIBRARY": str(library),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    python = [*fixed_addresses(environment), sys.executable]
    done = subprocess.run(
        [*python, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    reports = [path.read_text(errors="replace") for path in log.parent.glob(f"{log.name}.*")]
    return Outcome(done.returncode, done.stdout + done.stderr, "\n".join(reports))


def runtime(name: str) -> str:
    """Where gcc has a sanitizer's library."""
    command = [os.environ.get("CC", "gcc"), f"-print-file-name={name}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        raise Unavailable(f"gcc has no {name}")
    return found


def fixed_addresses(environment: dict[str, str]) -> list[str]:
    """What to put before a command: some kernels map memory where the sanitizer has its own."""
    tried = []
    for prefix in ([], ["setarch", "-R"]):
        done = subprocess.run(
            [*prefix, sys.executable, "-c", ""],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode == 0:
            return prefix
        tried.append(done.stderr.strip().partition("\n")[0])
    raise Unavailable(tried[0])
