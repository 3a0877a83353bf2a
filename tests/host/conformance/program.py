"""The command: ask libraries all rules, and print what differs.

::

    python -m tests.host.conformance [--host PATH] [--nccl PATH] [--devices NCCL CUDA]

The host engine is asked everything, in both of its tempers and with no devices; a libnccl is
asked what needs no device. ``--devices`` asks what needs devices of a real libnccl and driver.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hostlib import library_path

from conformance import coverage
from conformance.rules import Needs, Rule, every_rule
from conformance.runner import Answer, ask

if TYPE_CHECKING:
    from collections.abc import Sequence

Answers = dict[str, Answer]
WITHOUT_DEVICES = (Needs.NOTHING, Needs.NO_DEVICE)
WITH_DEVICES = (Needs.NOTHING, Needs.DEVICES, Needs.HOST)
# Rules that the host engine and the real library answer differently, with the reason.
DIFFERENCES: dict[str, str] = {}


def chosen(*needs: Needs) -> list[Rule]:
    """The rules of some kinds."""
    return [rule for rule in every_rule() if rule.needs in needs]


def ask_host(temper: str, path: str | None = None) -> Answers:
    """The host engine with devices, in one temper."""
    environment = {"PYNCCL_HOST_TEMPER": temper}
    return ask(chosen(*WITH_DEVICES), path or str(library_path()), environment=environment)


def ask_host_without_devices(path: str | None = None) -> Answers:
    """The host engine on a machine without a device."""
    environment = {"PYNCCL_HOST_DEVICES": "0"}
    return ask(chosen(*WITHOUT_DEVICES), path or str(library_path()), environment=environment)


def ask_real(path: str) -> Answers:
    """A libnccl that sees no device."""
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    return ask(chosen(*WITHOUT_DEVICES), path, environment=environment)


def real_library() -> str | None:
    """The libnccl of the installed wheel."""
    package = importlib.util.find_spec("nvidia.nccl")
    folders = package.submodule_search_locations if package else None
    found = [Path(folder) / "lib" / "libnccl.so.2" for folder in folders or ()]
    return next((str(path) for path in found if path.exists()), None)


def unlike(host: Answers, real: Answers) -> list[str]:
    """Rules whose calls returned something else on the one than on the other."""
    return [
        f"{name}: {_first_difference(host[name], real[name])}"
        for name in real
        if host[name].seen != real[name].seen and name not in DIFFERENCES
    ]


def _first_difference(host: Answer, real: Answer) -> str:
    for ours, theirs in zip(host.seen, real.seen, strict=False):
        if ours != theirs:
            return f"the host engine {ours}, the library {theirs}"
    return f"{len(host.seen)} calls on the host engine, {len(real.seen)} on the library"


def report(title: str, answers: Answers, verbose: bool) -> int:
    """Print what was wrong; the number of rules that were broken."""
    broken = {name: a.complaints for name, a in answers.items() if a.complaints}
    print(f"{title}: {len(answers) - len(broken)} of {len(answers)} rules hold")
    for name, complaints in broken.items():
        print(f"  {name}")
        for complaint in complaints:
            print(f"    {complaint}")
    if verbose:
        for name in answers:
            if name not in broken:
                print(f"  holds: {name}")
    return len(broken)


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask everything; 0 if all rules hold and the libraries answer alike."""
    parser = argparse.ArgumentParser(prog="python -m tests.host.conformance")
    parser.add_argument("--host", help="the host engine (default: the installed one)")
    parser.add_argument("--nccl", help="a libnccl (default: that of the installed wheel)")
    parser.add_argument("--devices", nargs=2, metavar=("NCCL", "CUDA"))
    parser.add_argument("--verbose", action="store_true", help="name the rules that hold, too")
    options = parser.parse_args(arguments)
    if options.devices:
        answers = ask(
            chosen(Needs.NOTHING, Needs.DEVICES), *options.devices, environment=os.environ
        )
        return min(1, report("with devices", answers, options.verbose))
    print(coverage.table(every_rule()), end="\n\n")
    wrong = len(coverage.gaps(every_rule()))
    for temper in ("quick", "gpulike"):
        wrong += report(
            f"host engine, {temper}", ask_host(temper, options.host), options.verbose
        )
    host = ask_host_without_devices(options.host)
    wrong += report("host engine without devices", host, options.verbose)
    path = options.nccl or real_library()
    if path is None:
        print("no libnccl to compare with: install nvidia-nccl-cu13, or give --nccl")
        return 1
    real = ask_real(path)
    wrong += report(f"{path} without devices", real, options.verbose)
    different = unlike(host, real)
    print(
        f"answered differently: {len(different)} of {len(real)}, "
        f"and {len(DIFFERENCES)} with a reason"
    )
    for line in (*different, *(f"{name}: {why}" for name, why in DIFFERENCES.items())):
        print(f"  {line}")
    return min(1, wrong + len(different))
