"""The rules that tests/conftest.py gives every run, each shown on a small run of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tree


def run_pytest(
    folder: Path, test: str, reviewed: str = "", *, project: bool = False
) -> tuple[int, str]:
    """The exit code and the output of a run of one test file under this project's conftest."""
    shutil.copyfile(tree.ROOT / "tests" / "conftest.py", folder / "conftest.py")
    settings = (
        (tree.ROOT / "pyproject.toml").read_text("utf-8")
        if project
        else "[tool.pytest.ini_options]\n"
    )
    tree.write(folder, "pyproject.toml", settings)
    tree.write(folder, "source/reviewed_skips.txt", reviewed)
    tree.write(folder, "test_planted.py", "import pytest\n" + test)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_planted.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


SKIPS = {
    "marked": "@pytest.mark.skip(reason='the moon is full')\ndef test_a(): pass\n",
    "called": "def test_a(): pytest.skip('the moon is full')\n",
    "module": "pytest.skip('the moon is full', allow_module_level=True)\n",
    "import": "pytest.importorskip('no_such_moon', reason='the moon is full')\n",
}


@pytest.mark.parametrize("test", SKIPS.values(), ids=SKIPS)
def test_an_unreviewed_skip_fails_the_run(tmp_path: Path, test: str) -> None:
    code, output = run_pytest(tmp_path, test, "# the moon is full\nthe moon is new\n")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "skipped for no reviewed reason" in output
    assert "test_planted.py" in output.rpartition("skipped for no reviewed reason")[2]


def test_a_reviewed_skip_does_not(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, SKIPS["called"], "the moon is *\n")
    assert code == pytest.ExitCode.OK, output


def test_an_expected_failure_is_reviewed_too(tmp_path: Path) -> None:
    test = "@pytest.mark.xfail(reason='one day')\ndef test_a(): assert False\n"
    assert run_pytest(tmp_path, test)[0] == pytest.ExitCode.TESTS_FAILED
    assert run_pytest(tmp_path, test, "xfail: one day\n")[0] == pytest.ExitCode.OK


def test_a_failure_stays_a_failure(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, "def test_a(): assert 1 == 2\n")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "skipped for no reviewed reason" not in output


def test_every_test_has_a_deadline(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("timeout")
    assert marker is not None
    assert marker.args == (60.0,)


def test_a_test_that_hangs_is_ended(tmp_path: Path) -> None:
    code, output = run_pytest(
        tmp_path,
        "@pytest.mark.timeout(0.5)\ndef test_a():\n    import time\n    time.sleep(40)\n",
    )
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "Timeout" in output


@pytest.mark.parametrize(
    ("test", "complaint"),
    [
        ("import warnings\ndef test_a(): warnings.warn('odd')\n", "UserWarning: odd"),
        ("def test_a(): open('/dev/null')\n", "ResourceWarning"),
        ("@pytest.mark.no_such_mark\ndef test_a(): pass\n", "no_such_mark"),
        ("@pytest.mark.xfail(reason='r')\ndef test_a(): pass\n", "XPASS(strict)"),
    ],
    ids=["warning", "unclosed file", "unknown mark", "unexpected pass"],
)
def test_settings_are_strict(tmp_path: Path, test: str, complaint: str) -> None:
    """The settings of pyproject.toml: warnings are errors, marks are known, xfail is strict."""
    code, output = run_pytest(tmp_path, test, project=True)
    assert code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert complaint in output


MISUSE = """
import ctypes, importlib.util, pathlib, threading, time
def test_a():
    package = pathlib.Path(importlib.util.find_spec("pynccl").origin).parent
    engine = ctypes.CDLL(str(package / "_native" / "libpynccl_host.so"))
    thread = threading.Thread(target=engine.ncclGroupStart)
    thread.start()
    thread.join()
    time.sleep(0.1)
"""


def test_misuse_of_the_host_engine_fails_the_test(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, MISUSE, project=True)
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "the host engine was misused" in output
    assert "ended inside a group" in output


def test_misuse_on_purpose_does_not(tmp_path: Path) -> None:
    marked = MISUSE.replace("def test_a", "@pytest.mark.misuse\ndef test_a")
    code, output = run_pytest(tmp_path, marked, project=True)
    assert code == pytest.ExitCode.OK, output
