"""The operations of a communicator: arguments checked, then one native submission.

Every check comes before anything is issued, and says what was wrong and what was expected. The
rules of size (which side counts, what is divided by the number of ranks, where in place lies)
are NCCL's own.
"""

from cpython.object cimport PyObject
from libc.stdint cimport int64_t

from pynccl._native.abi cimport (
    PN_ALL_GATHER,
    PN_ALL_GATHER_V,
    PN_ALL_REDUCE,
    PN_ALL_TO_ALL,
    PN_ALL_TO_ALL_V,
    PN_BARRIER,
    PN_BROADCAST,
    PN_GATHER,
    PN_GATHER_V,
    PN_RECV,
    PN_REDUCE,
    PN_REDUCE_SCATTER,
    PN_REDUCE_SCATTER_V,
    PN_SCATTER,
    PN_SCATTER_V,
    PN_SEND,
)
from pynccl._native.dtypes cimport moved, reduced, same_type
from pynccl._native.issue cimport Issuer, call_t
from pynccl._native.operators cimport PreMulSum
from pynccl._native.results cimport (
    Adopted,
    Ending,
    fresh_like,
    packed,
    shape_of,
    to_adopt,
    unpacked,
    writes_back,
)
from pynccl._native.view cimport view_t
from pynccl._native.work cimport Work

from operator import index

from pynccl.errors import ConfigError, InvalidBufferError

# ---- kinds -----------------------------------------------------------------------------------

cdef inline bint reduces(int kind) noexcept:
    return kind == PN_ALL_REDUCE or kind == PN_REDUCE or kind == PN_REDUCE_SCATTER


cdef inline bint joins(int kind) noexcept:
    """Whether the output has a block of each rank."""
    return kind == PN_ALL_GATHER or kind == PN_GATHER


cdef inline bint deals(int kind) noexcept:
    """Whether the input has a block for each rank."""
    return kind == PN_REDUCE_SCATTER or kind == PN_SCATTER or kind == PN_ALL_TO_ALL


cdef int set_up(
    call_t *call, int kind, object stream, bint sync, object timeout, bint timed, bint pack,
    object config,
) except -1:
    call.kind = kind
    call.root = 0
    call.stream = <PyObject *>stream
    call.timeout = <PyObject *>timeout
    call.config = <PyObject *>config
    call.timed = timed
    call.pack = pack
    call.settled = False
    call.order.sync = sync
    call.order.told = False
    call.order.stream = 0
    call.order.count = 0
    call.uneven = NULL
    call.blocks = NULL
    return 0


# ---- checks ----------------------------------------------------------------------------------

cdef int rank_in_range(Operations comm, object rank, str name) except -1:
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


cdef size_t divided(view_t *view, int64_t ranks, str name) except? 0:
    """Elements of one rank's block, where the first axis is dealt out to the ranks."""
    if view.ndim == 0 or view.first % ranks:
        length = "no first axis" if view.ndim == 0 else f"{view.first} rows"
        raise InvalidBufferError(
            f"{name} has {length}, which cannot be divided evenly among {ranks} ranks"
        )
    return view.count // ranks


cdef int counted(int kind, view_t *send, view_t *recv, size_t block, size_t ranks) except -1:
    """Refuse an output that is not as large as the result."""
    cdef size_t expected = send.count
    why = "it must be as large as x"
    if joins(kind):
        expected = block * ranks
        why = f"{ranks} ranks times x's {block}"
    elif kind != PN_ALL_TO_ALL and deals(kind):
        expected = block
        why = f"x's {send.count} elements divided among {ranks} ranks"
    if recv.count != expected:
        raise InvalidBufferError(f"out has {recv.count} elements, expected {expected}: {why}")
    return 0


cdef int apart(int kind, view_t *send, view_t *recv, size_t first) except -1:
    """Refuse any overlap of input and output but NCCL's in place.

    Args:
        first: the element with which this rank's own block begins, where there are blocks.
    """
    cdef size_t s = <size_t>send.data, r = <size_t>recv.data, own = first * send.itemsize
    cdef size_t s_end = s + send.count * send.itemsize, r_end = r + recv.count * recv.itemsize
    if s == s_end or r == r_end or s_end <= r or r_end <= s:
        return 0
    if kind == PN_ALL_TO_ALL or kind == PN_ALL_TO_ALL_V:
        rule = "an all-to-all cannot run in place"
    elif joins(kind) or kind == PN_ALL_GATHER_V or kind == PN_GATHER_V:
        if s == r + own:
            return 0
        rule = "in place means that x is this rank's own block of out"
    elif deals(kind) or kind == PN_REDUCE_SCATTER_V or kind == PN_SCATTER_V:
        if r == s + own:
            return 0
        rule = "in place means that out is this rank's own block of x"
    else:
        if s == r:
            return 0
        rule = "in place means the same array"
    raise InvalidBufferError(
        f"input (bytes {s:#x} to {s_end:#x}) and output (bytes {r:#x} to {r_end:#x}) overlap; "
        f"{rule}"
    )


