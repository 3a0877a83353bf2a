"""`python -m pynccl info`: what is installed here."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pynccl
from pynccl import _engines
from pynccl.errors import NcclError


def describe(kind: str) -> dict[str, Any]:
    """One engine: its libraries and devices, or why it cannot be used."""
    try:
        engine = _engines.engine(kind)
        devices = [engine.device_identity(i)[2] for i in range(engine.device_count())]
    except NcclError as error:
        return {"unavailable": str(error)}
    return {**pynccl.library_info()[kind], "devices": devices}


def main(arguments: list[str]) -> int:
    """Print it, as text or with --json."""
    parser = argparse.ArgumentParser(prog="python -m pynccl info")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    report: dict[str, Any] = {"pynccl": pynccl.__version__}
    report.update({kind: describe(kind) for kind in _engines.KINDS})
    if chosen.json:
        print(json.dumps(report, indent=2))
        return 0
    for name, value in report.items():
        if isinstance(value, str):
            print(f"{name}: {value}")
            continue
        print(f"{name}:")
        for key, detail in value.items():
            shown = ", ".join(detail) if isinstance(detail, list) else detail
            print(f"  {key}: {shown}")
    return 0
