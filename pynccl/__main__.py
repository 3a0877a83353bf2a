"""`python -m pynccl info | bench`."""

from __future__ import annotations

import argparse
import importlib

COMMANDS = {
    "info": "what is installed here: engines, libraries, devices",
    "bench": "what an operation costs, against its rivals in the same run",
}


def main() -> int:
    """Run one of the tools."""
    parser = argparse.ArgumentParser(prog="python -m pynccl")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    chosen, rest = parser.parse_known_args()
    return int(importlib.import_module(f"pynccl._tools.{chosen.command}").main(rest))


if __name__ == "__main__":
    raise SystemExit(main())
