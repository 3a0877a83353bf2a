"""Every rule is asked of the host engine in both tempers, and a libnccl answers alike."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from hostlib import FUNCTIONS

from conformance import coverage, program, rules, runner
from conformance.program import WITH_DEVICES, WITHOUT_DEVICES, Answers, chosen
from conformance.rules import Needs, Rule
from conformance.trial import ARGUMENT, Library, Trial


@pytest.fixture(scope="session")
def quick() -> Answers:
    return program.ask_host("quick")


@pytest.fixture(scope="session")
def gpulike() -> Answers:
    return program.ask_host("gpulike")


@pytest.fixture(scope="session")
def without_devices() -> Answers:
    return program.ask_host_without_devices()


@pytest.fixture(scope="session")
def real() -> Answers:
    path = program.real_library()
    if path is None:
        pytest.fail(
            "the NCCL wheel (nvidia-nccl-cu13) is not installed: install pynccl-aio[test]"
        )
    return program.ask_real(path)


def named(rule: Rule) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", rule.name)


@pytest.mark.parametrize("library", ["quick", "gpulike"])
@pytest.mark.parametrize("rule", chosen(*WITH_DEVICES), ids=named)
def test_the_host_engine(rule: Rule, library: str, request: pytest.FixtureRequest) -> None:
    answers: Answers = request.getfixturevalue(library)
    assert answers[rule.name].complaints == []


@pytest.mark.parametrize("library", ["without_devices", "real"])
@pytest.mark.parametrize("rule", chosen(*WITHOUT_DEVICES), ids=named)
def test_without_a_device(rule: Rule, library: str, request: pytest.FixtureRequest) -> None:
    answers: Answers = request.getfixturevalue(library)
    assert answers[rule.name].complaints == []


def test_both_answer_alike(without_devices: Answers, real: Answers) -> None:
    assert program.unlike(without_devices, real) == []


def test_differences_are_differences(without_devices: Answers, real: Answers) -> None:
    """A rule that is listed with a reason for a difference has one."""
    alike = [n for n in program.DIFFERENCES if without_devices[n].seen == real[n].seen]
    assert alike == []


def test_every_section_has_rules_or_a_reason() -> None:
    assert coverage.gaps(rules.every_rule()) == []


def test_every_function_is_called() -> None:
    """Whatever NCCL exports by nccl.h is asked at least once, in some rule."""
    source = "".join(p.read_text("ascii") for p in Path(rules.__file__).parent.glob("*.py"))
    called = set(re.findall(r"\bnccl[A-Z]\w+", source)) | {
        f"nccl{prefix}{bits}"
        for prefix in ("ParamGetI", "ParamGetU")
        for bits in (8, 16, 32, 64)
    }
    exported = {name for name in FUNCTIONS if name.startswith("nccl")}
    assert exported - called == set()


# ---- the guards can fail


def test_a_wrong_answer_is_a_complaint() -> None:
    trial = Trial(Library(str(program.library_path())))
    trial.call("ncclGroupEnd", gives=ARGUMENT)
    trial.same("one", 1, 2)
    assert len(trial.complaints) == 2
    assert "ncclGroupEnd gave 5, not 4" in trial.complaints[0]


def test_an_answer_that_differs_is_named() -> None:
    host = {"a": runner.Answer([["ncclGroupEnd", 5]], []), "b": runner.Answer([], [])}
    real = {"a": runner.Answer([["ncclGroupEnd", 4]], []), "b": runner.Answer([], [])}
    (line,) = program.unlike(host, real)
    assert line.startswith("a: the host engine ['ncclGroupEnd', 5]")


def test_a_library_that_kills_or_lacks_is_named(tmp_path: Path) -> None:
    """All rules are asked of a library that crashes in GroupEnd and has nothing else."""
    source, library = tmp_path / "crash.c", tmp_path / "libcrash.so"
    source.write_text(
        "#include <stdlib.h>\n"
        "int ncclGroupStart(void) { return 0; }\n"
        "int ncclGroupEnd(void) { abort(); }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    some = [r for r in chosen(Needs.NOTHING) if r.section in ("1 rule 1", "1 rule 4", "19")]
    answers = runner.ask(some, str(library))
    assert answers[
        "1 rule 4: End at depth 0 is invalid usage and changes nothing"
    ].complaints == ["signal 6"]
    assert all(answers[rule.name].complaints for rule in some)


def test_a_section_without_rules_is_named() -> None:
    left = [rule for rule in rules.every_rule() if rule.section != "19"]
    assert coverage.gaps(left) == ["19: no rule, and no reason"]
