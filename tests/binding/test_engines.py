"""Which engine serves a device, and what is said where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cliques import all_reduced, clique

import pynccl
from pynccl import ConfigError, NotSupportedError, _engines, _native

NATIVE = Path(_native.__path__[0])
LIBRARIES = ("PYNCCL_CUDA_LIBRARY", "PYNCCL_NCCL_LIBRARY", "PYNCCL_ENGINE")

MAKE = """
import asyncio, sys
import pynccl
try:
    comms = asyncio.run(pynccl.create_all([{device}]))
except pynccl.NcclError as error:
    print(type(error).__name__)
    print(error)
else:
    print(comms[0].engine.name)
    asyncio.run(comms[0].close())
"""


def made(device: Any, **environment: str) -> tuple[str, str]:
    """What the first line and the rest say when a fresh process makes a communicator."""
    kept = {k: v for k, v in os.environ.items() if k not in LIBRARIES}
    done = subprocess.run(
        [sys.executable, "-c", MAKE.format(device=repr(device))],
        env={**kept, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    first, _, rest = done.stdout.partition("\n")
    return first, rest.strip()


def one_sentence(text: str) -> bool:
    return "\n" not in text and len(text) < 400


@pytest.mark.parametrize("device", [0, "cuda:0"])
async def test_without_a_driver_it_says_what_is_missing(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYNCCL_ENGINE", "nccl")
    for name in ("PYNCCL_CUDA_LIBRARY", "PYNCCL_NCCL_LIBRARY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "exists", lambda _: False)  # also where there is a GPU
    with pytest.raises(NotSupportedError) as raised:
        await pynccl.create_all([device])
    text = str(raised.value)
    assert one_sentence(text)
    assert "needs an NVIDIA driver" in text
    assert 'device="cpu"' in text


def test_a_driver_without_nccl_is_told_how_to_install_it(tmp_path: Path) -> None:
    """Never a silent fall to the CPU."""
    for device, environment in ((None, {}), ("cuda:0", {}), (0, {"PYNCCL_ENGINE": "nccl"})):
        kind, text = made(
            device,
            PYNCCL_CUDA_LIBRARY=str(NATIVE / "libpynccl_noop.so"),
            PYTHONPATH=os.pathsep.join([str(hidden_nccl(tmp_path)), *sys.path]),
            **environment,
        )
        assert kind == "NotSupportedError"
        assert "no libnccl.so.2" in text
        assert "pip install 'pynccl-aio[cu13]'" in text
        assert "PYNCCL_NCCL_LIBRARY" in text


def hidden_nccl(folder: Path) -> Path:
    """A folder that, first on the path, makes cuda-pathfinder find no libnccl."""
    package = folder / "cuda" / "pathfinder"
    package.mkdir(parents=True, exist_ok=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text(
        "def load_nvidia_dynamic_lib(name):\n"
        "    raise RuntimeError('no such library: ' + name)\n"
    )
    return folder


def test_a_library_that_is_none(tmp_path: Path) -> None:
    rubbish = tmp_path / "libnccl.so.2"
    rubbish.write_text("this is no library")
    driver = str(NATIVE / "libpynccl_noop.so")
    kind, text = made("cuda:0", PYNCCL_CUDA_LIBRARY=driver, PYNCCL_NCCL_LIBRARY=str(rubbish))
    assert kind == "NotSupportedError"
    assert str(rubbish) in text
    assert "the nccl engine cannot be loaded" in text
    kind, text = made("cuda:0", PYNCCL_CUDA_LIBRARY=str(tmp_path / "gone.so"))
    assert kind == "NotSupportedError"
    assert "gone.so" in text


def test_a_library_that_lacks_a_function() -> None:
    """The C library is no NCCL: the first function that it lacks is named."""
    driver = str(NATIVE / "libpynccl_noop.so")
    kind, text = made("cuda:0", PYNCCL_CUDA_LIBRARY=driver, PYNCCL_NCCL_LIBRARY="libc.so.6")
    assert kind == "NotSupportedError"
    assert "libc.so.6" in text
    assert "nccl" in text.replace("libpynccl", "")


@pytest.mark.parametrize("device", [None, 0, "cpu", "cuda:0"])
def test_a_wrong_choice(device: Any) -> None:
    kind, text = made(device, PYNCCL_ENGINE="rubbish")
    assert kind == "ConfigError"
    assert text == "PYNCCL_ENGINE is 'rubbish', expected one of nccl, host, noop"


@pytest.mark.parametrize(
    ("device", "environment", "engine"),
    [
        ("cpu", {}, "host"),
        ("cpu", {"PYNCCL_ENGINE": "noop"}, "noop"),
        (1, {"PYNCCL_ENGINE": "host"}, "host"),
        (None, {"PYNCCL_ENGINE": "noop"}, "noop"),
    ],
)
def test_the_choice(device: Any, environment: dict[str, str], engine: str) -> None:
    assert made(device, **environment)[0] == engine


@pytest.mark.parametrize(
    "device",
    ["gpu", "cuda", "cuda:", "cpu:x", "cpu:-1", "cpu:99", "CPU", "", " cpu", 99, -1, True, 1.0],
)
async def test_a_wrong_device(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_ENGINE", "host")
    if device == "cuda":
        device = "cuda:a"  # the bare word is a device, of NCCL
    with pytest.raises(ConfigError, match=r"device .*(must be|does not exist)"):
        await pynccl.create_all([device])
    async with clique(2) as comms:
        await all_reduced(comms)


async def test_no_device_at_all() -> None:
    with pytest.raises(ConfigError, match="at least one device"):
        await pynccl.create_all([])


def test_the_number_of_virtual_devices() -> None:
    kind, text = made("cpu:2", PYNCCL_HOST_DEVICES="2")
    assert (kind, text) == ("ConfigError", "device 2 does not exist: the host engine has 2")
    assert made("cpu:11", PYNCCL_HOST_DEVICES="12")[0] == "host"


async def test_two_engines_live_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine belongs to the communicator; what spans two of them is refused."""
    async with clique(1) as hosts:
        monkeypatch.setenv("PYNCCL_ENGINE", "noop")
        async with clique(1) as noops:
            assert [c.engine.name for c in (*hosts, *noops)] == ["host", "noop"]
            assert pynccl.library_info().keys() >= {"host", "noop"}
            x = np.ones(4, np.float32)
            await pynccl.wait(hosts[0].all_reduce(x), noops[0].all_reduce(x))
            with pytest.raises(pynccl.UsageError, match="two engines"):
                async with pynccl.group():
                    hosts[0].all_reduce(x)
                    noops[0].all_reduce(x)
            await all_reduced(hosts)


