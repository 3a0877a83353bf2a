"""Run the probes against one library: `python probe_child.py LIBRARY [PROBE ...]`.

Prints one JSON line a probe, {"probe": name, "results": [...]}, as soon as it is done, so that
a probe that kills the process is known by its missing line. Each probe has a thread of its
own: the state of a group is a thread's, so what one probe leaves behind ends with its thread.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
from typing import Any

from probes import PROBES, Call, Probe
from support.symbols import our_symbols


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


class Sized(ctypes.Structure):
    """What every versioned struct of NCCL begins with, and room for the rest."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("rest", ctypes.c_char * 256),
    )


class Scratch:
    """The memory that the arguments of one probe point at, by name."""

    def __init__(self) -> None:
        self.memory: dict[str, Any] = {
            "int": ctypes.c_int(-7),
            "pointer": ctypes.c_void_p(),
            "id": UniqueId(),
            "id2": UniqueId(),
            "scalar": ctypes.c_float(0.5),
            "bytes": ctypes.create_string_buffer(64),
            "unknown key": ctypes.create_string_buffer(b"PYNCCL_NO_SUCH_PARAMETER"),
            "known key": ctypes.create_string_buffer(b"NCCL_DEBUG"),
            "config with bad magic": Sized(size=120, magic=1, version=23203),
            "config of size 8": Sized(size=8, magic=0xCAFEBEEF, version=23203),
        }

    def argument(self, value: int | str | None) -> object:
        return ctypes.addressof(self.memory[value]) if isinstance(value, str) else value

    def read(self, name: str) -> str | int | None:
        memory = self.memory[name]
        if isinstance(memory, ctypes.Structure):
            return bytes(memory).hex()
        value: int | None = getattr(memory, "value", None)
        return value


HANDLES = ("ncclComm_t", "cudaStream_t", "ncclParamHandle_t", "ncclWindow_t")
Functions = dict[str, Any]  # ctypes has no public name for the type of a function


def c_type(parameter: str) -> type:
    """The ctypes type of a parameter's text, as symbols.h has it."""
    words = parameter.rsplit(" ", 1)[0].removeprefix("const ")
    if "*" in parameter or words in HANDLES:
        return ctypes.c_void_p
    return {"size_t": ctypes.c_size_t, "ncclUniqueId": UniqueId}.get(words, ctypes.c_int)


def load(path: str) -> Functions:
    """The functions of symbols.h that the library has, typed from symbols.h."""
    library = ctypes.CDLL(path)
    functions = {}
    for symbol in our_symbols():
        if symbol.library == "nccl" and (function := getattr(library, symbol.name, None)):
            function.restype = ctypes.c_char_p if "*" in symbol.result else ctypes.c_int
            function.argtypes = [c_type(parameter) for parameter in symbol.parameters]
            functions[symbol.name] = function
    return functions


def run_call(functions: Functions, scratch: Scratch, call: Call) -> int | str | None:
    arguments = [
        scratch.memory["id"] if kind is UniqueId else scratch.argument(value)
        for kind, value in zip(functions[call.function].argtypes, call.arguments, strict=True)
    ]
    result = functions[call.function](*arguments)
    return result.decode() if isinstance(result, bytes) else result


def run_probe(functions: Functions, probe: Probe) -> list[object]:
    scratch = Scratch()
    results: list[object] = [run_call(functions, scratch, call) for call in probe.calls]
    return results + [scratch.read(name) for name in probe.reads]


def main() -> None:
    functions = load(sys.argv[1])
    chosen = set(sys.argv[2:])
    for probe in PROBES:
        if chosen and probe.name not in chosen:
            continue
        results: list[object] = []
        if all(call.function in functions for call in probe.calls):
            thread = threading.Thread(
                target=lambda into, probe: into.extend(run_probe(functions, probe)),
                args=(results, probe),
            )
            thread.start()
            thread.join()
        print(json.dumps({"probe": probe.name, "results": results}), flush=True)


if __name__ == "__main__":
    main()
