"""NVIDIA NCCL for asyncio.

::

    connect, Communicator, create_all, unique_id    a communicator
    Work, wait, group                               operations on it
    Stream, Event                                   where they run
    empty, Array, Registration, Window              memory of NCCL's own
    pre_mul_sum                                     reduction operators
    library_info, diagnostics                       what is loaded, what is alive
    errors                                          what can go wrong

Importing opens no library, reads no environment and starts no thread.
"""

from pynccl import errors as errors
from pynccl._communicator import Communicator as Communicator
from pynccl._communicator import create_all as create_all
from pynccl._communicator import unique_id as unique_id
from pynccl._connect import connect as connect
from pynccl._group import group as group
from pynccl._group import wait as wait
from pynccl._info import diagnostics as diagnostics
from pynccl._info import library_info as library_info
from pynccl._memory import empty as empty
from pynccl._native.memory import Array as Array
from pynccl._native.operators import PreMulSum as PreMulSum
from pynccl._native.operators import pre_mul_sum as pre_mul_sum
from pynccl._native.work import Work as Work
from pynccl._registration import Registration as Registration
from pynccl._registration import Window as Window
from pynccl._stream import Event as Event
from pynccl._stream import Stream as Stream
from pynccl.errors import AbortedError as AbortedError
from pynccl.errors import BootstrapError as BootstrapError
from pynccl.errors import ConfigError as ConfigError
from pynccl.errors import CudaError as CudaError
from pynccl.errors import DeadlineError as DeadlineError
from pynccl.errors import InternalError as InternalError
from pynccl.errors import InvalidBufferError as InvalidBufferError
from pynccl.errors import MismatchError as MismatchError
from pynccl.errors import NcclError as NcclError
from pynccl.errors import NotSupportedError as NotSupportedError
from pynccl.errors import PeerLostError as PeerLostError
from pynccl.errors import RemoteError as RemoteError
from pynccl.errors import SystemCallError as SystemCallError
from pynccl.errors import UsageError as UsageError

__version__ = "0.1.0"

__all__ = [
    "AbortedError",
    "Array",
    "BootstrapError",
    "Communicator",
    "ConfigError",
    "CudaError",
    "DeadlineError",
    "Event",
    "InternalError",
    "InvalidBufferError",
    "MismatchError",
    "NcclError",
    "NotSupportedError",
    "PeerLostError",
    "PreMulSum",
    "Registration",
    "RemoteError",
    "Stream",
    "SystemCallError",
    "UsageError",
    "Window",
    "Work",
    "connect",
    "create_all",
    "diagnostics",
    "empty",
    "errors",
    "group",
    "library_info",
    "pre_mul_sum",
    "unique_id",
    "wait",
]
