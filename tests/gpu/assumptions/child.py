"""What runs in a process that the runner starts: one rank of a case, or all of them."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .abi import Api, CallError, NotTried, libraries
from .board import Board
from .notes import Notebook
from .stage import Shared, Stage

PDEATHSIG = 1


@dataclass(frozen=True)
class Task:
    """What such a process does; it crosses into it as JSON."""

    module: str
    arguments: dict[str, Any]
    engine: str
    ranks: tuple[int, ...]
    """The ranks of this process."""
    size: int
    folder: str


def notes_path(folder: Path, rank: int) -> Path:
    """Where a rank's notes are."""
    return folder / f"notes-{rank}.json"


def _rank(task: Task, rank: int, shared: Shared) -> None:
    folder = Path(task.folder)
    notebook = Notebook(notes_path(folder, rank))
    try:
        notebook.doing("the loading of the libraries")
        api = Api(*libraries(task.engine))
        stage = Stage(task.engine, api, Board(folder, rank, task.size), notebook, shared)
        importlib.import_module(f".{task.module}", __package__).run(stage, **task.arguments)
    except NotTried as reason:
        notebook.close("not tried", str(reason))
    except CallError as error:
        notebook.close("error", str(error))
    except BaseException as error:
        notebook.close("error", f"{type(error).__name__}: {error}")
        sys.excepthook(type(error), error, error.__traceback__)
    else:
        notebook.close("done")


def main(task: Task) -> None:
    """Run the ranks of this process, and leave it without clean-up."""
    faulthandler.enable()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
    shared = Shared(len(task.ranks))
    others = [
        threading.Thread(target=_rank, args=(task, rank, shared)) for rank in task.ranks[1:]
    ]
    for thread in others:
        thread.start()
    _rank(task, task.ranks[0], shared)
    for thread in others:
        thread.join()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
