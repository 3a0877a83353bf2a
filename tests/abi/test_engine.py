"""The `Engine` class on the real libnccl, on the no-op engine, and on broken libraries."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import engines
import pytest

from pynccl._native.engine import Engine
from pynccl.errors import ConfigError, NotSupportedError


@pytest.fixture(scope="session")
def noop_library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(engines.build_noop_engine(tmp_path_factory.mktemp("noop")))


@pytest.fixture(scope="session")
def real(nccl_wheel: Path, noop_library: str) -> Engine:
    """The real libnccl; the driver of the no-op engine stands in where there is none."""
    return Engine("nccl", str(nccl_wheel / "lib" / "libnccl.so.2"), noop_library, True)


def test_real_library_opens(real: Engine, nccl_wheel: Path) -> None:
    header = (nccl_wheel / "include" / "nccl.h").read_text("utf-8")
    code = re.search(r"#define NCCL_VERSION_CODE (\d+)", header)
    assert code is not None
    assert real.version == int(code[1])
    path = real.path("ncclAllReduce")
    assert path is not None
    assert Path(path).samefile(nccl_wheel / "lib" / "libnccl.so.2")


def test_real_library_gives_unique_ids(real: Engine) -> None:
    first, second = real.unique_id(), real.unique_id()
    assert len(first) == len(second) == 128
    assert first != second


def test_a_result_becomes_an_exception(real: Engine) -> None:
    with pytest.raises(ConfigError, match=r"ncclParamGetParameter.*\(4\)") as caught:
        real.parameter("PYNCCL_NO_SUCH_PARAMETER")
    assert caught.value.function == "ncclParamGetParameter"
    assert caught.value.result == 4


def test_minimal_engine_opens(noop_library: str) -> None:
    """The binding needs no more of an engine than the names of symbols.h."""
    engine = Engine("noop", noop_library, noop_library, False)
    assert engine.name == "noop"
    assert engine.path("cuEventQuery") == noop_library
    assert engine.device_count() > 0
    assert len(engine.unique_id()) == 128


def test_an_old_library_says_what_it_lacks(
    noop_library: str, hollow: Callable[..., Path]
) -> None:
    old = Engine("old", str(hollow("ncclAlltoAll")), noop_library, True)
    assert not old.has("ncclAlltoAll")
    assert old.has("ncclAllReduce")
    old.require("ncclAllReduce")
    with pytest.raises(NotSupportedError, match=r"ncclAlltoAll needs NCCL 2\.28, loaded is "):
        old.require("ncclAlltoAll")
    with pytest.raises(NotSupportedError, match=r"ncclCommRevoke needs NCCL 2\.28\.7, loaded"):
        Engine("older", str(hollow("ncclCommRevoke")), noop_library, True).require(
            "ncclCommRevoke"
        )


OLDER = """
import sys
from pynccl._native.engine import Engine
from pynccl.errors import NotSupportedError
engine = Engine("host", sys.argv[1], sys.argv[1], False)
try:
    engine.require("ncclCommShrink")
except NotSupportedError as refused:
    print(engine.version, engine.has("ncclCommSplit"), refused)
"""


def test_the_host_engine_imitates_an_older_release(tmp_path: Path) -> None:
    library = str(engines.build_host_engine(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", OLDER, library],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYNCCL_HOST_NCCL_VERSION": "2.21.5"},
    )
    wanted = "22105 True ncclCommShrink needs NCCL 2.27, loaded is 2.21.5"
    assert done.stdout.strip() == wanted, done.stderr


def test_a_name_that_nobody_knows_is_refused(noop_library: str) -> None:
    engine = Engine("noop", noop_library, noop_library, False)
    with pytest.raises(NotSupportedError, match="ncclNoSuchFunction"):
        engine.require("ncclNoSuchFunction")


@pytest.mark.parametrize("name", ["ncclAllReduce", "cuEventQuery"])
def test_a_library_without_a_required_function_is_refused(
    hollow: Callable[..., Path], name: str
) -> None:
    broken = str(hollow(name))
    with pytest.raises(NotSupportedError, match=rf"the broken engine.*{name}"):
        Engine("broken", broken, broken, True)


def test_a_file_that_is_no_library_is_refused(noop_library: str, tmp_path: Path) -> None:
    text = tmp_path / "libtext.so"
    text.write_text("not a library\n" * 20)
    with pytest.raises(NotSupportedError, match=rf"{text}.*ELF"):
        Engine("text", str(text), noop_library, True)
