"""The vendors' headers and libraries that the checks of this folder compare with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import comparison
import engines
import pytest
import toolchain
from support.symbols import ABI

# Every function of symbols.h, each of which does nothing.
HOLLOW = """
#include "prototypes.h"
#define HOLLOW(need, since, result, name, parameters) \\
    result name parameters { return (result)0; }
PN_NCCL_SYMBOLS(HOLLOW)
PN_CUDA_SYMBOLS(HOLLOW)
"""


@pytest.fixture(scope="session")
def nccl_wheel() -> Path:
    """The installed NCCL wheel. It is a test dependency, so its absence is no skip."""
    folder = toolchain.nccl_wheel()
    if folder is None:
        pytest.fail(
            "the NCCL wheel (nvidia-nccl-cu13) is not installed: install pynccl-aio[test]"
        )
    return folder


@pytest.fixture
def our_side() -> comparison.Side:
    """Our own headers, all of them."""
    return comparison.Side('#include "nccl_abi.h"\n#include "dlpack_abi.h"', (ABI,))


@pytest.fixture
def cuda_side() -> comparison.Side:
    """The real cuda.h."""
    folders = toolchain.cuda_header_folders()
    if not folders:
        pytest.skip(toolchain.NO_CUDA_HEADERS)
    return comparison.Side(comparison.EXPORTED_NAMES + "#include <cuda.h>", folders)


@pytest.fixture(params=["stand-ins", "toolkit"])
def nccl_side(
    request: pytest.FixtureRequest, nccl_wheel: Path, tmp_path: Path
) -> comparison.Side:
    """The real nccl.h: over stand-ins for the CUDA headers it includes, and over real ones."""
    header = nccl_wheel / "include"
    if request.param == "stand-ins":
        folder = toolchain.write_stand_ins(tmp_path / "stand-ins")
        return comparison.Side(
            f'#include "cuda_abi.h"\n{comparison.NCCL_HEADER}', (folder, header, ABI)
        )
    cuda: comparison.Side = request.getfixturevalue("cuda_side")
    return comparison.Side(f"{cuda.include}\n{comparison.NCCL_HEADER}", (*cuda.folders, header))


@pytest.fixture
def dlpack_side() -> comparison.Side:
    """The dlpack.h of an installed package, included under its own name."""
    header = toolchain.dlpack_header()
    if header is None:
        pytest.fail("no dlpack.h: apache-tvm-ffi, a test dependency, ships one")
    return comparison.Side(f'#include "{header.name}"', (header.parent,))


@pytest.fixture(scope="session")
def hollow(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds a library that has every function of symbols.h but the named ones."""

    def build(*without: str) -> Path:
        folder = tmp_path_factory.mktemp("hollow")
        source = folder / "hollow.c"
        source.write_text(HOLLOW)
        renamed = [f"-D{name}=pn_not_{name}" for name in without]
        return engines.build_shared(
            [source], folder / "libhollow.so", "-I", str(ABI), "-w", *renamed
        )

    return build