def test_an_engine_opens_once() -> None:
    assert _engines.engine("host") is _engines.engine("host")
    with pytest.raises(NotSupportedError, match=r"ncclNoSuch"):
        _engines.engine("host").require("ncclNoSuch")


# ---- a GPU's engine, as far as host memory goes ---------------------------------------------

ON_CUDA = """
import asyncio
import numpy as np
import pynccl
from dlpack_producer import CUDA, Producer

async def main():
    (comm,) = await pynccl.create_all(["cuda:1"])
    assert comm.device == "cuda:1", comm.device
    elsewhere = Producer(np.ones(4), device=(CUDA, 0))
    for x in (np.ones(4, np.float32), Producer(np.ones(4)), elsewhere):
        try:
            comm.all_reduce(x)
        except pynccl.InvalidBufferError as error:
            print(error)
    x = Producer(np.ones(4, np.float32), device=(CUDA, 1))
    result = await comm.all_reduce(x)
    assert result is x
    print(x.asked[0]["stream"] > 2, comm.issued)
    await comm.close()

asyncio.run(main())
"""


def test_a_host_array_on_a_cuda_communicator() -> None:
    """With the host engine in the place of both libraries, "cuda" is what the binding sees."""
    library = str(NATIVE / "libpynccl_host.so")
    done = subprocess.run(
        [sys.executable, "-c", ON_CUDA],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
            "PYNCCL_CUDA_LIBRARY": library,
            "PYNCCL_NCCL_LIBRARY": library,
        },
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for line in lines[:2]:
        assert line.startswith("x is in host memory, but this communicator is on a CUDA device")
        assert 'device="cpu"' in line
    assert lines[2] == "x is on cuda:0, this communicator is on cuda:1"
    assert lines[3] == "True 1"  # the one good call
