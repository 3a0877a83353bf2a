"""Ownership of native communicators.

1. A handle is made by a factory only, for one device of one engine; it holds its engine.
2. It owns one reference to the C object; its record, lanes and running aborts own theirs, so
   that nothing is freed under them.
3. Operations hold the handle until they have ended or failed, and the record as long as they
   live: see completion.pyx. Dropping the last reference never waits: an open communicator is
   aborted on a helper thread, with a ResourceWarning, since its peers may be waiting for it.
4. What one failure has taken down is reported once, and an abort on this side never: see
   Unseen.
5. After a fork the child's handles are inert: they refuse every use and free nothing.
"""

import os
import warnings
import weakref
from asyncio import _get_running_loop

from pynccl._native.abi cimport (
    PN_ABORTING,
    PN_FAILED,
    PN_FROM_ABORT,
    PN_FROM_CUDA,
    PN_FROM_DEADLINE,
    PN_FROM_NCCL,
    PN_INIT,
    PN_NEW,
    PN_OK,
    PN_READY,
    pn_comm_drop,
    pn_comm_hold,
    pn_comm_new,
    pn_comm_release,
    pn_device_t,
    pn_forked,
)
from pynccl._native.engine cimport Engine, cuda_exception, nccl_exception

from pynccl import errors

STATES = ("new", "ready", "closing", "failed", "aborting", "closed")

cdef tuple KINDS = (
    "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather",
    "scatter", "send", "recv", "barrier", "all_gather_v", "all_to_all_v", "reduce_scatter_v",
    "gather_v", "scatter_v", "put", "signal", "wait_signal", "init", "split", "close",
    "register", "deregister", "abort", "wait",
)


def kind_name(int kind):
    """The name of an operation's kind, as users spell it."""
    return KINDS[kind]


cdef int refuse_fork() except -1:
    """Raise in a child process that was forked after the engine had been used."""
    if pn_forked:
        raise errors.UsageError(
            "this object belongs to the parent process: after a fork neither CUDA nor NCCL can "
            "be used; start the child with the spawn method"
        )
    return 0


cdef class CommRecord:
    """What can be said of a communicator, also when nobody holds its handle any more."""

    def __dealloc__(self):
        if self.c == NULL or pn_forked:
            return
        with nogil:
            pn_comm_release(self.c)

    cdef str state(self):
        return STATES[<int>self.c.state]

    cdef object failure_exception(self):
        """What took the communicator down, as an exception; None if nothing did."""
        cdef int source = self.c.failure.source
        function = self.c.failure.function.decode() if self.c.failure.function != NULL else ""
        who = f"rank {self.c.rank} of {self.c.size}"
        if self.c.culprit:
            number = f" (operation {self.c.culprit})" if self.c.culprit_kind < PN_INIT else ""
            who = f"{KINDS[self.c.culprit_kind]}{number} on {who}"
        if source == PN_FROM_NCCL:
            detail = self.c.detail.decode(errors="replace")
            return nccl_exception(self.c.failure.code, function, who, detail)
        if source == PN_FROM_CUDA:
            return cuda_exception(self.engine, self.c.failure.code, function, who)
        if source == PN_FROM_DEADLINE:
            return errors.DeadlineError(f"{who}: the deadline passed")
        if source == PN_FROM_ABORT:
            return errors.AbortedError(f"{who}: aborted on this side")
        return None


