"""Rules of every test run: deadlines, what may run at once, no skip unreviewed, no misuse.

A skip, or an expected failure, whose reason matches no line of tests/source/reviewed_skips.txt
fails the run: a check that silently stopped running is worse than one that fails.

Tests marked `timing` measure time and want the machine to themselves: `pytest -m timing`. All
others may run beside each other: `pytest -n 4 -m "not timing"`.

The host engine's misuse detector is on, and fails the test that breaks NCCL's rules: by a
report in this process, by an abort in those that a test starts. A test that breaks them on
purpose is marked `misuse`.
"""

from __future__ import annotations

import ctypes
import fnmatch
import functools
import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

DEADLINE_S = 60.0
REVIEWED = Path(__file__).parent / "source" / "reviewed_skips.txt"


MISUSE = "PYNCCL_HOST_MISUSE"


def reviewed_reasons() -> list[str]:
    """The patterns of the reviewed list; `*` stands for any text, a line with # explains."""
    lines = (line.strip() for line in REVIEWED.read_text("utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def reason_of(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Why a report says that something was not tested."""
    if hasattr(report, "wasxfail"):
        return f"xfail: {report.wasxfail}"
    where = report.longrepr
    text = where[2] if isinstance(where, tuple) else str(where)
    return text.removeprefix("Skipped: ")


class SkipReview:
    """Collects the skips of a run that match no reviewed reason, and fails the run for them."""

    def __init__(self) -> None:
        self.patterns = reviewed_reasons()
        self.unreviewed: list[str] = []

    def look_at(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.skipped:
            reason = reason_of(report)
            if not any(fnmatch.fnmatchcase(reason, pattern) for pattern in self.patterns):
                self.unreviewed.append(f"{report.nodeid}: {reason}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.look_at(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.look_at(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unreviewed and session.exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.unreviewed:
            terminalreporter.section("skipped for no reviewed reason", red=True)
            for line in self.unreviewed:
                terminalreporter.line(line)
            terminalreporter.line(
                "Mend the test, or add the reason to tests/source/reviewed_skips.txt."
            )


@functools.cache
def watched() -> list[ctypes.CDLL]:
    """The instances of the host engine in this process whose detectors are asked: pynccl's."""
    engines: list[ctypes.CDLL] = []
    given = os.environ.get("PYNCCL_HOST_LIBRARY")
    spec = None if given else importlib.util.find_spec("pynccl")
    if spec is not None and spec.origin is not None:
        given = str(Path(spec.origin).parent / "_native" / "libpynccl_host.so")
    if given is not None and Path(given).exists():
        watch(engines, ctypes.CDLL(given))
    return engines


def watch(engines: list[ctypes.CDLL], engine: ctypes.CDLL) -> None:
    """Turn an instance's detector on, and ask it too from now on."""
    engine.pn_host_misuse_take.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
    engine.pn_host_set(b"misuse", b"report")
    engines.append(engine)


@pytest.fixture(scope="session")
def watch_misuse() -> Callable[[ctypes.CDLL], None]:
    """Add an instance of the host engine that a test has loaded for itself to the watched."""
    return functools.partial(watch, watched())


def misuse() -> str:
    """What the detectors of this process have reported since the last call."""
    told = []
    for engine in watched():
        text = ctypes.create_string_buffer(8192)
        engine.pn_host_misuse_take(text, len(text))
        told.append(text.value.decode())
    return "".join(told)


@pytest.fixture(autouse=True)
def no_misuse(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Fail a test that uses the host engine as NCCL must not be used."""
    meant = request.node.get_closest_marker("misuse") is not None
    if meant:
        monkeypatch.setenv(MISUSE, "report")
    misuse()
    yield
    told = misuse()
    if told and not meant:
        pytest.fail(f"the host engine was misused:\n{told}", pytrace=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="run at full length what is shortened by default: millions of operations",
    )


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    """Whether the full length is asked for."""
    return bool(request.config.getoption("--long"))


def pytest_configure(config: pytest.Config) -> None:
    os.environ[MISUSE] = "abort"
    # Begun in the background by a shell, it ignores Ctrl-C, and so would what the tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(SkipReview(), "pynccl-skip-review")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(DEADLINE_S))


def pytest_report_header() -> str:
    """Which pynccl is tested: the installed one, or the one of the checkout."""
    spec = importlib.util.find_spec("pynccl")
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return f"pynccl: {locations[0] if locations else 'not installed'}"
