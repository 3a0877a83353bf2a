"""Operations whose blocks have different numbers of rows, along the first axis.

The counts of rows are given on every rank, or on none: then each rank tells the others its own
before the data travel. The lane does that, as a part of the operation: its place in the order
is that of the call, nothing that was called later overtakes it, and its deadline covers both.
Only how large the result is has to wait for the answer, and so its array is made then.
"""

from cpython.mem cimport PyMem_Calloc, PyMem_Free
from cpython.object cimport PyObject
from libc.stdint cimport int64_t

from pynccl._native.abi cimport (
    CUDA_SUCCESS,
    PN_ALL_GATHER_V,
    PN_ALL_TO_ALL_V,
    PN_GATHER_V,
    PN_REDUCE_SCATTER_V,
    PN_SCATTER_V,
    CUresult,
    CUstream,
    pn_asking_answer,
    pn_op_finished,
    pn_order_streams,
    pn_part_t,
)
from pynccl._native.dtypes cimport moved, reduced, same_type
from pynccl._native.engine cimport cuda_exception
from pynccl._native.issue cimport call_t, recording
from pynccl._native.onesided cimport OneSided
from pynccl._native.operators cimport PreMulSum
from pynccl._native.ops cimport apart, rank_in_range, set_up, writable
from pynccl._native.results cimport Ending, ending_of, fresh_like, shape_of, unpacked
from pynccl._native.view cimport view_t
from pynccl._native.work cimport Work

from math import prod
from operator import index

from pynccl._native.results import current_stream
from pynccl.errors import ConfigError, InvalidBufferError, UsageError


cdef list counts_of(object counts, int ranks, str name):
    """A count of rows for each rank."""
    try:
        rows = [index(count) for count in counts]
    except TypeError:
        rows = None
    if rows is None or len(rows) != ranks or min(rows) < 0:
        raise ConfigError(
            f"{name} must be {ranks} numbers of rows, one a rank, not {counts!r}"
        )
    return rows


cdef int as_said(view_t *view, str what, size_t rows, str why) except -1:
    if <size_t>view.first != rows:
        raise InvalidBufferError(f"{what} has {view.first} rows, expected {rows}: {why}")
    return 0


cdef class Blocks:
    """Which rows go to each rank and come from each; lives as long as the operation."""

    def __cinit__(self, int ranks):
        self.ranks = ranks
        self.c.send = <pn_part_t *>PyMem_Calloc(2 * ranks, sizeof(pn_part_t))
        self.c.own = <int64_t *>PyMem_Calloc(2 * ranks, sizeof(int64_t))
        if self.c.send == NULL or self.c.own == NULL:
            raise MemoryError
        self.c.recv = self.c.send + ranks
        self.c.told = self.c.own + ranks

    def __dealloc__(self):
        PyMem_Free(self.c.send)
        PyMem_Free(self.c.own)

    cdef int put(self, pn_part_t *side, int rank, size_t rows) except -1:
        side[rank].count = rows * self.row * self.unit
        return 0

    cdef int lay(self, pn_part_t *side, list rows) except -1:
        """Blocks one after another, in the order of the ranks."""
        cdef size_t offset = 0
        for rank in range(self.ranks):
            self.put(side, rank, rows[rank])
            side[rank].offset = offset
            offset += side[rank].count
        return 0

    def answer(self, Work work):
        """Make room for what the others have told; called by whoever drains."""
        cdef call_t call
        cdef view_t recv
        cdef CUresult rc = CUDA_SUCCESS
        cdef bint fits = False
        cdef int i
        cdef UnevenOperations comm = work.comm
        if comm is None or pn_op_finished(&work.c):
            return  # its communicator has failed meanwhile
        try:
            if self.receives:
                rows = [self.c.told[rank] for rank in range(self.ranks)]
                result = target = self.target
                if target is None:
                    with self.stream():
                        shape = (sum(rows), *shape_of(self.x)[1:])
                        result = target = fresh_like(comm, self.x, shape)
                    work.ending = ending_of(self.x)
                set_up(&call, work.c.kind, None, self.sync, None, False, False, None)
                kept = comm.look(&call, target, &recv, "out")
                # The lane stands still before this operation: nothing else is behind the wait.
                for i in range(call.order.count):
                    with nogil:
                        rc = pn_order_streams(
                            comm.c.device, <CUstream>call.order.producers[i],
                            comm.c.stream)
                    if rc != CUDA_SUCCESS:
                        raise cuda_exception(
                            comm.engine, rc, "cuStreamWaitEvent", work.what())
                if recv.count != sum(rows) * self.row:
                    raise InvalidBufferError(
                        f"out has {recv.count} elements, but {sum(rows)} rows of {self.row} "
                        f"are coming: the ranks have {rows}"
                    )
                self.lay(self.c.recv, rows)
                work.keep = work.keep, kept
                if self.out is None:
                    work.result_array = result
                work.c.recv = recv.data
            fits = True
        except Exception as error:
            self.refusal = str(error).encode()
            self.c.refusal = self.refusal
        pn_asking_answer(&self.c, fits)


