"""The operations of a communicator: arguments checked, then one native submission.

Every check comes before anything is issued, and says what was wrong and what was expected. The
rules of size (which side counts, what is divided by the number of ranks, where in place lies)
are NCCL's own.
"""

from pynccl._native.abi cimport (
    PN_ALL_GATHER,
    PN_ALL_REDUCE,
    PN_ALL_TO_ALL,
    PN_BARRIER,
    PN_BROADCAST,
    PN_GATHER,
    PN_RECV,
    PN_REDUCE,
    PN_REDUCE_SCATTER,
    PN_SCATTER,
    PN_SEND,
)
from pynccl._native.handles cimport CommHandle
from pynccl._native.issue cimport Issuer
from pynccl._native.view cimport dtype_of, fresh_like, view_t
from pynccl._native.work cimport Work

from operator import index

from pynccl.errors import ConfigError, InvalidBufferError
from pynccl.types import REDUCTIONS

cdef dict OPS = REDUCTIONS


# ---- checks ----------------------------------------------------------------------------------

cdef int reduction(object op, object array, view_t *view) except -1:
    code = OPS.get(op) if type(op) is str else None
    if code is None:
        raise ConfigError(f"op must be one of {', '.join(OPS)}, not {op!r}")
    if view.dtype < 0:
        raise InvalidBufferError(
            f"{dtype_of(array, view)} can be moved but not reduced; reductions take int8, "
            "uint8, int32, uint32, int64, uint64, float16, bfloat16, float32, float64, "
            "float8_e4m3fn and float8_e5m2"
        )
    return code


cdef int rank_in_range(CommHandle comm, object rank, str name) except -1:
    try:
        number = index(rank) if not isinstance(rank, bool) else None
    except TypeError:
        number = None
    if number is None or not 0 <= number < comm.c.size:
        raise ConfigError(f"{name} must be a rank from 0 to {comm.c.size - 1}, not {rank!r}")
    return number


cdef int writable(view_t *view, str name) except -1:
    if view.readonly:
        raise InvalidBufferError(
            f"{name} is read-only, and the operation writes into it; pass a writable out="
        )
    return 0


cdef int same_type(object x, view_t *send, object out, view_t *recv) except -1:
    if send.kind != recv.kind or send.itemsize != recv.itemsize:
        raise InvalidBufferError(
            f"out has elements of {dtype_of(out, recv)} ({recv.itemsize} bytes), the input "
            f"has {dtype_of(x, send)} ({send.itemsize} bytes); they must be the same"
        )
    return 0


cdef int counted(view_t *view, size_t expected, str name, str why) except -1:
    if view.count != expected:
        raise InvalidBufferError(
            f"{name} has {view.count} elements, expected {expected}: {why}"
        )
    return 0


cdef size_t divided(view_t *view, int size, str name) except? 0:
    """Elements of one rank's block, where the first axis is dealt out to the ranks."""
    if view.ndim == 0 or view.first % size:
        length = "no first axis" if view.ndim == 0 else f"{view.first} rows"
        raise InvalidBufferError(
            f"{name} has {length}, which cannot be divided evenly among {size} ranks"
        )
    return view.count // size


cdef int apart(
    view_t *send, size_t send_bytes, view_t *recv, size_t recv_bytes, size_t in_place, str rule
) except -1:
    """Refuse any overlap of input and output but NCCL's in place: an input at `in_place`."""
    cdef size_t s = <size_t>send.data, r = <size_t>recv.data
    if s == in_place or send_bytes == 0 or recv_bytes == 0:
        return 0
    if s + send_bytes <= r or r + recv_bytes <= s:
        return 0
    raise InvalidBufferError(
        f"input (bytes {s:#x} to {s + send_bytes:#x}) and output (bytes {r:#x} to "
        f"{r + recv_bytes:#x}) overlap; {rule}"
    )


