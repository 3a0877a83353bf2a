"""The figures of `bench --peers`: the host engine against MPI and gloo, in one run."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pynccl._native import __path__ as native_path
from pynccl._tools import peers_child
from pynccl._tools.figures import Figure
from pynccl._tools.peers_child import IN_C, KIB, MIB, MOVED, MOVES

Times = dict[str, float]  # microseconds by case
DEADLINE = 300.0
LIBRARY = f"{native_path[0]}/libpynccl_host.so"
CHILD = os.fspath(Path(peers_child.__file__))
BEST = "best MPI"
OPEN_MPI, MPICH, GLOO = "Open MPI", "MPICH", "gloo"


@dataclass(frozen=True)
class Row:
    """A line of the table: a case of the child, and the factors that it must reach."""

    name: str
    case: str
    size: int
    must: dict[str, float]


SHORT = "all_reduce 8"

ROWS = [
    Row("all_reduce 8 B, 2 processes", SHORT, 2, {GLOO: 50, OPEN_MPI: 0.5}),
    Row("all_reduce 8 B, 4 processes", SHORT, 4, {BEST: 1.5}),
    Row("all_reduce 64 KiB, 2 processes", f"all_reduce {64 * KIB}", 2, {BEST: 1.5}),
    Row("all_reduce 1 MiB, 2 processes", f"all_reduce {MIB}", 2, {BEST: 1.4}),
    Row("all_reduce 64 MiB, 2 processes", f"all_reduce {64 * MIB}", 2, {BEST: 2}),
    Row("all_reduce 64 MiB, registered, in place", "registered", 2, {BEST: 6}),
    Row("all_reduce 64 MiB, 4 processes", f"all_reduce {64 * MIB}", 4, {BEST: 2}),
    *(Row(f"{name} {MOVED // MIB} MiB, 2 processes", name, 2, {BEST: 1.3}) for name in MOVES),
]


def run(rounds: int, only: str | None, pythons: dict[str, str | None]) -> list[Figure]:
    """Every contender once a round, in turn; `pythons` names the interpreter of each rival."""
    rows = [row for row in ROWS if only is None or only in row.name]
    rivals, absent = find_rivals(pythons)
    seen: dict[tuple[str, int], list[Times]] = {}
    for _ in range(rounds):
        for size in sorted({row.size for row in rows}):
            for name, start in {"ours": run_host, **rivals}.items():
                seen.setdefault((name, size), []).append(start(size))
    medians = {key: median_times(times) for key, times in seen.items()}
    return [figure(row, medians, list(rivals), absent) for row in rows]


def median_times(times: list[Times]) -> Times:
    """The median of each case."""
    return {case: statistics.median(one[case] for one in times) for case in times[0]}


def figure(
    row: Row, medians: dict[tuple[str, int], Times], rivals: list[str], absent: dict[str, str]
) -> Figure:
    """One line, with the better of the two MPIs as a rival of its own."""
    ours = medians["ours", row.size]
    rival_case = f"all_reduce {64 * MIB}" if row.case == "registered" else row.case
    found = {
        name: medians[name, row.size][rival_case]
        for name in rivals
        if rival_case in medians[name, row.size]
    }
    mpi = [found[name] for name in (OPEN_MPI, MPICH) if name in found]
    if mpi:
        found[BEST] = min(mpi)
    must = dict(row.must)
    notes: dict[str, float | str] = {}
    if row.case == "registered":
        notes["the same loads and stores by NumPy, us"] = ours["bound"]
        if mpi:  # or 80 % of the memory's own bound, whichever is less
            must[BEST] = min(must[BEST], 0.8 * found[BEST] / ours["bound"])
    if f"{row.case} bound" in ours:
        notes["as much memory copied with nobody to wait for, us"] = ours[f"{row.case} bound"]
    value = ours[row.case]
    if row.case == SHORT:
        notes["the same called by ctypes, us"], value = value, ours[IN_C]
    return Figure(row.name, "us", value, found, must, absent=absent, notes=notes)


# ---- contenders ----------------------------------------------------------------------------


def collect(ranks: list[subprocess.Popen[bytes]]) -> Times:
    """The slowest rank's time of each case; raise what went wrong."""
    lines: list[Times] = []
    try:
        for rank in ranks:
            output = rank.communicate(timeout=DEADLINE)[0].decode()
            if rank.returncode:
                raise RuntimeError(f"{rank.args!r} ended with {rank.returncode}")
            lines += [json.loads(line) for line in output.splitlines() if line[:1] == "{"]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    return {case: max(line[case] for line in lines) for case in lines[0]}


