"""`python -m pynccl host [options] -- COMMAND ...`: other programs' NCCL, on the CPU.

The command finds the host engine wherever it looks for libnccl or libcuda:

- a temporary directory has it under the names of both libraries, and is the first in
  ``LD_LIBRARY_PATH``, and in ``LIBRARY_PATH``, so that a compiler's ``-lnccl`` finds it too;
- ``LD_PRELOAD`` names both, so that they are in the process before anybody asks: a later
  ``dlopen("libnccl.so.2")`` gets what is there, and cuda-pathfinder looks there first;
- ``LD_AUDIT`` names an auditor that leads whoever opens such a library by its path (a wheel's,
  say) to the engine too.

With an older release in ``--nccl-version`` the library is a copy in which the functions that
came later cannot be found.

The command replaces this process, so that its signals and its exit status are its own. The
directory is removed by a small process that waits for the command's end.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import shutil
import sys
import tempfile
from pathlib import Path

from pynccl import _native, testing
from pynccl._tools.veil import veil
from pynccl.errors import NcclError

NAMES = ("libnccl.so.2", "libcuda.so.1", "libnccl.so", "libcuda.so")
VARIABLES = {
    "devices": "PYNCCL_HOST_DEVICES",
    "temper": "PYNCCL_HOST_TEMPER",
    "mode": "PYNCCL_HOST_MODE",
    "faults": "PYNCCL_HOST_FAULTS",
    "nccl_version": "PYNCCL_HOST_NCCL_VERSION",
}
CANNOT_RUN, NOT_FOUND = 126, 127  # as a shell says it


def parser() -> argparse.ArgumentParser:
    """The options; the command stands behind ``--``."""
    made = argparse.ArgumentParser(
        prog="python -m pynccl host",
        usage="%(prog)s [options] -- COMMAND [ARGUMENT ...]",
        description="Run a command with the host engine in place of libnccl and libcuda.",
        epilog="Other settings are PYNCCL_HOST_ variables, which the command inherits.",
    )
    made.add_argument("--devices", metavar="N", help="how many virtual devices there are")
    made.add_argument("--temper", choices=("quick", "gpulike"))
    made.add_argument("--mode", choices=("strict", "faithful"))
    made.add_argument(
        "--nccl-version", metavar="X.Y.Z", help="the release: without what came later"
    )
    made.add_argument("--faults", metavar="RULES", help="faults to inject: see pynccl.testing")
    return made


def library() -> Path:
    """The one object that is both libraries."""
    given = os.environ.get("PYNCCL_HOST_LIBRARY")
    return Path(given or Path(_native.__path__[0]) / "libpynccl_host.so").resolve()


def fill(directory: Path, settings: dict[str, str]) -> None:
    """Make the libraries' names in the directory.

    Raises:
        ConfigError: the engine does not understand a setting.
    """
    target, copy = library(), directory / "libpynccl_host.so"
    with testing.settings(**settings):
        absent = ctypes.CDLL(os.fspath(target)).pn_host_absent
        absent.argtypes = [ctypes.c_char_p]
        # Each function has a second name, which begins with a p.
        if veil(target, copy, lambda name: absent(name.removeprefix("p").encode())):
            target = copy
        else:
            copy.unlink()
    for name in NAMES:
        (directory / name).symlink_to(target)


def environment(directory: Path, settings: dict[str, str]) -> dict[str, str]:
    """What the command's environment has beside this one's."""
    auditor = Path(_native.__path__[0]) / "libpynccl_preload.so"
    found = {
        "LD_PRELOAD": _before("LD_PRELOAD", *(str(directory / name) for name in NAMES[:2])),
        "LD_LIBRARY_PATH": _before("LD_LIBRARY_PATH", str(directory)),
        "LIBRARY_PATH": _before("LIBRARY_PATH", str(directory)),
        "LD_AUDIT": _before("LD_AUDIT", str(auditor)),
        "PYNCCL_HOST_PRELOAD": str(directory),
    }
    return found | {VARIABLES[key]: value for key, value in settings.items()}


def _before(variable: str, *first: str) -> str:
    return ":".join((*first, *filter(None, [os.environ.get(variable)])))


def remove_afterwards(directory: Path) -> None:
    """Leave a process behind that removes the directory once this one, the command, has ended.

    It is nobody's child, so that a command that waits for its children does not wait for it.
    """
    ended = os.pidfd_open(os.getpid())
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os.close(ended)
        return
    with contextlib.suppress(BaseException):  # whatever happens: no second copy of this program
        os.setsid()
        if os.fork() == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(null, stream)
            os.chdir("/")
            select.select([ended], [], [])
            shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def main(arguments: list[str]) -> int:
    """Run the command in place of this process; a status only where it cannot be run."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser()
    chosen = {k: v for k, v in vars(options.parse_args(arguments[:split])).items() if v}
    command = arguments[split + 1 :]
    if not command:
        options.error("no command: write it behind --, as in `host -- python program.py`")
    directory = Path(tempfile.mkdtemp(prefix="pynccl-host-"))
    try:
        fill(directory, chosen)
        added = environment(directory, chosen)
        remove_afterwards(directory)
        os.execvpe(command[0], command, {**os.environ, **added})  # does not return
    except NcclError as error:
        options.error(str(error))
    except OSError as error:
        print(f"{options.prog}: {command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_RUN
    finally:
        shutil.rmtree(directory, ignore_errors=True)