cdef tuple scaled(object array, int multiply, int divide):
    shape = tuple(array.shape) if hasattr(array, "shape") else (len(array),)
    first = shape[0] if shape else 1
    return (first * multiply // divide, *shape[1:])


# ---- the operations --------------------------------------------------------------------------

cdef class Operations(Issuer):
    """The collectives and point-to-point operations of one rank.

    Every method returns a Work at once; the operation's place in the communicator's order is
    fixed by the call. Arrays must be contiguous in C order and live where the communicator
    does. ``stream`` is None (the communicator's own stream), ``"current"`` (the array
    library's), a raw handle or an object with ``__cuda_stream__``; ``timeout`` is in seconds,
    None for the communicator's, ``math.inf`` for none.

    All raise InvalidBufferError for an array that does not fit, ConfigError for a root, peer or
    operator that does not exist, and UsageError for a communicator that is not ready; then
    nothing has been issued.
    """

    def all_reduce(self, x, out=None, op="sum", *, stream=None, timeout=None, timed=False):
        """Reduce x over all ranks; every rank gets the result (``ncclAllReduce``).

        Args:
            x: the same shape and dtype on every rank.
            out: where the result goes, same count and dtype; None: into x itself.
            op: "sum", "prod", "max", "min" or "avg", with NCCL's arithmetic (integers wrap; a
                float average multiplies each input by 1/size first).

        Returns:
            A Work whose result is out, or x, or a fresh array where x is immutable.
        """
        cdef view_t send
        self.usable()
        keep = self.look(x, &send, "x")
        cdef int redop = reduction(op, x, &send)
        if out is None and not send.fresh_result:
            writable(&send, "x")
            return self.start(PN_ALL_REDUCE, &send, &send, send.count, redop, 0,
                              stream, timed, timeout, x, keep, x, False)
        return self.like(PN_ALL_REDUCE, x, &send, keep, out, redop, 0, True,
                         stream, timed, timeout)

    cdef Work like(
        self, int kind, object x, view_t *send, object keep, object out, int redop, int root,
        bint receives, object stream, bint timed, object timeout,
    ):
        """An operation whose output, if any, has the input's shape and may be the input."""
        cdef view_t recv
        cdef bint converted = False
        if not receives:
            return self.start(kind, send, send, send.count, redop, root,
                              stream, timed, timeout, x, keep, None, False)
        if out is None:
            result = fresh_like(x, tuple(x.shape))
            converted = True
        else:
            result = out
        kept = self.look(result, &recv, "out")
        writable(&recv, "out")
        same_type(x, send, result, &recv)
        counted(&recv, send.count, "out", "it must be as large as x")
        cdef size_t nbytes = send.count * send.itemsize
        apart(send, nbytes, &recv, nbytes, <size_t>recv.data, "in place means the same array")
        return self.start(kind, send, &recv, send.count, redop, root,
                          stream, timed, timeout, x, (keep, kept), result, converted)

    def reduce(self, x, out=None, op="sum", root=0, *, stream=None, timeout=None, timed=False):
        """Reduce x over all ranks; the root gets the result (``ncclReduce``).

        Args:
            x: the same shape and dtype on every rank.
            out: on the root, where the result goes; None: into x itself. Ignored elsewhere.
            op: as in all_reduce.
            root: the rank that receives.

        Returns:
            A Work whose result is the reduced array on the root, None elsewhere.
        """
        cdef view_t send
        self.usable()
        cdef int target = rank_in_range(self, root, "root")
        keep = self.look(x, &send, "x")
        cdef int redop = reduction(op, x, &send)
        cdef bint mine = target == self.c.rank
        if mine and out is None and not send.fresh_result:
            writable(&send, "x")
            return self.start(PN_REDUCE, &send, &send, send.count, redop, target,
                              stream, timed, timeout, x, keep, x, False)
        return self.like(PN_REDUCE, x, &send, keep, out, redop, target, mine,
                         stream, timed, timeout)

    def broadcast(self, x, root=0, out=None, *, stream=None, timeout=None, timed=False):
        """Copy the root's x to every rank (``ncclBroadcast``). Any dtype.

        Args:
            x: on the root, what is sent; elsewhere, what is overwritten (the same shape and
                dtype).
            root: the rank that sends.
            out: where the result goes instead of x.

        Returns:
            A Work whose result is out, or x, or a fresh array where x is immutable.
        """
        cdef view_t send
        self.usable()
        cdef int source = rank_in_range(self, root, "root")
        keep = self.look(x, &send, "x")
        if out is None and not send.fresh_result:
            if source != self.c.rank:
                writable(&send, "x")
            return self.start(PN_BROADCAST, &send, &send, send.count, 0, source,
                              stream, timed, timeout, x, keep, x, False)
        return self.like(PN_BROADCAST, x, &send, keep, out, 0, source, True,
                         stream, timed, timeout)

    def all_gather(self, x, out=None, *, stream=None, timeout=None, timed=False):
        """Join every rank's x, in rank order, on every rank (``ncclAllGather``). Any dtype.

        Args:
            x: shape (a, ...), the same on every rank.
            out: size * a rows; None: a fresh array of x's library, shape (size * a, ...). In
                place: x is this rank's block of out.
        """
        cdef view_t send, recv
        self.usable()
        keep = self.look(x, &send, "x")
        result = fresh_like(x, scaled(x, self.c.size, 1)) if out is None else out
        kept = self.look(result, &recv, "out")
        writable(&recv, "out")
        same_type(x, &send, result, &recv)
        counted(&recv, send.count * self.c.size, "out",
                f"{self.c.size} ranks times x's {send.count}")
        cdef size_t block = send.count * send.itemsize
        apart(&send, block, &recv, block * self.c.size, <size_t>recv.data + self.c.rank * block,
              "in place means that x is this rank's own block of out")
        return self.start(PN_ALL_GATHER, &send, &recv, send.count, 0, 0,
                          stream, timed, timeout, x, (keep, kept), result, out is None)

    def reduce_scatter(self, x, out=None, op="sum", *, stream=None, timeout=None, timed=False):
        """Reduce x over all ranks; each gets its own block of rows (``ncclReduceScatter``).

        Args:
            x: shape (size * a, ...), the same on every rank.
            out: a rows; None: a fresh array of shape (a, ...). In place: out is this rank's
                block of x.
            op: as in all_reduce.
        """
        cdef view_t send, recv
        self.usable()
        keep = self.look(x, &send, "x")
        cdef int redop = reduction(op, x, &send)
        cdef size_t count = divided(&send, self.c.size, "x")
        result = fresh_like(x, scaled(x, 1, self.c.size)) if out is None else out
        kept = self.look(result, &recv, "out")
        writable(&recv, "out")
        same_type(x, &send, result, &recv)
        counted(&recv, count, "out",
                f"x's {send.count} elements divided among {self.c.size} ranks")
        cdef size_t block = count * send.itemsize
        apart(&send, block * self.c.size, &recv, block, <size_t>recv.data - self.c.rank * block,
              "in place means that out is this rank's own block of x")
        return self.start(PN_REDUCE_SCATTER, &send, &recv, count, redop, 0,
                          stream, timed, timeout, x, (keep, kept), result, out is None)

    def all_to_all(self, x, out=None, *, stream=None, timeout=None, timed=False):
        """Exchange blocks: block i of x goes to rank i (``ncclAlltoAll``). Any dtype.

        Args:
            x: shape (size * a, ...).
            out: as large as x; None: a fresh array. In place is not possible.
        """
        cdef view_t send, recv
        self.usable()
        keep = self.look(x, &send, "x")
        cdef size_t count = divided(&send, self.c.size, "x")
        result = fresh_like(x, scaled(x, 1, 1)) if out is None else out
        kept = self.look(result, &recv, "out")
        writable(&recv, "out")
        same_type(x, &send, result, &recv)
        counted(&recv, send.count, "out", "it must be as large as x")
        apart(&send, send.count * send.itemsize, &recv, recv.count * recv.itemsize, 0,
              "an all-to-all cannot run in place")
        return self.start(PN_ALL_TO_ALL, &send, &recv, count, 0, 0,
                          stream, timed, timeout, x, (keep, kept), result, out is None)

    def gather(self, x, out=None, root=0, *, stream=None, timeout=None, timed=False):
        """Join every rank's x, in rank order, on the root (``ncclGather``). Any dtype.

        Args:
            x: shape (a, ...), the same on every rank.
            out: on the root, size * a rows; None: a fresh array of shape (size * a, ...).
                Ignored elsewhere.
            root: the rank that receives.

        Returns:
            A Work whose result is the joined array on the root, None elsewhere.
        """
        cdef view_t send, recv
        self.usable()
        cdef int target = rank_in_range(self, root, "root")
        keep = self.look(x, &send, "x")
        if target != self.c.rank:
            return self.start(PN_GATHER, &send, &send, send.count, 0, target,
                              stream, timed, timeout, x, keep, None, False)
        result = fresh_like(x, scaled(x, self.c.size, 1)) if out is None else out
        kept = self.look(result, &recv, "out")
        writable(&recv, "out")
        same_type(x, &send, result, &recv)
        counted(&recv, send.count * self.c.size, "out",
                f"{self.c.size} ranks times x's {send.count}")
        cdef size_t block = send.count * send.itemsize
        apart(&send, block, &recv, block * self.c.size, <size_t>recv.data + self.c.rank * block,
              "in place means that x is this rank's own block of out")
        return self.start(PN_GATHER, &send, &recv, send.count, 0, target,
                          stream, timed, timeout, x, (keep, kept), result, out is None)

    def scatter(self, x, out=None, root=0, *, stream=None, timeout=None, timed=False):
        """Deal the root's x out: rank i gets block i of its rows (``ncclScatter``). Any dtype.

        Args:
            x: on the root, shape (size * a, ...). Elsewhere it is not read, and may be None.
            out: a rows. None is possible on the root only, which knows the shape.
            root: the rank that sends.
        """
        cdef view_t send, recv
        cdef size_t count
        self.usable()
        cdef int source = rank_in_range(self, root, "root")
        if source != self.c.rank:
            if out is None:
                raise InvalidBufferError(
                    f"out is needed on rank {self.c.rank}: only the root knows the shape"
                )
            kept = self.look(out, &recv, "out")
            writable(&recv, "out")
            return self.start(PN_SCATTER, &recv, &recv, recv.count, 0, source,
                              stream, timed, timeout, out, kept, out, False)
        keep = self.look(x, &send, "x")
        count = divided(&send, self.c.size, "x")
        result = fresh_like(x, scaled(x, 1, self.c.size)) if out is None else out
        kept = self.look(result, &recv, "out")
        writable(&recv, "out")
        same_type(x, &send, result, &recv)
        counted(&recv, count, "out",
                f"x's {send.count} elements divided among {self.c.size} ranks")
        cdef size_t block = count * send.itemsize
        apart(&send, block * self.c.size, &recv, block, <size_t>recv.data - self.c.rank * block,
              "in place means that out is this rank's own block of x")
        return self.start(PN_SCATTER, &send, &recv, count, 0, source,
                          stream, timed, timeout, x, (keep, kept), result, out is None)

    def send(self, x, peer, *, stream=None, timeout=None, timed=False):
        """Send x to one rank, which must receive as many bytes (``ncclSend``). Any dtype.

        Two ranks that both send first wait for each other: put exchanges into one ``group()``.
        """
        cdef view_t view
        self.usable()
        cdef int target = rank_in_range(self, peer, "peer")
        keep = self.look(x, &view, "x")
        return self.start(PN_SEND, &view, NULL, view.count, 0, target,
                          stream, timed, timeout, x, keep, None, False)

    def recv(self, x, peer, *, stream=None, timeout=None, timed=False):
        """Receive into x from one rank, which must send as much (``ncclRecv``). Any dtype.

        Returns:
            A Work whose result is x.
        """
        cdef view_t view
        self.usable()
        cdef int source = rank_in_range(self, peer, "peer")
        keep = self.look(x, &view, "x")
        writable(&view, "x")
        return self.start(PN_RECV, NULL, &view, view.count, 0, source,
                          stream, timed, timeout, x, keep, x, False)

    def barrier(self, *, stream=None, timeout=None, timed=False):
        """Wait until every rank has called it (a one-byte ``ncclAllReduce``)."""
        self.usable()
        return self.start(PN_BARRIER, NULL, NULL, 1, 0, 0,
                          stream, timed, timeout, None, None, None, False)