cdef tuple fresh_shape(int kind, object x, int ranks, bint stack):
    shape = shape_of(x)
    if joins(kind):
        if stack:
            return (ranks, *shape)
        return (ranks * shape[0], *shape[1:]) if shape else (ranks,)
    if kind != PN_ALL_TO_ALL and deals(kind):
        return (shape[0] // ranks, *shape[1:])
    return shape


# ---- the operations --------------------------------------------------------------------------

cdef class Operations(Issuer):
    """The collectives and point-to-point operations of one rank.

    Every method returns a Work at once; the operation's place in the communicator's order is
    fixed by the call. Arrays must be contiguous in C order and live where the communicator
    does. ``stream`` is None (the communicator's own stream), ``"current"`` (the array
    library's), a raw handle or an object with ``__cuda_stream__``. On a GPU an operation comes
    behind what its arrays' libraries have put on their current streams, and what they put there
    later comes behind the operation; with ``sync=False`` the caller sees to both.
    ``timeout`` is in seconds, None for the communicator's, ``math.inf`` for none. With
    ``pack=True`` a strided array goes through a contiguous copy, made by its own library at the
    call; a strided output is written when the operation is awaited. ``config`` tunes one call
    of a collective alone (NCCL 2.31), the same on every rank: ``min_ctas``, ``max_ctas``,
    ``nvls_ctas``, ``cga_cluster_size``, ``cta_policy``, ``algorithm`` (such as
    ``"RING,TREE"``), ``force_algorithm``, ``profiler_tag``.

    What moves data takes any dtype but Python objects. What reduces takes NCCL's twelve; bool
    with "any" and "all" (also "max", "min"); complex numbers with "sum" and "avg".

    All raise InvalidBufferError for an array that does not fit, ConfigError for a root, peer or
    operator that does not exist, and UsageError for a communicator that is not ready; then
    nothing has been issued.
    """

    cdef object compact(self, call_t *call, object array, str name, bint reads, bint writes):
        """The array, or where it is strided a contiguous one of its shape in its stead."""
        cdef view_t view
        try:
            self.look(call, array, &view, name)
            return array
        except InvalidBufferError as refusal:
            try:
                scratch = packed(self, array, reads)
            except Exception:
                raise refusal from None  # strides are not what is wrong with it
        if writes:
            writes_back(scratch, array, name)
        return scratch

    cdef Work run(
        self, call_t *call, object x, object out, object op, bint receives, bint stack
    ):
        """Check the arrays of an operation that reads x, and submit it.

        Args:
            op: of a reduction.
            receives: whether this rank gets a result.
            stack: whether a fresh result that joins the ranks' arrays has an axis for them.
        """
        cdef view_t send, recv
        cdef int kind = call.kind
        cdef bint overwrites = (
            receives and out is None and not joins(kind) and not deals(kind)
        )
        cdef Ending ending = None
        if kind == PN_BROADCAST and call.root == self.c.rank:
            given = self.compact(call, x, "x", True, False) if call.pack else x
        else:
            given = self.compact(call, x, "x", True, overwrites) if call.pack else x
        keep = self.look(call, given, &send, "x")
        if reduces(kind):
            reduced(call, self, op, x, &send)
            if type(op) is PreMulSum:
                keep = op, keep
        else:
            moved(call, &send)
        cdef size_t block = divided(&send, self.c.size, "x") if deals(kind) else send.count
        if not receives:
            return self.start(call, &send, &send, block, keep, None, None)
        if overwrites and not send.fresh_result:
            if kind != PN_BROADCAST or call.root != self.c.rank:
                writable(&send, "x")
                if given is not x:
                    ending = unpacked(given, x)
            return self.start(call, &send, &send, block, keep, x, ending)
        if out is None and send.fresh_result:
            target = result = to_adopt(self, x, fresh_shape(kind, x, self.c.size, stack))
            ending = Adopted.__new__(Adopted)
        elif out is None:
            target = result = fresh_like(self, x, fresh_shape(kind, x, self.c.size, stack))
        elif stack:
            raise ConfigError("stack=True shapes a fresh result, it does not go with out=")
        else:
            target = self.compact(call, out, "out", False, True) if call.pack else out
            result = out
            if target is not out:
                ending = unpacked(target, out)
        kept = self.look(call, target, &recv, "out")
        writable(&recv, "out")
        same_type(given, &send, target, &recv)
        counted(kind, &send, &recv, block, self.c.size)
        apart(kind, &send, &recv, self.c.rank * block)
        return self.start(call, &send, &recv, block, (keep, kept), result, ending)

    def all_reduce(
        self, x, out=None, op="sum", *, pack=False, stream=None, sync=True,
        timeout=None, config=None, timed=False,
    ):
        """Reduce x over all ranks; every rank gets the result (``ncclAllReduce``).

        Args:
            x: the same shape and dtype on every rank.
            out: where the result goes, same count and dtype; None: into x itself.
            op: "sum", "prod", "max", "min" or "avg", with NCCL's arithmetic (integers wrap; a
                float average multiplies each input by 1/size first); "any" or "all" of bool.

        Returns:
            A Work whose result is out, or x, or a fresh array where x is immutable.
        """
        cdef call_t call
        self.usable()
        set_up(&call, PN_ALL_REDUCE, stream, sync, timeout, timed, pack, config)
        return self.run(&call, x, out, op, True, False)

    def reduce(
        self, x, out=None, op="sum", root=0, *, pack=False, stream=None, sync=True,
        timeout=None, config=None, timed=False,
    ):
        """Reduce x over all ranks; the root gets the result (``ncclReduce``).

        Args:
            x: the same shape and dtype on every rank.
            out: on the root, where the result goes; None: into x itself. Ignored elsewhere.
            op: as in all_reduce.
            root: the rank that receives.

        Returns:
            A Work whose result is the reduced array on the root, None elsewhere.
        """
        cdef call_t call
        self.usable()
        set_up(&call, PN_REDUCE, stream, sync, timeout, timed, pack, config)
        call.root = rank_in_range(self, root, "root")
        return self.run(&call, x, out, op, call.root == self.c.rank, False)

    def broadcast(
        self, x, root=0, out=None, *, pack=False, stream=None, sync=True,
        timeout=None, config=None, timed=False,
    ):
        """Copy the root's x to every rank (``ncclBroadcast``). Any dtype.

        Args:
            x: on the root, what is sent; elsewhere, what is overwritten (the same shape and
                dtype).
            root: the rank that sends.
            out: where the result goes instead of x.

        Returns:
            A Work whose result is out, or x, or a fresh array where x is immutable.
        """
        cdef call_t call
        self.usable()
        set_up(&call, PN_BROADCAST, stream, sync, timeout, timed, pack, config)
        call.root = rank_in_range(self, root, "root")
        return self.run(&call, x, out, None, True, False)

    def all_gather(
        self, x, out=None, *, stack=False, pack=False, stream=None, sync=True,
        timeout=None, config=None, timed=False,
    ):
        """Join every rank's x, in rank order, on every rank (``ncclAllGather``). Any dtype.

        Args:
            x: shape (a, ...), the same on every rank.
            out: size * a rows; None: a fresh array of x's library, shape (size * a, ...). In
                place: x is this rank's block of out, which is ``slot(out)``.
            stack: give the fresh array the shape (size, a, ...).
        """
        cdef call_t call
        self.usable()
        set_up(&call, PN_ALL_GATHER, stream, sync, timeout, timed, pack, config)
        return self.run(&call, x, out, None, True, stack)

    def reduce_scatter(
        self, x, out=None, op="sum", *, pack=False, stream=None, sync=True,
        timeout=None, config=None, timed=False,
    ):
        """Reduce x over all ranks; each gets its own block of rows (``ncclReduceScatter``).

        Args:
            x: shape (size * a, ...), the same on every rank.
            out: a rows; None: a fresh array of shape (a, ...). In place: out is this rank's
                block of x, which is ``slot(x)``.
            op: as in all_reduce.
        """
        cdef call_t call
        self.usable()
        set_up(&call, PN_REDUCE_SCATTER, stream, sync, timeout, timed, pack, config)
        return self.run(&call, x, out, op, True, False)

    def all_to_all(
        self, x, out=None, *, pack=False, stream=None, sync=True,
        timeout=None, config=None, timed=False,
    ):
        """Exchange blocks: block i of x goes to rank i (``ncclAlltoAll``). Any dtype.

        Args:
            x: shape (size * a, ...).
            out: as large as x; None: a fresh array. In place is not possible.
        """
        cdef call_t call
        self.usable()
        set_up(&call, PN_ALL_TO_ALL, stream, sync, timeout, timed, pack, config)
        return self.run(&call, x, out, None, True, False)

    def gather(
        self, x, out=None, root=0, *, stack=False, pack=False, stream=None, sync=True,
        timeout=None, config=None, timed=False,
    ):
        """Join every rank's x, in rank order, on the root (``ncclGather``). Any dtype.

        Args:
            x: shape (a, ...), the same on every rank.
            out: on the root, size * a rows; None: a fresh array of shape (size * a, ...).
                Ignored elsewhere.
            root: the rank that receives.
            stack: give the fresh array the shape (size, a, ...).

        Returns:
            A Work whose result is the joined array on the root, None elsewhere.
        """
        cdef call_t call
        self.usable()
        set_up(&call, PN_GATHER, stream, sync, timeout, timed, pack, config)
        call.root = rank_in_range(self, root, "root")
        return self.run(&call, x, out, None, call.root == self.c.rank, stack)

    def scatter(
        self, x, out=None, root=0, *, pack=False, stream=None, sync=True,
        timeout=None, config=None, timed=False,
    ):
        """Deal the root's x out: rank i gets block i of its rows (``ncclScatter``). Any dtype.

        Args:
            x: on the root, shape (size * a, ...). Elsewhere it is not read, and may be None.
            out: a rows. None is possible on the root only, which knows the shape.
            root: the rank that sends.
        """
        cdef call_t call
        self.usable()
        set_up(&call, PN_SCATTER, stream, sync, timeout, timed, pack, config)
        call.root = rank_in_range(self, root, "root")
        if call.root == self.c.rank:
            return self.run(&call, x, out, None, True, False)
        if out is None:
            raise InvalidBufferError(
                f"out is needed on rank {self.c.rank}: only the root knows the shape"
            )
        return self.take(&call, out, "out")

    cdef Work take(self, call_t *call, object out, str name):
        """Submit an operation that only writes."""
        cdef view_t recv
        cdef Ending ending = None
        target = self.compact(call, out, name, False, True) if call.pack else out
        keep = self.look(call, target, &recv, name)
        writable(&recv, name)
        moved(call, &recv)
        if target is not out:
            ending = unpacked(target, out)
        return self.start(
            call, NULL if call.kind == PN_RECV else &recv, &recv, recv.count, keep, out,
            ending,
        )

    def send(
        self, x, peer, *, pack=False, stream=None, sync=True, timeout=None, timed=False
    ):
        """Send x to one rank, which must receive as many bytes (``ncclSend``). Any dtype.

        Two ranks that both send first wait for each other: put exchanges into one ``group()``.
        """
        cdef call_t call
        cdef view_t view
        self.usable()
        set_up(&call, PN_SEND, stream, sync, timeout, timed, pack, None)
        call.root = rank_in_range(self, peer, "peer")
        given = self.compact(&call, x, "x", True, False) if pack else x
        keep = self.look(&call, given, &view, "x")
        moved(&call, &view)
        return self.start(&call, &view, NULL, view.count, keep, None, None)

    def recv(
        self, x, peer, *, pack=False, stream=None, sync=True, timeout=None, timed=False
    ):
        """Receive into x from one rank, which must send as much (``ncclRecv``). Any dtype.

        Returns:
            A Work whose result is x.
        """
        cdef call_t call
        self.usable()
        set_up(&call, PN_RECV, stream, sync, timeout, timed, pack, None)
        call.root = rank_in_range(self, peer, "peer")
        return self.take(&call, x, "x")

    def barrier(self, *, stream=None, timeout=None, timed=False):
        """Wait until every rank has called it (a one-byte ``ncclAllReduce``)."""
        cdef call_t call
        self.usable()
        set_up(&call, PN_BARRIER, stream, True, timeout, timed, False, None)
        call.datatype = call.redop = 0
        call.unit = 1
        return self.start(&call, NULL, NULL, 1, None, None, None)

    def slot(self, array):
        """This rank's own block of rows, as a view of `array`: what in place means.

        Args:
            array: shape (size * a, ...); its slices must be views, as of NumPy and PyTorch.

        Returns:
            Shape (a, ...): the x of ``all_gather(x, out=array)``, and the out of
            ``reduce_scatter(array, out)``.
        """
        cdef call_t call
        cdef view_t view
        set_up(&call, PN_ALL_GATHER, None, False, None, False, False, None)
        self.look(&call, array, &view, "array")
        writable(&view, "array")
        divided(&view, self.c.size, "array")
        rows = view.first // self.c.size
        return array[self.c.rank * rows:(self.c.rank + 1) * rows]
