"""One-sided operations on windows: put into a peer's memory, count a signal up, wait for one.

1. Both ends lie in windows of the communicator, which NCCL does not check all of: bounds are
   checked here, against this rank's window, since every rank's has the same size.
2. The first of them sets up connections with the peers, so that all go through the lane.
3. An operation holds the windows that it uses.
"""

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.string cimport memset

from pynccl._native.abi cimport (
    PN_PUT,
    PN_SIGNAL,
    PN_WAIT_SIGNAL,
    ncclWaitSignalDesc_t,
    pn_one_sided_t,
)
from pynccl._native.dtypes cimport moved
from pynccl._native.issue cimport call_t
from pynccl._native.ops cimport Operations, rank_in_range, set_up
from pynccl._native.register cimport Lease
from pynccl._native.view cimport view_t
from pynccl._native.work cimport Work

from collections.abc import Mapping
from operator import index

from pynccl.errors import ConfigError, InvalidBufferError, UsageError


cdef class Side:
    """The native block of one operation, which lives as long."""

    def __cinit__(self, int awaited):
        cdef size_t size = sizeof(pn_one_sided_t) + awaited * sizeof(ncclWaitSignalDesc_t)
        self.c = <pn_one_sided_t *>PyMem_Malloc(size)
        if self.c == NULL:
            raise MemoryError
        memset(self.c, 0, size)
        self.c.awaited = awaited

    def __dealloc__(self):
        PyMem_Free(self.c)


cdef object whole(object value, str name, object least, object most):
    try:
        number = index(value) if not isinstance(value, bool) else None
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise ConfigError(f"{name} must be an integer from {least} to {most}, not {value!r}")
    return number


cdef class OneSided(Operations):
    """Puts and signals between the ranks of a communicator; behind Communicator."""

    cdef Work start_side(self, call_t *call, Side side, view_t *view, object keep):
        cdef size_t count = 0
        call.side = side.c
        call.datatype = call.redop = 0
        call.unit = 1
        if view != NULL:
            moved(call, view)
            count = view.count
        return self.start(call, view, NULL, count, (keep, side), None, None)

    cdef Lease window_lease(self, object window, str name):
        """The lease behind a window of this communicator that has been made."""
        lease = getattr(window, "_lease", None)
        if type(lease) is not Lease or not (<Lease>lease).r.is_window:
            raise ConfigError(
                f"{name} must be what register_window() gives, not {type(window).__name__}"
            )
        if (<Lease>lease).over or (<Lease>lease).r.window == NULL:
            raise UsageError(f"{name} is closed, or has not been awaited yet")
        if self.leases.get(<size_t>&(<Lease>lease).r) is not lease:
            raise UsageError(f"{name} is a window of another communicator")
        return lease

    def put(
        self, x, window, peer, offset=0, *, signal=0, context=0, stream=None, sync=True,
        timeout=None, timed=False,
    ):
        """Write x into a peer's window, then count a signal of the peer up (``ncclPutSignal``).

        The peer does nothing but ``wait_signal``, behind which it sees the data. Puts to one
        peer and context arrive in order.

        Args:
            x: what is written; it lies in a window of this communicator too. Any dtype.
            window: what ``register_window`` gave here for the memory that the peer shares.
            peer: the rank whose memory is written.
            offset: where, in bytes from the beginning of the buffer that was registered.
            signal: which of the peer's signals; more than one need communicators made for them.
            context: which of NCCL's contexts for one-sided operations.

        Returns:
            A Work that ends when x may be written again; the peer has to be signalled to know.

        Raises:
            InvalidBufferError: x is in no window, or would not fit into the peer's.
            NotSupportedError: NCCL is older than 2.29.
        """
        cdef call_t call
        cdef view_t view
        cdef Lease lease, source
        self.usable()
        self.engine.require("ncclPutSignal")
        set_up(&call, PN_PUT, stream, sync, timeout, timed, False, None)
        call.root = rank_in_range(self, peer, "peer")
        lease = self.window_lease(window, "window")
        keep = self.look(&call, x, &view, "x")
        cdef size_t nbytes = view.count * view.itemsize
        for source in self.leases.values():
            if source.r.is_window and source.r.window != NULL and not source.over and (
                <size_t>view.data - <size_t>source.r.base < source.r.bytes
            ):
                break
        else:
            raise InvalidBufferError(
                "x lies in no window of this communicator; pass memory of pynccl.empty() on "
                "which register_window() has been awaited"
            )
        cdef size_t begin = window.offset
        room = lease.r.bytes - begin
        place = whole(offset, "offset", 0, 2**63 - 1)
        if place > room or nbytes > room - place:
            raise InvalidBufferError(
                f"x has {nbytes} bytes, which do not fit into the window at offset {place}: it "
                f"has {room}"
            )
        cdef Side side = Side(0)
        side.c.window = lease.r.window
        side.c.offset = begin + <size_t>place
        side.c.signal = whole(signal, "signal", 0, 2**31 - 1)
        side.c.context = whole(context, "context", 0, 2**31 - 1)
        return self.start_side(&call, side, &view, (keep, lease, source))

    def signal(
        self, peer, *, signal=0, context=0, stream=None, timeout=None, timed=False
    ):
        """Count a signal of a peer up, behind the puts called before (``ncclSignal``).

        Args:
            peer: the rank that is signalled.
            signal, context: as for put.
        """
        cdef call_t call
        self.usable()
        self.engine.require("ncclSignal")
        set_up(&call, PN_SIGNAL, stream, True, timeout, timed, False, None)
        call.root = rank_in_range(self, peer, "peer")
        cdef Side side = Side(0)
        side.c.signal = whole(signal, "signal", 0, 2**31 - 1)
        side.c.context = whole(context, "context", 0, 2**31 - 1)
        return self.start_side(&call, side, NULL, None)

    def wait_signal(
        self, peer, count=1, *, signal=0, context=0, stream=None, timeout=None, timed=False
    ):
        """Wait until peers have signalled, and use these signals up (``ncclWaitSignal``).

        Signals that came before count. What is behind it on the stream waits too.

        Args:
            peer: the rank that signals, or a mapping of ranks to how often.
            count: how often.
            signal, context: as for put.
        """
        cdef call_t call
        cdef int at = 0, rank
        self.usable()
        self.engine.require("ncclWaitSignal")
        set_up(&call, PN_WAIT_SIGNAL, stream, True, timeout, timed, False, None)
        wanted = peer if isinstance(peer, Mapping) else {peer: count}
        if not wanted:
            raise ConfigError("there is no peer to wait for")
        cdef Side side = Side(len(wanted))
        for who, often in wanted.items():
            rank = rank_in_range(self, who, "peer")
            side.c.descriptors[at].opCnt = whole(often, "count", 1, 2**31 - 1)
            side.c.descriptors[at].peer = rank
            side.c.descriptors[at].sigIdx = whole(signal, "signal", 0, 2**31 - 1)
            side.c.descriptors[at].ctx = whole(context, "context", 0, 2**31 - 1)
            at += 1
        return self.start_side(&call, side, NULL, None)
