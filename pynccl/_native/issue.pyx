"""From checked arguments to a native submission: streams, deadlines, hand-off, groups."""

from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc

from pynccl._native.abi cimport (
    CU_STREAM_CAPTURE_STATUS_NONE,
    CUDA_SUCCESS,
    CUcontext,
    CUdevice,
    PN_NO_DEADLINE,
    PN_PUT,
    CUresult,
    CUstream,
    CUstreamCaptureStatus,
    pn_done_some,
    pn_enter,
    pn_enter_t,
    pn_aside,
    pn_hand_off,
    pn_leave,
    pn_now_ns,
    pn_op_order,
    pn_op_recycle,
    pn_order_streams,
    pn_op_t,
    pn_submit,
    pn_submit_group,
)
from pynccl._native.borrow cimport view_of
from pynccl._native.callconfig cimport configured
from pynccl._native.completion cimport drain_done
from pynccl._native.engine cimport cuda_exception
from pynccl._native.exchange cimport current_stream, door_of
from pynccl._native.handles cimport CommHandle
from pynccl._native.operators cimport PreMulSum
from pynccl._native.results cimport Ending
from pynccl._native.streams cimport EventHandle
from pynccl._native.view cimport view_t
from pynccl._native.work cimport Work

from asyncio import _get_running_loop, current_task
from threading import get_ident

from pynccl._native.handles import timeout_to_ns
from pynccl._native.work import stream_handle
from pynccl.errors import UsageError

# ---- groups ----------------------------------------------------------------------------------

# Groups open in the process: while there is none, an operation asks nothing.
cdef int open_groups = 0
cdef dict groups = {}


cdef object here():
    """This task on this thread."""
    loop = _get_running_loop()
    return get_ident(), None if loop is None else current_task(loop)


cdef bint recording() except -1:
    """Whether a group of this task on this thread would record an operation."""
    return open_groups > 0 and here() in groups


cdef class Recorder:
    """What a group collects: one a (task, thread), so that others issue normally meanwhile."""

    def __init__(self):
        self.works = []

    def open(self):
        """Begin to record here; False if a group is open here already, which is then joined."""
        global open_groups
        self.owner = here()
        if self.owner in groups:
            return False
        groups[self.owner] = self
        open_groups += 1
        return True

    def close(self):
        """Stop recording."""
        global open_groups
        if groups.get(self.owner) is self:
            del groups[self.owner]
            open_groups -= 1

    def outermost(self):
        """The recorder that collects for this task and thread."""
        return groups.get(self.owner, self)

    def drop(self):
        """Issue nothing: awaiting what was recorded tells so."""
        for work in self.works:
            (<Work>work).group = None

    def submit(self):
        """Issue everything as one native group (``ncclGroupStart`` to ``ncclGroupEnd``)."""
        cdef Work work
        cdef int count = len(self.works), i
        cdef pn_op_t **ops
        if not count:
            return
        engine = (<Work>self.works[0]).comm.engine
        try:
            for item in self.works:
                (<Work>item).comm.usable()
                operator_usable((<Work>item).keep)
                if (<Work>item).comm.engine is not engine:
                    raise UsageError("one group cannot hold operations of two engines")
        except BaseException:
            self.drop()
            raise
        ops = <pn_op_t **>malloc(count * sizeof(pn_op_t *))
        if ops == NULL:
            self.drop()
            raise MemoryError
        try:
            for item in self.works:
                take_over(item)
        except BaseException:
            for item in self.works:
                pn_op_recycle(&(<Work>item).c)
            free(ops)
            self.drop()
            raise
        for i in range(count):
            work = self.works[i]
            work.group = None
            work.c.owner = <void *>work
            Py_INCREF(work)
            ops[i] = &work.c
        with nogil:
            pn_submit_group(ops, count)
        free(ops)
        for item in self.works:
            give_back(item)
        if pn_done_some():
            drain_done()


cdef int operator_usable(object keep) except -1:
    """An operator that a recorded operation holds may have been closed meanwhile."""
    while type(keep) is tuple:
        keep = (<tuple>keep)[0]
    if type(keep) is PreMulSum:
        (<PreMulSum>keep).usable()
    return 0


