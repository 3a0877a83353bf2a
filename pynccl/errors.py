"""The exceptions of pynccl.

::

    NcclError (RuntimeError)
    |-- CudaError                        the CUDA driver's name and text
    |-- ConfigError (ValueError)         a bad argument, address or setting
    |-- UsageError                       wrong order of calls; a closed or foreign object; a
    forked child |-- InvalidBufferError (BufferError) dtype, shape, contiguity, read-only
    memory, device |-- NotSupportedError                this NCCL or this engine has no such
    function |-- BootstrapError                   the rendezvous failed: missing ranks, refused
    secret, address in use |-- DeadlineError (TimeoutError)     a deadline passed
    |-- PeerLostError                    ranks are gone
    |-- MismatchError                    ranks disagree about an operation
    |-- AbortedError                     this side aborted
    |-- RemoteError                      ncclRemoteError: a peer failed or went away
    |-- SystemCallError                  ncclSystemError: a system call failed
    `-- InternalError                    ncclInternalError

A message names the operation or the function, the result, and the library's own words.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "AbortedError",
    "BootstrapError",
    "ConfigError",
    "CudaError",
    "DeadlineError",
    "InternalError",
    "InvalidBufferError",
    "MismatchError",
    "NcclError",
    "NotSupportedError",
    "PeerLostError",
    "RemoteError",
    "SystemCallError",
    "UsageError",
]


class NcclError(RuntimeError):
    """Base of everything that pynccl raises on its own account.

    Attributes:
        function: the native function that reported it, or ``""``.
        result: its ``ncclResult_t`` or ``CUresult``, or ``0`` where no native call failed.
    """

    function: str = ""
    result: int = 0


class CudaError(NcclError):
    """A CUDA driver call failed, or the context is in error and will not heal."""


class ConfigError(NcclError, ValueError):
    """An argument, an address or an environment variable has a value that cannot be used."""


class UsageError(NcclError):
    """The call is not allowed here or now; the message says what to do instead."""


class InvalidBufferError(NcclError, BufferError):
    """An array cannot be used for this operation; nothing was issued."""


class NotSupportedError(NcclError):
    """The loaded library, or this engine, lacks what the call needs."""


class BootstrapError(NcclError):
    """The ranks could not be brought together.

    Attributes:
        missing: the ranks that had not arrived, where that is known.
    """

    def __init__(self, message: str, *, missing: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class DeadlineError(NcclError, TimeoutError):
    """A deadline passed.

    Attributes:
        operation: what was waited for.
        seq: its sequence number in its communicator, ``0`` for a rendezvous.
        nbytes: its payload in bytes.
        dtype: its data type's name, ``""`` where it has none.
        elapsed: seconds from the call to the expiry.
        missing: the ranks that had not arrived, where that is known.
    """

    def __init__(
        self,
        message: str,
        *,
        operation: str = "",
        seq: int = 0,
        nbytes: int = 0,
        dtype: str = "",
        elapsed: float = 0.0,
        missing: Iterable[int] = (),
    ) -> None:
        super().__init__(message)
        self.operation = operation
        self.seq = seq
        self.nbytes = nbytes
        self.dtype = dtype
        self.elapsed = elapsed
        self.missing = tuple(missing)


class PeerLostError(NcclError):
    """Ranks are gone.

    Attributes:
        ranks: which.
    """

    def __init__(self, message: str, *, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class MismatchError(NcclError):
    """Ranks disagree about an operation; the message names both sides."""


class AbortedError(NcclError):
    """The communicator was aborted on this side before the operation had ended."""


class RemoteError(NcclError):
    """A peer failed or went away (``ncclRemoteError``)."""


class SystemCallError(NcclError):
    """A system call or an external library failed inside NCCL (``ncclSystemError``)."""


class InternalError(NcclError):
    """NCCL found a fault in itself (``ncclInternalError``)."""
