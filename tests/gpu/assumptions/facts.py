"""What the run is about: the GPU, the driver and the NCCL that pynccl finds here."""

from __future__ import annotations

import ctypes

from .stage import DEVICE, Stage


def run(stage: Stage) -> None:
    """Read names and versions."""
    api = stage.api
    name = ctypes.create_string_buffer(128)
    api.call("cuDeviceGetName", name, len(name), DEVICE)
    driver = api.made("cuDriverGetVersion", kind=ctypes.c_int)
    nccl = api.made("ncclGetVersion", kind=ctypes.c_int)
    stage.notebook.measure(
        device=name.value.decode(),
        devices=api.made("cuDeviceGetCount", kind=ctypes.c_int),
        driver=f"{driver // 1000}.{driver % 1000 // 10}",
        nccl=f"{nccl // 10000}.{nccl // 100 % 100}.{nccl % 100}",
        library=api.paths[0].rpartition("/")[2],
    )
    stage.notebook.check("the driver and NCCL answer", driver > 0 and nccl > 0)