# ---- hand-off ------------------------------------------------------------------------------

cdef int usable_stream(CommHandle comm, size_t stream, str whose) except -1:
    """Refuse a stream that is captured, or another device's."""
    cdef CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE
    cdef CUcontext context = comm.c.device.context
    cdef CUdevice other = 0
    cdef pn_enter_t saved
    cdef CUresult rc
    with nogil:
        rc = pn_enter(comm.c.device, &saved)
        if rc == CUDA_SUCCESS:
            rc = comm.engine.c.cuda.cuStreamIsCapturing(<CUstream>stream, &status)
            if rc == CUDA_SUCCESS:
                rc = comm.engine.c.cuda.cuStreamGetCtx(<CUstream>stream, &context)
            if rc == CUDA_SUCCESS and context != comm.c.device.context:
                rc = comm.engine.c.cuda.cuCtxSetCurrent(context)
                if rc == CUDA_SUCCESS:
                    rc = comm.engine.c.cuda.cuCtxGetDevice(&other)
                comm.engine.c.cuda.cuCtxSetCurrent(comm.c.device.context)
            pn_leave(comm.c.device, &saved)
    if rc != CUDA_SUCCESS:
        raise cuda_exception(comm.engine, rc, "cuStreamGetCtx", whose)
    if context != comm.c.device.context:
        kind = "cuda" if comm.engine.is_cuda else "cpu"
        raise UsageError(
            f"{whose} is on {kind}:{other}, this communicator is on "
            f"{kind}:{comm.device_ordinal}"
        )
    if status != CU_STREAM_CAPTURE_STATUS_NONE:
        raise UsageError(
            f"{whose} is being captured into a graph, which is not supported yet"
        )
    return 0


cdef int take_over(Work work) except -1:
    """Have the operation wait for what its producers have put on their streams so far.

    On the caller's stream the waits are put at once. On the communicator's own they must come
    behind the operations that are still to be issued there, which a producer may wait for: they
    travel with the operation, as one event.
    """
    cdef CUresult result = CUDA_SUCCESS
    cdef CUstream ahead = <CUstream>work.aside
    cdef int i
    if not work.producer_count and ahead == NULL:
        return 0
    for i in range(work.producer_count):
        usable_stream(work.comm, work.producers[i], "the stream of an array's library")
    with nogil:
        if work.c.has_stream:
            ahead = work.c.stream
        elif work.producer_count == 1 and ahead == NULL:
            ahead = <CUstream>work.producers[0]
        elif ahead == NULL:
            result = pn_aside(work.c.comm, &ahead)
        for i in range(work.producer_count):
            if result == CUDA_SUCCESS and ahead != <CUstream>work.producers[i]:
                result = pn_order_streams(
                    work.c.comm.device, <CUstream>work.producers[i], ahead)
        if result == CUDA_SUCCESS and not work.c.has_stream:
            result = pn_hand_off(&work.c, ahead)
    if result != CUDA_SUCCESS:
        raise cuda_exception(work.engine, result, "cuEventRecord", work.what())
    return 0


cdef int give_back(Work work) except -1:
    """Have the producers' streams wait for the operation.

    It is issued already: what goes wrong here is an error of the context, and is the
    operation's own.
    """
    cdef int i
    for i in range(work.producer_count):
        with nogil:
            pn_op_order(&work.c, <CUstream>work.producers[i])
    return 0


# ---- one operation ---------------------------------------------------------------------------

