"""A rank is killed at a random moment: the others learn of it, go on, and nothing is left."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from processes import environment

KILLING = Path(__file__).with_name("killing.py")
SOON_S = 5.0
"""Far below the deadline of the operations: the loss was noticed. A busy machine is slow."""
NEVER_CAME = ("could not reach rank 0", "had not come after")
"""What remains to be said of a rank that was killed before it met the others."""


def rounds(folder: Path, temper: str, ranks: int, count: int, seed: int) -> list[Any]:
    """The lines of killing.py."""
    done = subprocess.run(
        [sys.executable, str(KILLING), str(ranks), str(count), str(seed)],
        cwd=folder,
        env=environment(temper),
        capture_output=True,
        text=True,
        timeout=60 + 15 * count,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def complaint(survivor: dict[str, Any], ranks: int) -> str:
    """What is wrong with how a rank took the loss of another; empty if nothing is."""
    if "broken" in survivor:
        return str(survivor["broken"])
    if survivor["sum"] != ranks - 1:
        return f"a new sum of {survivor['sum']}"
    if survivor["stage"] == "connect" and any(w in survivor["said"] for w in NEVER_CAME):
        return ""
    if not survivor["seconds"] < SOON_S:
        return f"told after {survivor['seconds']:.2f} s"
    if survivor["said"].startswith(("DeadlineError", "MismatchError")):
        return f"told {survivor['said']}"
    return ""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("temper", ["quick", "gpulike"])
@pytest.mark.parametrize("ranks", [3, 4])
def test_a_rank_is_killed(tmp_path: Path, temper: str, ranks: int, long: bool) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    *kills, left = rounds(tmp_path, temper, ranks, 50 if long else 5, seed)
    wrong = [
        f"seed {kill['seed']}, rank {one['rank']} ({one.get('stage')}): {problem}"
        for kill in kills
        for one in kill["survivors"]
        if (problem := complaint(one, ranks))
    ]
    assert wrong == []
    assert [kill["listening"] + kill["named"] for kill in kills] == [[]] * len(kills)
    assert left["after"] == left["before"]
    stages = Counter(one["stage"] for kill in kills for one in kill["survivors"])
    print(temper, ranks, dict(stages))


@pytest.mark.parametrize(
    ("survivor", "words"),
    [
        ({"broken": "Traceback"}, "Traceback"),
        ({}, ""),
        ({"sum": 3.0}, "sum of 3"),
        ({"seconds": 9.0}, "after 9"),
        ({"said": "DeadlineError: rank 1 had not come after 4 s"}, "DeadlineError"),
        ({"said": "DeadlineError: rank 1 had not come after 4 s", "stage": "connect"}, ""),
    ],
)
def test_what_would_be_wrong_is_seen(survivor: dict[str, Any], words: str) -> None:
    well = {"stage": "traffic", "sum": 2.0, "seconds": 0.1, "said": "RemoteError: x"}
    problem = complaint({**well, **survivor}, 3)
    assert words in problem
    assert bool(problem) == bool(words)


# ---- another user ----------------------------------------------------------------------------

OWNER = """
import sys
sys.path.insert(0, sys.argv[1])
import hostlib, nccl_ranks
engine = hostlib.Engine()
engine.must("cuInit", 0)
print(bytes(nccl_ranks.unique_id(engine)).hex(), flush=True)
sys.stdin.read()
"""
STRANGER = """
import ctypes, os, sys
sys.path.insert(0, sys.argv[1])
import hostlib, nccl_ranks
engine = hostlib.Engine()
engine.must("cuInit", 0)
engine.must("cuCtxSetCurrent", engine.made("cuDevicePrimaryCtxRetain", 0))
owner, unique = int(sys.argv[2]), nccl_ranks.id_from(bytes.fromhex(sys.argv[3]))
if sys.argv[4] == "another":
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
reached = []
for number in range(256):
    path = f"/proc/{owner}/fd/{number}"
    try:
        if "memfd:pynccl" in os.readlink(path):
            os.close(os.open(path, os.O_RDWR))
            reached.append(number)
    except OSError:
        pass
comm = ctypes.c_void_p()
code = engine.ncclCommInitRank(ctypes.byref(comm), 1, unique, 0)
print("reached", len(reached) > 0)
print("code", code)
print("text", engine.ncclGetLastError(None).decode())
"""


@pytest.mark.parametrize("user", ["the same", "another"])
def test_shared_memory_belongs_to_one_user(user: str) -> None:
    """With the id in hand, and on the same machine, another user gets at nothing."""
    if os.getuid() != 0:
        pytest.skip("needs root: another user's process is to be started")
    host = str(Path(__file__).parents[1] / "host")
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, host],
        env=environment("quick"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        unique = owner.stdout.readline().strip()
        done = subprocess.run(
            [sys.executable, "-c", STRANGER, host, str(owner.pid), unique, user.split()[-1]],
            env=environment("quick"),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        owner.stdin.close()
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    if user == "another":
        assert said["reached"] == "False"
        assert said["code"] == "2", said  # ncclSystemError
        assert "ermission denied" in said["text"]
    else:
        assert (said["reached"], said["code"]) == ("True", "0"), said