cdef class CommHandle:
    """A native communicator of one rank; Communicator is its public face."""

    def __cinit__(self, Engine engine, int device, int rank=0, int size=0):
        cdef pn_device_t *found = engine.device(device)
        self.engine = engine
        self.device_ordinal = device
        self.timeout_ns = default_timeout_ns()
        self.leases = {}
        with nogil:
            self.c = pn_comm_new(found, rank, size)
        if self.c == NULL:
            raise MemoryError
        self.record = CommRecord.__new__(CommRecord)
        with nogil:
            pn_comm_hold(self.c)
        self.record.c = self.c
        self.record.engine = engine

    def __dealloc__(self):
        if self.c == NULL or pn_forked:
            return
        if PN_NEW < self.c.state < PN_ABORTING:
            try:
                warnings.warn(
                    f"communicator of rank {self.c.rank} of {self.c.size} was not closed; "
                    "it is aborted",
                    ResourceWarning,
                    stacklevel=1,
                )
            except Exception:
                pass  # warnings are errors here, and a finaliser has nobody to tell
        with nogil:
            pn_comm_drop(self.c)
        self.c = NULL

    @property
    def rank(self):
        """This rank's number, 0 to size - 1."""
        return self.c.rank

    @property
    def size(self):
        """How many ranks the communicator has."""
        return self.c.size

    @property
    def state(self):
        """``"new"``, ``"ready"``, ``"closing"``, ``"failed"``, ``"aborting"``, ``"closed"``."""
        return self.record.state()

    @property
    def issued(self):
        """How many operations have been called so far: the sequence number of the last one."""
        return self.c.seq

    @property
    def timeout(self):
        """The default deadline of its operations, in seconds."""
        return self.timeout_ns / 1e9

    @timeout.setter
    def timeout(self, seconds):
        self.timeout_ns = timeout_to_ns(seconds)

    @property
    def spin_us(self):
        """How many microseconds an await may poll before it suspends, 0 to 1000.

        It yields between polls. Time in which others use its core is not counted, up to ten
        times as long: where ranks share cores, a suspension costs more than their turn.
        """
        return self.spin_ns / 1e3

    @spin_us.setter
    def spin_us(self, microseconds):
        if not 0 <= microseconds <= 1000:
            raise errors.ConfigError(
                f"spin_us must be 0 to 1000 microseconds, not {microseconds!r}"
            )
        self.spin_ns = int(microseconds * 1000)

    @property
    def ordered(self):
        """Whether its operations are chained with those of the device's other ordered ones.

        Several communicators of one device run at once, and ranks that call them in different
        orders can wait for each other for ever. Ordered ones run one after another, in the
        order of the calls.
        """
        return self.c.ordered

    @ordered.setter
    def ordered(self, bint value):
        self.c.ordered = value

    @property
    def shares_process(self):
        """Whether another rank of the same communicator lives in this process."""
        return self.c.clique != NULL and self.c.clique.members > 1

    cdef int settle_here(self) except -1:
        """Make the running loop the one that hears of failures which nobody asks for."""
        loop = _get_running_loop()
        if loop is not None:
            self.record.home = weakref.ref(loop)
        return 0

    cdef int usable(self) except -1:
        """Raise unless operations can be issued now."""
        refuse_fork()
        if self.c.state == PN_READY:
            return 0
        if self.c.state == PN_FAILED:
            cause = self.record.failure_exception()
            raise errors.UsageError(
                f"the communicator has failed and takes no more operations: {cause}"
            ) from cause
        raise errors.UsageError(
            f"the communicator is {self.state}, operations need one that is ready"
        )


# ---- failures that nobody has seen ----------------------------------------------------------

cdef class Unseen:
    """The failure of a Work; tells of it when it is dropped with its Work."""

    def __del__(self):
        cdef CommRecord record = self.record
        if self.error is None or (self.follows and record.failure_seen):
            return
        context = {
            "message": f"{self.what} failed, and nobody has asked for its outcome",
            "exception": self.error,
        }
        if record is not None:
            record.failure_seen = True
        try:
            tell(record, context)
        except Exception:
            pass  # the interpreter is going, and a finaliser has nobody to tell


cdef Unseen unseen_of(CommRecord record, str what, object error):
    """What reports an error, should it be dropped before somebody has asked for it."""
    cdef Unseen unseen = Unseen.__new__(Unseen)
    unseen.error = error
    unseen.what = what
    unseen.record = record
    unseen.follows = record is not None and record.c.failure.source != PN_OK
    return unseen


cdef int tell(CommRecord record, dict context) except -1:
    """Hand a report to the running loop, to the communicator's own, or to the log."""
    loop = _get_running_loop()
    if loop is not None:
        loop.call_exception_handler(context)
        return 0
    home = record.home() if record is not None and record.home is not None else None
    if home is not None and not home.is_closed():
        try:
            home.call_soon_threadsafe(home.call_exception_handler, context)
            return 0
        except RuntimeError:
            pass  # closed just now
    import logging

    logging.getLogger("pynccl").error(context["message"], exc_info=context["exception"])
    return 0


cdef object default_timeout_ns():
    """The deadline of operations of which nobody says another: PYNCCL_TIMEOUT, or 600 s."""
    text = os.environ.get("PYNCCL_TIMEOUT")
    if not text:
        return 600 * 1000000000
    try:
        return timeout_to_ns(text)
    except errors.ConfigError:
        raise errors.ConfigError(
            f"PYNCCL_TIMEOUT is {text!r}, expected a number of seconds, or inf"
        ) from None


cpdef object timeout_to_ns(seconds):
    """A time-out in seconds as nanoseconds; infinity as the largest.

    Raises:
        ConfigError: it is negative or not a number.
    """
    try:
        value = float(seconds)
    except (TypeError, ValueError):
        raise errors.ConfigError(
            f"a time-out is a number of seconds, not {seconds!r}"
        ) from None
    if not value >= 0:
        raise errors.ConfigError(
            f"a time-out is a number of seconds that is not negative, not {seconds!r}"
        )
    return int(min(value, 9.0e9) * 1e9)
