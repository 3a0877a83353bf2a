"""Work: what a call returns.

1. Awaiting asks the device first, and makes an asyncio future only if it has to suspend.
   Cancelling an await drops that future and nothing else.
2. The outcome is fixed natively, once; an exception is built when somebody asks for it.
3. A Work of a group that has not ended has no owner yet: it cannot be waited for.
4. A failure that nobody has asked for is reported when its Work is dropped. Aborts on this side
   are wanted, and one report is enough for all that one failure has taken down.
"""

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t
from libc.stdlib cimport free

from pynccl._native.abi cimport (
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
    CUDA_SUCCESS,
    PN_FROM_ABORT,
    PN_EVENT,
    PN_FROM_CLOSED,
    PN_FROM_CUDA,
    PN_FROM_DEADLINE,
    PN_FROM_NCCL,
    PN_INIT,
    PN_NO_DEADLINE,
    PN_OK,
    CUresult,
    CUstream,
    pn_burst_reset,
    pn_done_some,
    pn_forked,
    pn_may_spin,
    pn_now_ns,
    pn_op_block,
    pn_op_finished,
    pn_op_order,
    pn_op_poll,
    pn_op_spin,
    pn_op_wait,
    pn_suspended,
    pn_wait_t,
)
from pynccl._native.completion cimport Operation, Reactor, drain_done, gives_way, reactor_of
from pynccl._native.engine cimport cuda_exception, nccl_exception
from pynccl._native.handles cimport CommHandle, refuse_fork, unseen_of
from pynccl._native.view cimport dtype_name

from asyncio import Future, _get_running_loop

from pynccl import errors
from pynccl._native.handles import kind_name, timeout_to_ns

cdef extern from "Python.h":
    int PYGEN_RETURN, PYGEN_NEXT
    ctypedef void *sendfunc
    ctypedef struct PyAsyncMethods:
        sendfunc am_send
    ctypedef struct TypeObject "PyTypeObject":
        PyAsyncMethods *tp_as_async
    void PyType_Modified(TypeObject *)
    int PyErr_CheckSignals() except -1

cdef object new_future = Future
cdef object running_loop = _get_running_loop


# ---- the awaitable ---------------------------------------------------------------------------