cdef class UnevenOperations(OneSided):
    """Collectives with blocks of different sizes, as grouped sends and receives.

    Blocks are rows of the first axis; all other axes are the same on every rank. Counts are
    sequences with a number of rows for each rank.
    """

    cdef Blocks rows_of(
        self, call_t *call, object x, object given, view_t *view, object op
    ):
        """The blocks of an array that has been looked at, all of them still empty."""
        cdef Blocks blocks = Blocks(self.c.size)
        if view.ndim == 0:
            raise InvalidBufferError("x has no first axis, whose rows the ranks could share")
        if call.kind == PN_REDUCE_SCATTER_V:
            reduced(call, self, op, x, view)
        else:
            moved(call, view)
        blocks.row = prod(shape_of(given)[1:])
        blocks.unit = call.unit
        call.uneven = &blocks.c
        call.blocks = <PyObject *>blocks
        return blocks

    cdef Work submit(
        self, call_t *call, Blocks blocks, object x, view_t *send, object keep, object out,
        list rows, bint receives,
    ):
        """Find the output, and start the operation.

        Args:
            rows: of each block that this rank receives; None: the others are asked.
        """
        cdef view_t recv
        cdef Ending ending = None
        cdef bint asks = rows is None
        cdef size_t first = 0
        recv.data = NULL
        if asks and recording():
            raise UsageError(
                "inside a group the counts must be given: what the others have cannot be "
                "asked for before the group is issued"
            )
        target = result = kept = None
        if receives and out is not None:
            target = self.compact(call, out, "out", False, True) if call.pack else out
            result = out
            if target is not out:
                ending = unpacked(target, out)
        elif receives and not asks:
            target = result = fresh_like(self, x, (sum(rows), *shape_of(x)[1:]))
            ending = ending_of(x)
        if target is not None:
            kept = self.look(call, target, &recv, "out")
            writable(&recv, "out")
            same_type(x, send, target, &recv)
            if asks:
                first = <size_t>-1  # nobody knows yet where this rank's block would begin
            elif recv.count != sum(rows) * blocks.row:
                raise InvalidBufferError(
                    f"out has {recv.count} elements, expected {sum(rows)} rows of {blocks.row}"
                )
            elif call.kind == PN_REDUCE_SCATTER_V or call.kind == PN_SCATTER_V:
                first = blocks.c.send[self.c.rank].offset // blocks.unit
            else:
                first = sum(rows[:self.c.rank]) * blocks.row
            apart(call.kind, send, &recv, first)
        if asks:
            blocks.c.asks = True
            blocks.x = x
            blocks.out = out
            blocks.target = target
            blocks.receives = receives
            blocks.sync = call.order.sync
            blocks.stream = current_stream(x)
        elif receives and call.kind == PN_SCATTER_V:
            blocks.put(blocks.c.recv, call.root, rows[0])
        elif receives and call.kind != PN_REDUCE_SCATTER_V:
            blocks.lay(blocks.c.recv, rows)
        return self.start(
            call, send, &recv, send.count, (keep, blocks, kept), result, ending
        )

    def all_gather_v(
        self, x, counts=None, out=None, *, pack=False, stream=None, sync=True,
        timeout=None, timed=False,
    ):
        """Join every rank's x, in rank order, on every rank (``ncclSend``, ``ncclRecv``).

        Args:
            x: shape (a, ...), where a may differ from rank to rank. Any dtype.
            counts: every rank's a, on every rank; None, on every rank: they are asked for.
            out: as many rows as all together; None: a fresh array. In place, if counts are
                given: x is this rank's block of out.
        """
        cdef call_t call
        self.usable()
        set_up(&call, PN_ALL_GATHER_V, stream, sync, timeout, timed, pack, None)
        rows = None if counts is None else counts_of(counts, self.c.size, "counts")
        return self.join(&call, x, rows, out, True)

    cdef Work join(self, call_t *call, object x, list rows, object out, bint receives):
        cdef view_t send
        cdef Blocks blocks
        given = self.compact(call, x, "x", True, False) if call.pack else x
        keep = self.look(call, given, &send, "x")
        blocks = self.rows_of(call, x, given, &send, None)
        if rows is not None:
            as_said(&send, "x", rows[self.c.rank], f"counts is {rows}, this is {self.c.rank}")
        blocks.c.own[0] = send.first
        for rank in range(self.c.size):
            if call.kind == PN_ALL_GATHER_V or rank == call.root:
                blocks.put(blocks.c.send, rank, send.first)
        return self.submit(call, blocks, x, &send, keep, out, rows, receives)

    def gather_v(
        self, x, counts=None, out=None, root=0, *, pack=False, stream=None, sync=True,
        timeout=None, timed=False,
    ):
        """Join every rank's x, in rank order, on the root (``ncclSend``, ``ncclRecv``).

        Args:
            x: shape (a, ...), where a may differ from rank to rank. Any dtype.
            counts: every rank's a, on every rank; None, on every rank: they are asked for.
            out: on the root, as many rows as all together; None: a fresh array.
            root: the rank that receives.

        Returns:
            A Work whose result is the joined array on the root, None elsewhere.
        """
        cdef call_t call
        self.usable()
        set_up(&call, PN_GATHER_V, stream, sync, timeout, timed, pack, None)
        call.root = rank_in_range(self, root, "root")
        rows = None if counts is None else counts_of(counts, self.c.size, "counts")
        return self.join(&call, x, rows, out, call.root == self.c.rank)

    def all_to_all_v(
        self, x, send_counts, recv_counts=None, out=None, *, pack=False, stream=None,
        sync=True, timeout=None, timed=False,
    ):
        """Send each rank its own block of rows (``ncclSend``, ``ncclRecv``). Any dtype.

        Args:
            x: as many rows as send_counts says, the block of rank 0 first.
            send_counts: rows for each rank.
            recv_counts: rows from each rank, on every rank; None, on every rank: they are
                asked for.
            out: as many rows as come in; None: a fresh array. In place is not possible.
        """
        cdef call_t call
        cdef view_t send
        cdef Blocks blocks
        self.usable()
        set_up(&call, PN_ALL_TO_ALL_V, stream, sync, timeout, timed, pack, None)
        sent = counts_of(send_counts, self.c.size, "send_counts")
        rows = None
        if recv_counts is not None:
            rows = counts_of(recv_counts, self.c.size, "recv_counts")
        given = self.compact(&call, x, "x", True, False) if call.pack else x
        keep = self.look(&call, given, &send, "x")
        blocks = self.rows_of(&call, x, given, &send, None)
        as_said(&send, "x", sum(sent), f"send_counts is {sent}")
        if rows is not None and rows[self.c.rank] != sent[self.c.rank]:
            raise ConfigError(
                f"rank {self.c.rank} sends itself {sent[self.c.rank]} rows, and would receive "
                f"{rows[self.c.rank]} from itself"
            )
        blocks.lay(blocks.c.send, sent)
        for rank in range(self.c.size):
            blocks.c.own[rank] = sent[rank]
        return self.submit(&call, blocks, x, &send, keep, out, rows, True)

    def reduce_scatter_v(
        self, x, counts, out=None, op="sum", *, pack=False, stream=None, sync=True,
        timeout=None, timed=False,
    ):
        """Reduce x over all ranks; each gets its own block of rows (``ncclReduce`` a rank).

        Args:
            x: as many rows as counts says, the block of rank 0 first; the same shape on every
                rank.
            counts: rows of each rank's block, the same on every rank.
            out: as many rows as this rank's block; None: a fresh array. In place: out is this
                rank's block of x.
            op: as in all_reduce.
        """
        cdef call_t call
        cdef view_t send
        cdef Blocks blocks
        self.usable()
        set_up(&call, PN_REDUCE_SCATTER_V, stream, sync, timeout, timed, pack, None)
        rows = counts_of(counts, self.c.size, "counts")
        given = self.compact(&call, x, "x", True, False) if call.pack else x
        keep = self.look(&call, given, &send, "x")
        blocks = self.rows_of(&call, x, given, &send, op)
        if type(op) is PreMulSum:
            keep = op, keep
        as_said(&send, "x", sum(rows), f"counts is {rows}")
        blocks.lay(blocks.c.send, rows)
        return self.submit(
            &call, blocks, x, &send, keep, out, [rows[self.c.rank]], True
        )

    cdef Work take_block(self, call_t *call, object out):
        """This rank's part of a scatter from another."""
        cdef view_t recv
        cdef Blocks blocks
        target = self.compact(call, out, "out", False, True) if call.pack else out
        keep = self.look(call, target, &recv, "out")
        writable(&recv, "out")
        blocks = self.rows_of(call, out, target, &recv, None)
        blocks.put(blocks.c.recv, call.root, recv.first)
        ending = unpacked(target, out) if target is not out else None
        return self.start(
            call, NULL, &recv, recv.count, (keep, blocks), out, ending
        )

    def scatter_v(
        self, x, counts=None, out=None, root=0, *, pack=False, stream=None, sync=True,
        timeout=None, timed=False,
    ):
        """Deal the root's x out in blocks of different sizes (``ncclSend``, ``ncclRecv``).

        Args:
            x: on the root, as many rows as counts says, the block of rank 0 first. Elsewhere
                it is not read, and may be None. Any dtype.
            counts: on the root, rows of each rank's block. Elsewhere it is not read.
            out: this rank's block. None is possible on the root only, which knows the shape.
            root: the rank that sends.
        """
        cdef call_t call
        cdef view_t send
        cdef Blocks blocks
        self.usable()
        set_up(&call, PN_SCATTER_V, stream, sync, timeout, timed, pack, None)
        call.root = rank_in_range(self, root, "root")
        if call.root != self.c.rank:
            if out is None:
                raise InvalidBufferError(
                    f"out is needed on rank {self.c.rank}: only the root knows the shape"
                )
            return self.take_block(&call, out)
        rows = counts_of(counts, self.c.size, "counts")
        given = self.compact(&call, x, "x", True, False) if call.pack else x
        keep = self.look(&call, given, &send, "x")
        blocks = self.rows_of(&call, x, given, &send, None)
        as_said(&send, "x", sum(rows), f"counts is {rows}")
        blocks.lay(blocks.c.send, rows)
        return self.submit(
            &call, blocks, x, &send, keep, out, [rows[self.c.rank]], True
        )
