"""Rules of every test run: each test has a deadline, and no skip goes unreviewed.

A skip, or an expected failure, whose reason matches no line of tests/source/reviewed_skips.txt
fails the run: a check that silently stopped running is worse than one that fails.
"""

from __future__ import annotations

import fnmatch
import importlib.util
from pathlib import Path

import pytest

DEADLINE_S = 60.0
REVIEWED = Path(__file__).parent / "source" / "reviewed_skips.txt"


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


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SkipReview(), "pynccl-skip-review")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(DEADLINE_S))
    # The host engine's own tests reset devices, as a program that owns them may; pynccl, which
    # shares the engine in this process, has then lost what it keeps on them. So they come last.
    items.sort(key=lambda item: item.nodeid.startswith("tests/host/"))


def pytest_report_header() -> str:
    """Which pynccl is tested: the installed one, or the one of the checkout."""
    spec = importlib.util.find_spec("pynccl")
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return f"pynccl: {locations[0] if locations else 'not installed'}"