cdef class Issuer(CommHandle):
    """A communicator that can submit operations whose arguments are known to be good."""

    cdef Work start(
        self, call_t *call, view_t *send, view_t *recv, size_t count, object keep,
        object result, Ending ending,
    ):
        """Submit an operation, or record it in the open group.

        Args:
            count: elements of the arrays, as NCCL counts for this kind of operation.
            keep: what keeps the memory of `send` and `recv` alive.
            result: what awaiting gives; `ending` may have something to do to it first.
        """
        cdef Work work = Work.__new__(Work)
        cdef int i
        cdef view_t *typed = send if send != NULL else recv
        if not call.settled:
            self.settle(call, None)
        work.comm = self
        work.record = self.record
        work.engine = self.engine
        work.spin_ns = self.spin_ns
        work.keep = keep
        work.result_array = result
        work.ending = ending
        work.c.comm = self.c
        work.c.kind = call.kind
        work.c.redop = call.redop
        work.c.root = call.root
        if call.uneven != NULL:
            work.c.uneven = call.uneven
            work.c.may_wait = call.uneven.asks
            work.control = <object>call.blocks
        if typed != NULL:
            work.c.send = send.data if send != NULL else NULL
            work.c.recv = recv.data if recv != NULL else NULL
            work.c.nbytes = count * typed.itemsize
            work.c.datatype = call.datatype
            work.c.count = count * call.unit
        else:
            work.c.count = 1
        if <object>call.stream is not None:
            work.c.stream = <CUstream>call.handle
            work.c.has_stream = True
        elif call.order.told and <CUstream>call.order.stream != self.c.stream:
            work.aside = call.order.stream
        work.producer_count = call.order.count
        for i in range(call.order.count):
            work.producers[i] = call.order.producers[i]
        if call.timed:
            self.time(work)
        if call.kind >= PN_PUT:
            work.c.argument = call.side
            work.c.may_wait = True
        if <object>call.config is not None:
            work.keep = work.keep, configured(self, work, <object>call.config)
        work.c.issued_ns = pn_now_ns()
        cdef int64_t limit = self.timeout_ns
        if <object>call.timeout is not None:
            limit = timeout_to_ns(<object>call.timeout)
        work.c.deadline_ns = PN_NO_DEADLINE
        if limit < PN_NO_DEADLINE - work.c.issued_ns:
            work.c.deadline_ns = work.c.issued_ns + limit
        if open_groups:
            recorder = groups.get(here())
            if recorder is not None:
                work.group = recorder
                (<Recorder>recorder).works.append(work)
                return work
        take_over(work)
        work.c.owner = <void *>work
        Py_INCREF(work)
        with nogil:
            pn_submit(&work.c)
        give_back(work)
        if pn_done_some():
            drain_done()
        return work

    cdef int time(self, Work work) except -1:
        """Have the operation record when it begins and ends on the device."""
        cdef EventHandle begin = EventHandle()
        cdef EventHandle end = EventHandle()
        begin._native_create(self.engine, self.device_ordinal, True)
        end._native_create(self.engine, self.device_ordinal, True)
        work.timing = (begin, end)
        work.c.timed[0] = begin.c
        work.c.timed[1] = end.c
        return 0

    cdef int settle(self, call_t *call, object array) except -1:
        """Find the stream of a call, before its first array is given out by its library."""
        call.settled = True
        call.order.on_gpu = self.engine.is_cuda
        if <object>call.stream is not None:
            call.handle = self.stream_of(<object>call.stream, array)
            # NULL is the legacy default stream, which is 1 to those who are told.
            call.order.stream = call.handle if call.handle else 1
        return 0

    cdef size_t stream_of(self, object stream, object array) except? 0:
        """The handle of the caller's stream: on this device, and not capturing."""
        cdef size_t handle = 0
        if type(stream) is str:
            if stream != "current":
                raise UsageError(f"stream is None, 'current' or a stream, not {stream!r}")
            if not self.engine.is_cuda:
                raise UsageError(
                    'stream="current" needs an array on a GPU: a host array has no stream'
                )
            if array is None or not current_stream(
                door_of(type(array)), array, self.device_ordinal, &handle
            ):
                raise UsageError(
                    'stream="current" is not known for the library of this array; '
                    "pass the stream itself"
                )
        else:
            handle = stream_handle(stream)
        usable_stream(self, handle, "the stream")
        return handle

    cdef object look(self, call_t *call, object array, view_t *view, str name):
        """Borrow an array; it must be on this communicator's device."""
        if not call.settled:
            self.settle(call, array)
        return view_of(array, view, self, &call.order, name)