cdef class Work(Operation):
    """An operation that has been called: its place in its communicator's order is fixed.

    Awaitable any number of times, by several tasks and from several loops; cancelling an await
    ends that wait only. Awaiting returns the result when the device is done and the host may
    read it, or raises what went wrong.
    """

    def __init__(self):
        raise TypeError("a Work is made by calling an operation of a communicator")

    def __dealloc__(self):
        if self.c.detail != NULL:
            free(self.c.detail)

    def __await__(self):
        return self

    def __iter__(self):
        return self

    def __next__(self):
        cdef PyObject *result = NULL
        cdef int sent = work_send(<PyObject *>self, NULL, &result)
        value = <object>result
        Py_DECREF(value)
        if sent == PYGEN_RETURN:
            raise StopIteration(value)
        return value

    cdef bint poll(self) noexcept:
        """Whether it has ended; asks the device unless that is known."""
        if self.c.owner == NULL:
            return False
        if not pn_op_finished(&self.c):
            with nogil:
                pn_op_poll(&self.c)
        if not pn_op_finished(&self.c):
            return False
        if pn_done_some():
            drain_done()
        return True

    cdef int submitted(self) except -1:
        refuse_fork()
        if self.c.owner == NULL:
            if self.group is None:
                raise errors.UsageError(
                    f"{self.what()} was never issued: the group that recorded it ended with an "
                    "exception"
                )
            raise errors.UsageError(
                f"{self.what()} is recorded in a group that is still open: nothing of "
                "it is issued before the group ends, so waiting for it inside would never end"
            )
        return 0

    cdef object outcome(self):
        """The result of an operation that has ended well."""
        if self.ending is not None:
            if self.unseen is not None:
                self.unseen.error = None
            self.result_array = self.ending.result(self.result_array)
        return self.result_array

    cdef object failure(self):
        """The exception of an operation that has ended, or None.

        A fresh one each time: one that has been raised holds the frames it went through, and
        with them the caller's arrays.
        """
        cdef int source = self.c.outcome.source
        if source == PN_OK:
            return None
        self.seen = True
        if self.unseen is not None:
            self.unseen.error = None
            self.unseen = None
        if self.record is not None:
            self.record.failure_seen = True
        return self.make_error(source)

    cdef int asked(self) except -1:
        self.control.answer(self)
        return 0

    cdef int ended(self) except -1:
        if self.ending is not None:
            try:
                self.ending.released()
            except Exception as error:  # whoever asks for the result meets it again
                self.unseen = unseen_of(self.record, self.what(), error.with_traceback(None))
        return 0

    cdef int failed(self) except -1:
        # Who awaits a management call is told in any case.
        if self.seen or PN_INIT <= self.c.kind != PN_EVENT:
            return 0
        error = self.make_error(self.c.outcome.source)
        if not isinstance(error, errors.AbortedError):
            self.unseen = unseen_of(self.record, self.what(), error)
        return 0

    cdef int parted(self) except -1:
        self.comm = None
        return 0

    def what(self):
        """The operation in words, as messages name it."""
        if self.record is None:
            return "an operation that was never called"
        name = kind_name(self.c.kind)
        parts = []
        if self.c.seq and self.c.kind < PN_INIT:
            parts.append(f"operation {self.c.seq}")
        if self.c.kind < PN_INIT and self.c.nbytes:
            parts.append(f"{self.c.nbytes} bytes of {dtype_name(self.c.datatype)}")
        parts.append(f"rank {self.record.c.rank} of {self.record.c.size}")
        return f"{name} ({', '.join(parts)})"

    def make_error(self, int source):
        """Build the exception for an outcome."""
        what = self.what()
        function = self.c.outcome.function.decode() if self.c.outcome.function != NULL else ""
        detail = self.c.detail.decode(errors="replace") if self.c.detail != NULL else ""
        if source == PN_FROM_NCCL:
            return nccl_exception(self.c.outcome.code, function, what, detail)
        if source == PN_FROM_CUDA:
            return cuda_exception(self.engine, self.c.outcome.code, function, what)
        elapsed = (self.c.ended_ns - self.c.issued_ns) / 1e9
        if source == PN_FROM_DEADLINE:
            return errors.DeadlineError(
                f"{what} did not end within {elapsed:.3f} s",
                operation=kind_name(self.c.kind), seq=self.seq, nbytes=self.c.nbytes,
                dtype=dtype_name(self.c.datatype) if self.c.kind < PN_INIT else "",
                elapsed=elapsed,
            )
        if source == PN_FROM_ABORT:
            return errors.AbortedError(
                f"{what} could not be ended cleanly: its handle was abandoned"
            )
        if source == PN_FROM_CLOSED:
            return errors.UsageError(
                f"{what} was not issued: the communicator is {self.record.state()}"
            )
        cause = self.record.failure_exception()
        if isinstance(cause, errors.AbortedError):
            return errors.AbortedError(f"{what} was aborted on this side after {elapsed:.3f} s")
        error = type(cause)(f"{what} ended with its communicator: {cause}")
        error.__cause__ = cause
        error.function = cause.function
        error.result = cause.result
        return error

    # ---- for those who do not await

    def done(self):
        """Whether the operation has ended, with or without an error; asks the device."""
        refuse_fork()
        return self.poll()

    def exception(self):
        """The exception with which it ended, or None.

        Raises:
            UsageError: it has not ended.
        """
        refuse_fork()
        if not self.poll():
            raise errors.UsageError(f"{self.what()} has not ended")
        return self.failure()

    def result(self):
        """The result, as awaiting gives it.

        Raises:
            UsageError: it has not ended. Otherwise what awaiting raises.
        """
        refuse_fork()
        if not self.poll():
            raise errors.UsageError(f"{self.what()} has not ended")
        error = self.failure()
        if error is not None:
            raise error
        return self.outcome()

    def wait(self, timeout=None):
        """Block this thread until it has ended, and return the result; for code without a loop.

        Args:
            timeout: seconds; None leaves it to the operation's own deadline.

        Raises:
            UsageError: this thread runs an event loop, which would stand still.
            TimeoutError: the time-out passed; the operation goes on.
        """
        if running_loop() is not None:
            raise errors.UsageError(
                "wait() would block the event loop that runs on this thread; await instead"
            )
        self.submitted()
        cdef int64_t end = PN_NO_DEADLINE
        cdef int64_t until
        if timeout is not None:
            end = min(pn_now_ns() + timeout_to_ns(timeout), PN_NO_DEADLINE)
        while not self.poll():
            until = min(end, pn_now_ns() + 100000000)
            with nogil:
                pn_op_block(&self.c, until)
            PyErr_CheckSignals()
            if not pn_op_finished(&self.c) and pn_now_ns() >= end:
                raise TimeoutError(f"{self.what()} has not ended within {timeout} s")
        return self.result()

    def order(self, stream):
        """Have what is put on a stream later see the result, with no host wait.

        Args:
            stream: an object with ``__cuda_stream__``, or a raw handle as an int.
        """
        self.submitted()
        if self.ending is not None and self.ending.late:
            raise errors.UsageError(
                f"{self.what()} has a strided result, which is written when the operation has "
                "ended: await it, or pass a contiguous out"
            )
        cdef size_t handle = stream_handle(stream)
        cdef CUresult result
        with nogil:
            result = pn_op_order(&self.c, <CUstream>handle)
        if result == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
            raise errors.UsageError(
                "the stream is being captured into a graph, which is not supported yet"
            )
        if result != CUDA_SUCCESS:
            raise cuda_exception(self.engine, result, "cuStreamWaitEvent", self.what())

    def future(self):
        """A fresh asyncio.Future of the running loop for the result or the exception."""
        loop = running_loop()
        if loop is None:
            raise errors.UsageError("future() needs a running event loop")
        self.submitted()
        future = new_future(loop=loop)
        if self.poll() or not add_wait(self, reactor_of(loop), (future,)):
            self.settle(future)
        return future

    def settle(self, future):
        """Give an asyncio.Future the outcome of this operation, which has ended."""
        if future.done():
            return
        error = self.failure()
        if error is None:
            try:
                result = self.outcome()
            except Exception as wrong:
                error = wrong
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    @property
    def out(self):
        """The result array: valid at once in stream order, for the host when awaited."""
        return self.result_array

    @property
    def duration(self):
        """Seconds on the device, from an event before it to one behind it (``timed=True``).

        Raises:
            UsageError: it was not called with ``timed=True``, or has not ended well.
        """
        if self.timing is None:
            raise errors.UsageError(f"{self.what()} was not called with timed=True")
        refuse_fork()
        if not self.poll() or self.failure() is not None:
            raise errors.UsageError(f"{self.what()} has not ended well, so it has no duration")
        begin, end = self.timing
        return end.elapsed(begin)

    @property
    def seq(self):
        """The operation's number in its communicator, from 1."""
        return self.c.seq if self.c.kind < PN_INIT else 0

    @property
    def nbytes(self):
        """The payload in bytes, as NCCL counts it: what this rank sends, or else receives."""
        return self.c.nbytes

    def __repr__(self):
        state = "done" if pn_op_finished(&self.c) else "pending"
        if self.c.owner == NULL:
            state = "recorded"
        return f"<Work {self.what()} {state}>"


