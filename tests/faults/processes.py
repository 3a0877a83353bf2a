"""Programs in fresh interpreters: for what ends a process, or must be seen in its output."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass

HEAD = """
import asyncio, ctypes, gc, os, random, signal, sys, threading, time, warnings
import numpy as np
import pynccl
from pynccl import testing

def made(count=2):
    return pynccl.create_all([f"cpu:{i}" for i in range(count)])

def inject(rules):
    block = testing.faults(rules)
    block.__enter__()
    # Never left, not even by the collector: what is stuck stays so to the end of the process.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(block))
"""


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    status: int
    output: str
    errors: str
    seconds: float
    """From its line "go", or from its start, to its end."""


def environment(temper: str, **more: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYNCCL_HOST_TEMPER": temper,
        "PYTHONPATH": os.pathsep.join(sys.path),
        **more,
    }


def run(
    program: str, *options: str, temper: str = "quick", interrupt: int = 0, **more: str
) -> Ended:
    """Run a program; with `interrupt`, send it that signal a little after its line "go"."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *options, "-c", HEAD + program],
        env=environment(temper, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    head = ""
    try:
        if interrupt:
            assert process.stdout is not None
            head = process.stdout.readline()
            if head == "go\n":
                time.sleep(0.15)
                started = time.perf_counter()
                process.send_signal(interrupt)
        output, errors = process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        errors += "\n(killed: it did not end)"
    seconds = time.perf_counter() - started
    return Ended(process.returncode, head + output, errors, seconds)