def start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A child that prints lines of JSON."""
    return subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE)


def run_host(size: int) -> Times:
    """This process makes the unique id, and so must live until the ranks have met."""
    unique_id = (ctypes.c_char * 128)()
    if ctypes.CDLL(LIBRARY).ncclGetUniqueId(unique_id):
        raise RuntimeError("ncclGetUniqueId of the host engine failed")
    words = [LIBRARY, str(size), bytes(unique_id).hex()]
    return collect(
        [
            start([sys.executable, CHILD, "host", words[0], str(rank), *words[1:]], {})
            for rank in range(size)
        ]
    )


def run_mpi(python: str, mpirun: str, flags: list[str], size: int) -> Times:
    """Under mpirun. Open MPI refuses the root user unless told twice."""
    environment = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    return collect(
        [start([mpirun, *flags, "-n", str(size), python, CHILD, "mpi"], environment)]
    )


def run_gloo(python: str, size: int) -> Times:
    """The ranks of torch meet at a file."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        return collect(
            [
                start([python, CHILD, "gloo", store, str(rank), str(size)], {})
                for rank in range(size)
            ]
        )


# ---- what is installed ---------------------------------------------------------------------


def find_rivals(
    pythons: dict[str, str | None],
) -> tuple[dict[str, Callable[[int], Times]], dict[str, str]]:
    """How to start each rival, and why some cannot be."""
    rivals: dict[str, Callable[[int], Times]] = {}
    absent: dict[str, str] = {}
    for name in (OPEN_MPI, MPICH):
        reason = f"no {name} was found; give the Python that has mpi4py for it"
        for python, mpirun in candidates(pythons.get(name)):
            if not has_module(python, "mpi4py"):
                reason = f"{python} has no mpi4py"
            elif implementation(mpirun) == name:
                flags = ["--oversubscribe"] if name == OPEN_MPI else []
                rivals[name] = lambda size, p=python, m=mpirun, f=flags: run_mpi(p, m, f, size)  # type: ignore[misc]
                break
        else:
            absent[name] = reason
    torch = pythons.get(GLOO) or sys.executable
    if has_module(torch, "torch"):
        rivals[GLOO] = lambda size: run_gloo(torch, size)
    else:
        absent[GLOO] = f"{torch} has no torch"
    return rivals, absent


def candidates(python: str | None) -> Iterator[tuple[str, str]]:
    """Interpreters with the mpirun beside them, or the one that a shell would find."""
    chosen = python or sys.executable
    beside = Path(chosen).parent / "mpirun"
    if beside.exists():
        yield chosen, os.fspath(beside)
    found = shutil.which("mpirun")
    if found is not None:
        yield chosen, found


def has_module(python: str, module: str) -> bool:
    """Whether an interpreter can find a module and NumPy."""
    code = (
        f"import importlib.util as u; raise SystemExit(not (u.find_spec({module!r}) and "
        "u.find_spec('numpy')))"
    )
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def implementation(mpirun: str) -> str | None:
    """Which MPI an mpirun belongs to."""
    version = subprocess.run(
        [mpirun, "--version"], capture_output=True, check=False, timeout=30
    ).stdout.decode()
    if "Open MPI" in version:
        return OPEN_MPI
    return MPICH if "HYDRA" in version else None