def stream_handle(stream):
    """The CUstream of a foreign stream object, as an int.

    Raises:
        UsageError: it is no stream.
    """
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version, handle = protocol() if callable(protocol) else protocol
        if version != 0:
            raise errors.UsageError(
                f"__cuda_stream__ of version {version} is not known, expected 0"
            )
        return int(handle)
    for name in ("cuda_stream", "ptr"):
        handle = getattr(stream, name, None)
        if handle is not None:
            return int(handle)
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    raise errors.UsageError(
        'a stream is None, "current", a handle or an object with __cuda_stream__, not '
        f"{type(stream).__name__}"
    )


cdef bint add_wait(Work work, Reactor reactor, object future) except? False:
    """Have the loop wake `future` at the end; False if the operation has ended."""
    cdef pn_wait_t *wait
    if work.waits is not None:
        for known, futures in work.waits:
            if known is reactor:
                # The list is emptied of those that were cancelled, so that a loop of time-outs
                # does not fill it.
                (<list>futures)[:] = [
                    f for f in futures if not (f[0] if type(f) is tuple else f).done()
                ]
                (<list>futures).append(future)
                return not pn_op_finished(&work.c)
    else:
        work.waits = []
    futures = [future]
    token = (reactor, work, futures)
    wait = <pn_wait_t *>PyMem_Malloc(sizeof(pn_wait_t))
    if wait == NULL:
        raise MemoryError
    wait.box = reactor.box
    wait.token = <void *>token
    Py_INCREF(token)
    with nogil:
        pending = pn_op_wait(&work.c, wait)
    if not pending:
        Py_DECREF(token)
        PyMem_Free(wait)
        return False
    reactor.waiting += 1
    pn_suspended(1)
    if work.waits is not None:  # it may have ended just now, and been drained elsewhere
        work.waits.append((reactor, futures))
    return True


