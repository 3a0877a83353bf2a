"""Build the engines of this tree, and other shared objects, as the package is built."""

from __future__ import annotations

import subprocess
from pathlib import Path

import toolchain
from declarations import ROOT


def build_shared(sources: list[Path], output: Path, *flags: str) -> Path:
    """Compile C sources into one shared object as the package does: C11, hidden symbols."""
    command = [
        *toolchain.compiler(), "-std=gnu11", "-O1", "-fPIC", "-fvisibility=hidden", "-shared",
        *flags, *(str(source) for source in sources), "-o", str(output),
        "-Wl,-z,defs", "-lpthread", "-lm",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return output


def build_host_engine(directory: Path) -> Path:
    """The host engine of this tree, built here so that it is never a stale one."""
    return build_shared(sorted((ROOT / "src" / "host").glob("*.c")), directory / "libhost.so")


def build_noop_engine(directory: Path) -> Path:
    """The engine whose operations do nothing and which exports the names of symbols.h alone."""
    return build_shared(sorted((ROOT / "src" / "noop").glob("*.c")), directory / "libnoop.so")
