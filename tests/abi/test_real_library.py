"""The real libnccl, loaded without a GPU, answers as the table of probes says.

That makes the table trustworthy: the same table is then asked of the host engine.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import engines
import pytest
from probes import ARGUMENT, KEYS, LAST_ERROR, PROBES, UNIQUE_IDS, VERSION, Call, Probe, call
from support.symbols import our_symbols

Results = dict[str, engines.Result]


@pytest.fixture(scope="session")
def real_library(nccl_wheel: Path) -> Path:
    return nccl_wheel / "lib" / "libnccl.so.2"


@pytest.fixture(scope="session")
def real(real_library: Path) -> Results:
    return engines.run_probes(real_library)


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return engines.run_probes(engines.build_host_engine(tmp_path_factory.mktemp("host")))


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_real_library_answers_as_the_table_says(probe: Probe, real: Results) -> None:
    assert engines.complaints(probe, real[probe.name]) == []


@pytest.mark.parametrize(
    "probe", [p for p in PROBES if not p.without_gpu], ids=lambda probe: probe.name
)
def test_host_engine_answers_as_the_real_library(probe: Probe, host: Results) -> None:
    assert engines.complaints(probe, host[probe.name]) == []


def test_version_is_that_of_the_header(nccl_wheel: Path, real: Results) -> None:
    text = (nccl_wheel / "include" / "nccl.h").read_text("utf-8")
    code = re.search(r"#define NCCL_VERSION_CODE (\d+)", text)
    assert code is not None
    assert real[VERSION] == [0, int(code[1])]


@pytest.mark.parametrize("library", ["real", "host"])
def test_unique_ids_differ(library: str, request: pytest.FixtureRequest) -> None:
    results: Results = request.getfixturevalue(library)
    *codes, first, second = results[UNIQUE_IDS]
    assert codes == [0, 0]
    assert isinstance(first, str)
    assert isinstance(second, str)
    assert len(bytes.fromhex(first)) == len(bytes.fromhex(second)) == 128
    assert first != second
    assert any(bytes.fromhex(first))


@pytest.mark.parametrize("library", ["real", "host"])
def test_last_error_is_a_text(library: str, request: pytest.FixtureRequest) -> None:
    results: Results = request.getfixturevalue(library)
    assert isinstance(results[LAST_ERROR][1], str)


def test_parameter_keys_are_counted(real: Results) -> None:
    code, count = real[KEYS]
    assert code == 0
    assert isinstance(count, int)
    assert count > 0


def test_every_function_has_a_probe() -> None:
    """Each NCCL function that can be called with no communicator is, if only on NULL."""
    probed = {c.function for probe in PROBES for c in probe.calls}
    functions = {symbol.name for symbol in our_symbols() if symbol.library == "nccl"}
    # Freeing needs memory, and memory needs a GPU; Shrink of NULL crashes the real library.
    assert functions - probed == {"ncclMemFree", "ncclCommShrink"}
    assert probed <= functions


# ---- the guards can fail ---------------------------------------------------------------------


def test_a_wrong_code_is_caught() -> None:
    probe = Probe("p", "a rule", (call("ncclGroupEnd", gives=ARGUMENT),), ("int",), (3,))
    assert engines.complaints(probe, [5, 3]) == ["p: ncclGroupEnd gave 5, not (4,), but a rule"]
    assert engines.complaints(probe, [4, 2]) == ["p: int gave 2, not (3,), but a rule"]
    assert engines.complaints(probe, [4, 3]) == []


def test_a_crash_and_a_missing_function_are_caught() -> None:
    probe = Probe("p", "a rule", (Call("ncclGroupEnd", (), (0,)),))
    assert engines.complaints(probe, ["signal 11"]) == ["p: signal 11, but a rule"]
    assert engines.complaints(probe, []) == ["p: 0 results of 1: a function is not there"]


def test_a_library_that_kills_its_process_is_named(tmp_path: Path) -> None:
    """All probes of a library that crashes in GroupEnd are run, and the fatal ones reported."""
    source = tmp_path / "crash.c"
    source.write_text(
        "#include <stdlib.h>\n"
        "int ncclGroupStart(void) { return 0; }\n"
        "int ncclGroupEnd(void) { abort(); }\n"
    )
    library = engines.build_shared([source], tmp_path / "libcrash.so", "-fvisibility=default")
    results = engines.run_probes(library)
    assert results["end without start"] == ["signal 6"]
    assert results["nested groups"] == ["signal 6"]
    assert results[VERSION] == []


def test_a_library_that_is_none_is_an_error(tmp_path: Path) -> None:
    text = Path(shutil.copy(__file__, tmp_path / "libtext.so"))
    with pytest.raises(RuntimeError, match=r"invalid ELF header|file too short"):
        engines.run_probes(text)