cdef int work_send(PyObject *self, PyObject *argument, PyObject **result) except -1:
    """am_send: finish, or suspend on a future."""
    cdef Work work = <Work>self
    cdef bint old = pn_op_finished(&work.c)
    result[0] = NULL
    if work.c.owner == NULL or pn_forked:
        work.submitted()
    if old or not work.spin_ns or not pn_may_spin():
        work.poll()
    else:
        with nogil:
            pn_op_spin(&work.c, work.spin_ns)
    if not pn_op_finished(&work.c):
        loop = running_loop()
        if loop is None:
            raise RuntimeError("awaiting a Work needs a running asyncio event loop")
        future = new_future(loop=loop)
        if add_wait(work, reactor_of(loop), future):
            pn_burst_reset()
            future._asyncio_future_blocking = True
            Py_INCREF(future)
            result[0] = <PyObject *>future
            return PYGEN_NEXT
    # What has ended in this very call has just read the clock.
    elif gives_way(pn_now_ns() if old else work.c.ended_ns):
        Py_INCREF(None)
        result[0] = <PyObject *>None
        return PYGEN_NEXT
    if pn_done_some():
        drain_done()
    error = work.failure()
    if error is not None:
        raise error
    value = work.outcome()
    Py_INCREF(value)
    result[0] = <PyObject *>value
    return PYGEN_RETURN


(<TypeObject *>Work).tp_as_async.am_send = <sendfunc><void *>work_send
PyType_Modified(<TypeObject *>Work)


# ---- control operations ----------------------------------------------------------------------

cdef int begin_control(Work work, CommHandle comm, int kind, object timeout) except -1:
    """Make a fresh Work that of a management call; it is finished natively like any other."""
    refuse_fork()
    work.comm = comm
    work.record = comm.record
    work.engine = comm.engine
    work.spin_ns = comm.spin_ns
    work.c.comm = comm.c
    work.c.kind = kind
    work.c.issued_ns = pn_now_ns()
    work.c.deadline_ns = PN_NO_DEADLINE
    if timeout is not None:
        work.c.deadline_ns = min(work.c.issued_ns + timeout_to_ns(timeout), PN_NO_DEADLINE)
    work.c.owner = <void *>work
    Py_INCREF(work)
    return 0


cdef Work control_work(CommHandle comm, int kind, object timeout):
    """A Work for a management call."""
    cdef Work work = Work.__new__(Work)
    begin_control(work, comm, kind, timeout)
    return work
