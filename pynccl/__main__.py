"""`python -m pynccl info | bench | host`."""

from __future__ import annotations

import argparse
import importlib
import sys

COMMANDS = {
    "info": "what is installed here: engines, libraries, devices",
    "bench": "what an operation costs, against its rivals in the same run",
    "host": "run another program with the host engine as its libnccl and libcuda",
}


def main() -> int:
    """Run one of the tools."""
    parser = argparse.ArgumentParser(prog="python -m pynccl")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    chosen = parser.parse_args(sys.argv[1:2])  # what follows is the tool's own
    return int(importlib.import_module(f"pynccl._tools.{chosen.command}").main(sys.argv[2:]))


if __name__ == "__main__":
    raise SystemExit(main())
