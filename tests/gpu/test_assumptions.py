"""The assumptions on a GPU where there is one; their logic on the host engine always."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from assumptions import catalog
from assumptions.catalog import CATALOG, Assumption, Case
from assumptions.notes import Check, Notes
from assumptions.runner import Runner
from assumptions.verdict import FAILS, HOLDS, NOT_TRIED, CaseResult, Ending, combine, judge

ROOT = Path(__file__).resolve().parents[2]
BY_NAME = {one.name: one for one in CATALOG}

#: What the host engine cannot show, and why; everything else must hold there.
NOT_ON_HOST = {
    ("handoff", "torch"): "torch hands over streams of a GPU; this engine has none",
    ("handoff", "cupy"): "cupy hands over streams of a GPU; this engine has none",
}
NOT_ON_QUICK = {
    ("abort", "first-call"): "the first ncclAllReduce did not wait for the peer here (answer 0)"
}
NOT_IN_THREADS = {
    ("issue", "all-reduce"): "two ranks of one process would fill one launch queue together"
}


def host(temper: str, deadline: float = 25.0, **environment: str) -> Runner:
    return Runner("host", deadline, environment={"PYNCCL_HOST_TEMPER": temper, **environment})


def one_case(name: str, case: str) -> tuple[Assumption, Case]:
    found = next(one for one in BY_NAME[name].cases if one.name == case)
    return BY_NAME[name], found


# ---- on a GPU -------------------------------------------------------------------------------


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BY_NAME)
def test_on_a_gpu(gpu_runner: Runner, name: str) -> None:
    (result,) = gpu_runner.run([BY_NAME[name]])
    print(result)
    assert result.verdict != FAILS, [(case.name, case.reason) for case in result.cases]


# ---- on the host engine ---------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_NAME)
def test_on_the_host_engine_like_a_gpu(name: str) -> None:
    (result,) = host("gpulike").run([BY_NAME[name]])
    found = {(name, case.name): (case.verdict, case.reason) for case in result.cases}
    assert found == {key: expected(key, NOT_ON_HOST) for key in found}
    if name == "inline":
        late, at_init = (case.measured for case in result.cases)
        assert "ncclAllReduce" in late["first_that_waited"]
        assert at_init["first_that_waited"] == "none"
    if name == "abort":
        graph = next(case for case in result.cases if case.name == "graph")
        assert graph.measured["waited_for_the_graph"]
    if name == "issue":
        # Of the 1000 places of the launch queue an operation and its event take one each.
        assert 490 <= result.cases[0].measured["operations_before_block"] <= 500


@pytest.mark.parametrize("name", [name for name in BY_NAME if name != "inline"])
def test_on_the_quick_host_engine(name: str) -> None:
    (result,) = host("quick").run([BY_NAME[name]])
    found = {(name, case.name): (case.verdict, case.reason) for case in result.cases}
    assert found == {key: expected(key, {**NOT_ON_HOST, **NOT_ON_QUICK}) for key in found}


def expected(key: tuple[str, str], reasons: dict[tuple[str, str], str]) -> tuple[str, str]:
    return (NOT_TRIED, reasons[key]) if key in reasons else (HOLDS, "")


@pytest.mark.parametrize("name", ["issue", "abort", "handoff"])
def test_both_ranks_in_one_process(name: str) -> None:
    runner = host("gpulike")
    runner.layout = "threads"
    (result,) = runner.run([BY_NAME[name]])
    found = {(name, case.name): (case.verdict, case.reason) for case in result.cases}
    assert found == {key: expected(key, {**NOT_ON_HOST, **NOT_IN_THREADS}) for key in found}


# ---- each assumption can fail ---------------------------------------------------------------

FAULTS = [
    (
        ("sharing", "processes"),
        {"PYNCCL_HOST_FAULTS": "init:fail=2,rank=1"},
        "rank 1 in ncclCommInitRank: ncclCommInitRank: unhandled system error",
    ),
    (
        ("sharing", "threads"),
        {"NCCL_MULTI_RANK_GPU_ENABLE": "0"},
        "ncclCommInitRank: invalid usage",
    ),
    (
        ("issue", "all-reduce"),
        {"PYNCCL_HOST_LAUNCH_DEPTH": "100"},
        "not so: 128 operations fit before one blocks",
    ),
    (
        ("issue", "all-reduce"),
        {"PYNCCL_HOST_LAUNCH_COST_US": "400"},
        "not so: issuing takes less than 100 us",
    ),
    (
        ("inline", "connect-at-init"),
        {"PYNCCL_HOST_FAULTS": "call:delay=150ms,name=ncclBroadcast,rank=0,call=2"},
        "no second call of a kind and size waited for the late peer (['ncclBroadcast'])",
    ),
    (
        ("inline", "connect-at-init"),
        {"NCCL_RUNTIME_CONNECT": "1"},
        "not so: no first collective waited either",
    ),
    (
        ("abort", "kernel"),
        {"PYNCCL_HOST_FAULTS": "abort:stuck"},
        "hung: rank 0 in ncclGroupEnd of the abort; rank 1 in wait for rank 0's abort",
    ),
    (
        ("aborted_event", "all-reduce"),
        {"PYNCCL_HOST_FAULTS": "event:stuck"},
        "not so: after the abort the event says success (600)",
    ),
    (
        ("gates", "host-store"),
        {"PYNCCL_HOST_QUIRKS": "no-memory-ops"},
        "cuStreamWaitValue32_v2: CUDA_ERROR_NOT_SUPPORTED (801)",
    ),
    (
        ("handoff", "numpy"),
        {"PYNCCL_HOST_FAULTS": "op:fail=3"},
        "InternalError",
    ),
]


@pytest.mark.parametrize(
    ("which", "environment", "reason"),
    FAULTS,
    ids=[f"{name}-{case}-{next(iter(env.values()))}" for (name, case), env, _ in FAULTS],
)
def test_a_fault_fails_it(
    which: tuple[str, str], environment: dict[str, str], reason: str
) -> None:
    deadline = 4.0 if "abort:stuck" in environment.values() else 25.0
    assumption, case = one_case(*which)
    if assumption.name == "inline":
        case = replace(case, arguments={**case.arguments, "kinds": ["ncclBroadcast"]})
    result = host("gpulike", deadline, **environment).try_case(assumption, case)
    assert result.verdict == FAILS, result
    assert reason in result.reason


# ---- verdicts -------------------------------------------------------------------------------

GOOD, BAD = Check("it is so", ok=True), Check("it is so", ok=False, seen="3")
WELL, KILLED, HUNG = Ending(0), Ending(None), Ending(None, hung=True)


@pytest.mark.parametrize(
    ("notes", "endings", "verdict", "reason"),
    [
        ([Notes(checks=[GOOD], end="done")], [WELL], HOLDS, ""),
        ([Notes(end="done")], [WELL], FAILS, "nothing was checked"),
        ([Notes(checks=[GOOD, BAD], end="done")], [WELL], FAILS, "not so: it is so (3)"),
        (
            [Notes(checks=[GOOD], end="done"), Notes(checks=[BAD], end="done")],
            [WELL, WELL],
            FAILS,
            "not so: it is so (3)",
        ),
        (
            [Notes(checks=[GOOD], step="ncclX"), Notes(end="done")],
            [HUNG, WELL],
            FAILS,
            "hung: rank 0 in ncclX",
        ),
        (
            [Notes(step="ncclX", checks=[GOOD])],
            [Ending(-11, output="a stack")],
            FAILS,
            "rank 0 in ncclX: ended by signal 11 a stack",
        ),
        ([Notes(checks=[GOOD])], [WELL], FAILS, "ended by exit 0"),
        (
            [Notes(), Notes(end="not tried", reason="no such thing")],
            [KILLED, WELL],
            NOT_TRIED,
            "no such thing",
        ),
        (
            [Notes(checks=[BAD]), Notes(end="not tried", reason="no such thing")],
            [KILLED, WELL],
            FAILS,
            "not so: it is so (3)",
        ),
        (
            [Notes(step="ncclX", end="error", reason="ncclX: no (5)"), Notes()],
            [WELL, KILLED],
            FAILS,
            "rank 0 in ncclX: ncclX: no (5)",
        ),
    ],
)
def test_verdict_of_a_case(
    notes: list[Notes], endings: list[Ending], verdict: str, reason: str
) -> None:
    result = judge("a", notes, endings)
    assert result.verdict == verdict
    assert reason in result.reason
    assert (result.reason == "") == (verdict == HOLDS)


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        ([HOLDS, NOT_TRIED], HOLDS),
        ([HOLDS, FAILS], FAILS),
        ([FAILS, NOT_TRIED], FAILS),
        ([NOT_TRIED, NOT_TRIED], NOT_TRIED),
    ],
)
def test_verdict_of_an_assumption(verdicts: list[str], whole: str) -> None:
    assert combine([CaseResult(str(at), one) for at, one in enumerate(verdicts)]) == whole


def test_threads_are_chosen_where_only_they_work(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = host("gpulike")

    def tried(_: Assumption, case: Case) -> CaseResult:
        return CaseResult(case.name, HOLDS if case.name == "threads" else FAILS)

    monkeypatch.setattr(runner, "try_case", tried)
    (result,) = runner.run([BY_NAME["sharing"]])
    assert (result.verdict, runner.layout) == (FAILS, "threads")


def test_what_begins_too_late_is_not_tried() -> None:
    runner = Runner("host", budget=0.5)
    results = [case for one in runner.run(CATALOG) for case in one.cases]
    assert {(case.verdict, case.reason) for case in results} == {
        (NOT_TRIED, "no time was left for it")
    }


def test_every_assumption_has_its_module() -> None:
    folder = Path(catalog.__file__).parent
    assert [one.name for one in CATALOG if not (folder / f"{one.name}.py").exists()] == []


# ---- the command ----------------------------------------------------------------------------


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu.assumptions", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_the_command_prints_json() -> None:
    done = command("--engine", "host", "--json", "--only", "gates", "polling")
    assert done.returncode == 0, done.stderr
    whole = json.loads(done.stdout)
    assert whole["engine"] == "host"
    assert whole["facts"]["library"] == "libpynccl_host.so"
    verdicts = {one["name"]: one["verdict"] for one in whole["assumptions"]}
    assert verdicts == {"polling": HOLDS, "gates": HOLDS}


def test_the_command_says_what_failed() -> None:
    quirk = {"PYNCCL_HOST_QUIRKS": "no-memory-ops"}
    done = command("--engine", "host", "--only", "gates", **quirk)
    assert done.returncode == 1, done.stderr
    assert "FAILS      gates" in done.stdout


def test_the_command_says_that_an_engine_is_not_there() -> None:
    nowhere = {
        "PYNCCL_CUDA_LIBRARY": "/no/such/libcuda.so.1",
        "PYNCCL_NCCL_LIBRARY": "/no/such/libnccl.so.2",
    }
    done = command("--only", "gates", **nowhere)
    assert done.returncode == 2
    assert "the nccl engine cannot be used: " in done.stderr
    assert "/no/such/" in done.stderr
