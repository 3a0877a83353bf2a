"""Which engine serves a device, and where its libraries are.

The engine belongs to the communicator: "cpu" is the host engine, a CUDA device is NCCL, and
both can live in one process. Nothing is opened before the first device is used.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from pathlib import Path

from pynccl import _native
from pynccl._native.engine import Engine
from pynccl._native.lifecycle import set_launch_blocking
from pynccl.errors import ConfigError, NotSupportedError

KINDS = ("nccl", "host", "noop")
_log = logging.getLogger("pynccl")
_lock = threading.Lock()
_opened: dict[str, Engine] = {}
_how: dict[str, str] = {}
_DEVICE = re.compile(r"(cuda|cpu)(?::(\d+))?")


def engine(kind: str) -> Engine:
    """The engine of a kind, opened at its first use.

    Raises:
        NotSupportedError: a library is missing; one sentence says which, and what to do.
    """
    with _lock:
        found = _opened.get(kind)
        if found is None:
            found = _opened[kind] = _open(kind)
        return found


def opened() -> dict[str, tuple[Engine, str]]:
    """The engines that are open, and how each one's NCCL was found."""
    with _lock:
        return {kind: (engine, _how[kind]) for kind, engine in _opened.items()}


def _open(kind: str) -> Engine:
    # Each launch then waits for its own end, which only a lane may do.
    set_launch_blocking(os.environ.get("CUDA_LAUNCH_BLOCKING", "0") == "1")
    if kind == "nccl":
        cuda = os.environ.get("PYNCCL_CUDA_LIBRARY", "libcuda.so.1")
        path, how = _find_nccl()
        _how[kind] = how
        return Engine("nccl", path, cuda, is_cuda=True)
    variable = f"PYNCCL_{kind.upper()}_LIBRARY"
    path = os.environ.get(variable) or os.fspath(
        Path(_native.__path__[0]) / f"libpynccl_{kind}.so"
    )
    _how[kind] = variable if variable in os.environ else "part of this package"
    return Engine(kind, path, path, is_cuda=False)


def _find_nccl() -> tuple[str, str]:
    """The path of libnccl, and how it was found; the driver is looked for first."""
    if not has_driver():
        raise NotSupportedError(
            "the nccl engine needs an NVIDIA driver, and this machine shows none (no "
            '/dev/nvidiactl); use device="cpu" or PYNCCL_ENGINE=host to run on the CPU'
        )
    explicit = os.environ.get("PYNCCL_NCCL_LIBRARY")
    if explicit:
        return explicit, "PYNCCL_NCCL_LIBRARY"
    mapped = mapped_copies()
    if mapped:
        return mapped[0], "mapped in this process already"
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        found = load_nvidia_dynamic_lib("nccl").abs_path
    except Exception as error:
        raise NotSupportedError(
            "there is an NVIDIA driver, but no libnccl.so.2: install it with "
            "`pip install 'pynccl-aio[cu13]'` (or [cu12], for a CUDA 12 driver), or name it in "
            f"PYNCCL_NCCL_LIBRARY ({error})"
        ) from None
    return str(found), "cuda-pathfinder"


def mapped_copies() -> list[str]:
    """Every libnccl that is mapped into this process, the first first; torch brings one."""
    paths: dict[str, None] = {}
    with Path("/proc/self/maps").open() as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if "libnccl.so" in path.rpartition("/")[2]:
                paths["/" + path] = None
    return list(paths)


def has_driver() -> bool:
    """Whether an NVIDIA driver shows itself, or PYNCCL_CUDA_LIBRARY names one."""
    return (
        "PYNCCL_CUDA_LIBRARY" in os.environ
        or Path("/dev/nvidiactl").exists()
        or Path("/dev/dxg").exists()
    )


def resolve(device: str | int | None, local_rank: int = 0) -> tuple[Engine, int]:
    """The engine and the ordinal behind a device argument.

    Args:
        device: ``"cuda:0"``, ``"cpu"``, ``"cpu:3"``, an ordinal of the default engine, or None
            for what the launcher and the machine suggest.
        local_rank: this process's number on its machine.

    Raises:
        ConfigError: there is no such device.
        NotSupportedError: its engine cannot be loaded.
    """
    default = os.environ.get("PYNCCL_ENGINE")
    if default is not None and default not in KINDS:
        raise ConfigError(f"PYNCCL_ENGINE is {default!r}, expected one of {', '.join(KINDS)}")
    ordinal: int | None = None
    if device is None or (isinstance(device, int) and not isinstance(device, bool)):
        ordinal = device
        kind = default or ("nccl" if has_driver() else "host")
        if device is None and default is None and kind == "host":
            _log.info("no NVIDIA driver here: running on the host engine (CPU)")
    else:
        match = _DEVICE.fullmatch(str(device))
        if match is None:
            raise ConfigError(
                f'device must be "cuda:N", "cpu", "cpu:N" or a number, not {device!r}'
            )
        ordinal = int(match[2]) if match[2] else None
        on_cpu = "noop" if default == "noop" else "host"
        kind = "nccl" if match[1] == "cuda" else on_cpu
    chosen = engine(kind)
    if ordinal is None:
        ordinal = local_rank if chosen.is_cuda else 0
    count = chosen.device_count()
    if not 0 <= ordinal < count:
        raise ConfigError(f"device {ordinal} does not exist: the {kind} engine has {count}")
    return chosen, ordinal
