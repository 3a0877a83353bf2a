"""Ask a library the probes, in a process of its own, and build the engines of this tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import toolchain
from declarations import ROOT
from probes import PROBES, Probe

Result = list[int | str | None]


def run_probes(library: Path) -> dict[str, Result]:
    """The results of every probe, by name; ["signal 11"] for one that killed its process.

    No GPU is visible to the library, and no configuration of this machine reaches it.
    """
    results: dict[str, Result] = {}
    names = [probe.name for probe in PROBES]
    while len(results) < len(names):
        waiting = names[len(results) :]
        done = subprocess.run(
            [
                sys.executable,
                str(Path(__file__).with_name("probe_child.py")),
                str(library),
                *waiting,
            ],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            env={
                **_clean_environment(),
                "PYTHONPATH": os.pathsep.join(sys.path),
                "CUDA_VISIBLE_DEVICES": "",
                "NCCL_CONF_FILE": os.devnull,
            },
        )
        for line in done.stdout.splitlines():
            if line.startswith('{"probe"'):
                answer = json.loads(line)
                results[answer["probe"]] = answer["results"]
        if done.returncode > 0:
            raise RuntimeError(f"the probes could not run on {library}:\n{done.stderr}")
        if done.returncode < 0:
            results[names[len(results)]] = [f"signal {-done.returncode}"]
    return results


def _clean_environment() -> dict[str, str]:
    return {
        k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "PYNCCL_", "CUDA_"))
    }


def complaints(probe: Probe, result: Result) -> list[str]:
    """Every call of the probe that did not answer as the table says."""
    if result and str(result[0]).startswith("signal "):
        return [f"{probe.name}: {result[0]}, but {probe.rule}"]
    wanted = [c.expected for c in probe.calls] + [(value,) for value in probe.finally_]
    labels = [c.function for c in probe.calls] + list(probe.reads)
    if len(result) != len(labels):
        return [
            f"{probe.name}: {len(result)} results of {len(labels)}: a function is not there"
        ]
    return [
        f"{probe.name}: {label} gave {value!r}, not {allowed}, but {probe.rule}"
        for label, allowed, value in zip(labels, wanted, result, strict=False)
        if allowed and value not in allowed
    ]


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
