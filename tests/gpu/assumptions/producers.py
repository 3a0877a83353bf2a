"""Array libraries as the hand-off sees them: a long kernel that writes, and one that reads.

The numpy one stands in for a GPU library on the host engine: its "kernels" are copies on the
engine's own streams, the first of them behind a gate.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import numpy as np

from .abi import NOT_READY, NotTried
from .stage import DEVICE, Stage

BUSY_S = 0.15
COUNT = 1 << 20
SPIN = r"""
extern "C" __global__ void spin(long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while ((long long)(now - start) < nanoseconds);
}
"""


class Producer(Protocol):
    """One array library on one device."""

    device: str
    stream: Any
    """What an operation takes as `stream`: None where the library tells its stream itself."""

    def array(self) -> Any:
        """Make an array of COUNT float32 zeros."""

    def write_slowly(self, array: Any, value: float) -> None:
        """Enqueue, on the current stream, BUSY_S of work and then a write of the value."""

    def consumers(self) -> list[Any]:
        """Give the streams on which a reader is put: the current one, and another."""

    def copy_on(self, stream: Any, array: Any) -> Any:
        """Enqueue a copy of the array on a stream; the copy."""

    def busy(self) -> bool:
        """Whether the current stream still has work."""

    def numbers(self, array: Any) -> Any:
        """Wait for the device and give an array's numbers (NumPy)."""


class Torch:
    """PyTorch on the GPU."""

    def __init__(self, stage: Stage) -> None:
        if stage.engine != "nccl":
            raise NotTried("torch hands over streams of a GPU; this engine has none")
        try:
            import torch
        except ImportError as error:
            raise NotTried(f"torch is not installed ({error})") from error
        if not torch.cuda.is_available():
            raise NotTried(f"torch {torch.__version__} sees no CUDA device")
        self.torch: Any = torch
        self.device = f"cuda:{DEVICE}"
        self.stream = None
        torch.cuda.set_device(DEVICE)
        # In kHz; torch tells it from 2.7 on, and an older one spins about as long by this.
        self._clock = getattr(torch.cuda.get_device_properties(DEVICE), "clock_rate", 1_700_000)

    def array(self) -> Any:
        return self.torch.zeros(COUNT, dtype=self.torch.float32, device=self.device)

    def write_slowly(self, array: Any, value: float) -> None:
        self.torch.cuda._sleep(int(self._clock * 1e3 * BUSY_S))
        array.fill_(value)

    def consumers(self) -> list[Any]:
        return [self.torch.cuda.current_stream(), self.torch.cuda.Stream()]

    def copy_on(self, stream: Any, array: Any) -> Any:
        with self.torch.cuda.stream(stream):
            return array.clone()

    def busy(self) -> bool:
        return not self.torch.cuda.current_stream().query()

    def numbers(self, array: Any) -> Any:
        self.torch.cuda.synchronize()
        return array.cpu().numpy()


class Cupy:
    """CuPy on the GPU."""

    def __init__(self, stage: Stage) -> None:
        if stage.engine != "nccl":
            raise NotTried("cupy hands over streams of a GPU; this engine has none")
        try:
            import cupy
        except ImportError as error:
            raise NotTried(f"cupy is not installed ({error})") from error
        try:
            cupy.cuda.Device(DEVICE).use()
            self._spin = cupy.RawKernel(SPIN, "spin")
            self._spin.compile()
        except Exception as error:
            raise NotTried(f"cupy {cupy.__version__} cannot run a kernel: {error}") from error
        self.cupy: Any = cupy
        self.device = f"cuda:{DEVICE}"
        self.stream = None

    def array(self) -> Any:
        return self.cupy.zeros(COUNT, self.cupy.float32)

    def write_slowly(self, array: Any, value: float) -> None:
        self._spin((1,), (1,), (np.int64(BUSY_S * 1e9),))
        array.fill(value)

    def consumers(self) -> list[Any]:
        return [self.cupy.cuda.get_current_stream(), self.cupy.cuda.Stream(non_blocking=True)]

    def copy_on(self, stream: Any, array: Any) -> Any:
        with stream:
            return array.copy()

    def busy(self) -> bool:
        return not self.cupy.cuda.get_current_stream().done

    def numbers(self, array: Any) -> Any:
        self.cupy.cuda.Device(DEVICE).synchronize()
        return self.cupy.asnumpy(array)


class Numpy:
    """Host arrays on streams of the host engine."""

    def __init__(self, stage: Stage) -> None:
        if stage.engine == "nccl":
            raise NotTried("host arrays belong to the host engine")
        self.stage = stage
        self.device = "cpu:0"
        self.stream = stage.stream()
        self._streams = [self.stream, stage.stream()]
        self._sources: list[Any] = []

    def array(self) -> Any:
        return np.zeros(COUNT, np.float32)

    def write_slowly(self, array: Any, value: float) -> None:
        word = self.stage.hold(self.stream)
        self._sources.append(np.full(COUNT, value, np.float32))
        self._copy(array, self._sources[-1], self.stream)
        threading.Timer(BUSY_S, word.store, (1,)).start()

    def consumers(self) -> list[Any]:
        return self._streams

    def copy_on(self, stream: Any, array: Any) -> Any:
        target = np.zeros(COUNT, np.float32)
        self._copy(target, array, stream)
        return target

    def busy(self) -> bool:
        return bool(self.stage.api.cuStreamQuery(self.stream) == NOT_READY)

    def numbers(self, array: Any) -> Any:
        for stream in self._streams:
            self.stage.finish(stream)
        return array

    def _copy(self, target: Any, source: Any, stream: int) -> None:
        self.stage.api.call(
            "cuMemcpyAsync", target.ctypes.data, source.ctypes.data, source.nbytes, stream
        )


PRODUCERS: dict[str, type[Torch | Cupy | Numpy]] = {
    "torch": Torch,
    "cupy": Cupy,
    "numpy": Numpy,
}
