"""Streams and events: handles of ours and of others, and how to await them.

1. A handle of our own is destroyed with its object; a foreign one is borrowed, and its owner is
   held.
2. Awaiting a stream waits for what is on it at that moment; awaiting an event, for its last
   record.
3. A wait has its own deadline; when that passes, or the context is in error, that wait alone
   ends with an exception.
"""

from cpython.ref cimport Py_DECREF, Py_INCREF

from pynccl._native.abi cimport (
    CU_EVENT_DEFAULT,
    CU_EVENT_DISABLE_TIMING,
    CU_STREAM_NON_BLOCKING,
    CUDA_ERROR_NOT_READY,
    CUDA_SUCCESS,
    PN_NO_DEADLINE,
    CUevent,
    CUresult,
    CUstream,
    pn_enter,
    pn_enter_t,
    pn_event_create,
    pn_event_destroy,
    pn_event_elapsed,
    pn_event_query,
    pn_event_record,
    pn_forked,
    pn_leave,
    pn_now_ns,
    pn_stream_destroy,
    pn_stream_query,
    pn_stream_wait,
    pn_watch_event,
    pn_watch_stream,
)
from pynccl._native.engine cimport Engine, cuda_exception
from pynccl._native.handles cimport refuse_fork
from pynccl._native.work cimport Work

from pynccl._native.handles import timeout_to_ns
from pynccl._native.completion import start_reaper
from pynccl._native.work import stream_handle
from pynccl.errors import ConfigError, UsageError


cdef class DeviceObject:
    """What belongs to one device of one engine."""

    cdef int on(self, Engine engine, int ordinal) except -1:
        self.device = engine.device(ordinal)
        self.engine = engine
        self.device_ordinal = ordinal
        return 0

    cdef int usable(self) except -1:
        refuse_fork()
        if self.device == NULL:
            raise UsageError(f"this {type(self).__name__} has no native handle")
        return 0

    cdef int check(self, CUresult result, str function) except -1:
        if result != CUDA_SUCCESS:
            raise cuda_exception(self.engine, result, function, type(self).__name__)
        return 0


cdef class Watch(Work):
    """The Work of a wait for a stream or an event."""

    cdef bint of_stream

    def what(self):
        """The wait in words."""
        return f"wait for a {'stream' if self.of_stream else 'recorded event'}"


cdef Watch new_watch(object owner, object timeout):
    cdef Watch watch = Watch.__new__(Watch)
    cdef DeviceObject holder = owner
    watch.engine = holder.engine
    watch.keep = owner
    watch.of_stream = isinstance(owner, StreamHandle)
    watch.c.owner = <void *>watch
    watch.c.issued_ns = pn_now_ns()
    watch.c.deadline_ns = PN_NO_DEADLINE
    if timeout is not None:
        watch.c.deadline_ns = min(watch.c.issued_ns + timeout_to_ns(timeout), PN_NO_DEADLINE)
    return watch


cdef int drop(Watch watch) except -1:
    """Forget a watch that could not be set."""
    watch.c.owner = NULL
    Py_DECREF(watch)
    return 0


cdef class StreamHandle(DeviceObject):
    """A CUDA stream. Public behaviour is in Stream."""

    cdef CUstream c
    cdef bint owned
    cdef object owner

    def _native_create(self, Engine engine, int ordinal, int priority):
        """Make a non-blocking stream (``cuStreamCreateWithPriority``)."""
        cdef pn_enter_t saved
        cdef CUresult result
        cdef int least = 0, greatest = 0
        self.on(engine, ordinal)
        with nogil:
            result = pn_enter(self.device, &saved)
            if result == CUDA_SUCCESS:
                result = self.engine.c.cuda.cuCtxGetStreamPriorityRange(&least, &greatest)
                if result == CUDA_SUCCESS and greatest <= priority <= least:
                    result = self.engine.c.cuda.cuStreamCreateWithPriority(
                        &self.c, CU_STREAM_NON_BLOCKING, priority)
                pn_leave(self.device, &saved)
        self.check(result, "cuStreamCreateWithPriority")
        if not greatest <= priority <= least:
            raise ConfigError(
                f"priority must be {greatest} (first) to {least} (last), not {priority}"
            )
        self.owned = True
        start_reaper()

    def _native_borrow(self, Engine engine, int ordinal, stream):
        """Take a foreign stream: an object with __cuda_stream__, or a handle."""
        self.on(engine, ordinal)
        self.c = <CUstream><size_t>stream_handle(stream)
        self.owner = stream
        start_reaper()

    def __dealloc__(self):
        if self.owned and self.c != NULL and not pn_forked:
            # Returns at once: what is on the stream runs to its end.
            with nogil:
                pn_stream_destroy(self.device, self.c)

    @property
    def handle(self):
        """The raw CUstream as an int."""
        return <size_t>self.c

    def __cuda_stream__(self):
        return 0, <size_t>self.c

    def query(self):
        """Whether everything on the stream has ended (``cuStreamQuery``).

        Raises:
            CudaError: the context is in error.
        """
        cdef CUresult result
        self.usable()
        with nogil:
            result = pn_stream_query(self.device, self.c)
        if result == CUDA_ERROR_NOT_READY:
            return False
        self.check(result, "cuStreamQuery")
        return True

    def wait(self, what):
        """Have what comes later on this stream run after `what` (``cuStreamWaitEvent``).

        Args:
            what: an Event, a Work, or another stream (as it is now).
        """
        cdef CUresult result
        cdef CUevent event
        self.usable()
        if isinstance(what, Work):
            what.order(self)
            return
        if not isinstance(what, EventHandle):
            what = EventHandle.of_stream(self, stream_handle(what))
        event = (<EventHandle>what).c
        with nogil:
            result = pn_stream_wait(self.device, self.c, event)
        self.check(result, "cuStreamWaitEvent")

    def done(self, timeout=None):
        """A Work that ends when everything that is on the stream now has ended.

        Args:
            timeout: seconds, None for no deadline.
        """
        cdef CUresult result
        cdef Watch watch
        self.usable()
        watch = new_watch(self, timeout)
        Py_INCREF(watch)
        with nogil:
            result = pn_watch_stream(&watch.c, self.device, self.c)
        if result != CUDA_SUCCESS:
            drop(watch)
        self.check(result, "cuEventRecord")
        return watch

    def __await__(self):
        return self.done().__await__()


cdef class EventHandle(DeviceObject):
    """A CUDA event. Public behaviour is in Event."""

    def _native_create(self, Engine engine, int ordinal, bint timing):
        """Make an event (``cuEventCreate``)."""
        cdef CUresult result
        cdef int flags = CU_EVENT_DEFAULT if timing else CU_EVENT_DISABLE_TIMING
        self.on(engine, ordinal)
        with nogil:
            result = pn_event_create(self.device, &self.c, flags)
        self.check(result, "cuEventCreate")
        self.owned = True
        self.timing = timing
        start_reaper()

    @staticmethod
    def of_stream(DeviceObject like, size_t stream):
        """An event that is recorded on a stream now."""
        cdef EventHandle made = EventHandle()
        made._native_create(like.engine, like.device_ordinal, False)
        made.record(stream)
        return made

    def __dealloc__(self):
        if self.owned and self.c != NULL and not pn_forked:
            with nogil:
                pn_event_destroy(self.device, self.c)

    @property
    def handle(self):
        """The raw CUevent as an int."""
        return <size_t>self.c

    def record(self, stream):
        """Mark this point of a stream (``cuEventRecord``), in place of what was marked."""
        cdef size_t where = stream_handle(stream)
        cdef CUresult result
        self.usable()
        if isinstance(stream, StreamHandle) and (<StreamHandle>stream).device != self.device:
            raise UsageError(f"{stream!r} is on another device than {self!r}")
        with nogil:
            result = pn_event_record(self.device, self.c, <CUstream>where)
        self.check(result, "cuEventRecord")

    def query(self):
        """Whether the recorded point, if any, has been reached (``cuEventQuery``)."""
        cdef CUresult result
        self.usable()
        with nogil:
            result = pn_event_query(self.device, self.c)
        if result == CUDA_ERROR_NOT_READY:
            return False
        self.check(result, "cuEventQuery")
        return True

    def elapsed(self, EventHandle since):
        """Seconds between two events that have both been reached (``cuEventElapsedTime``)."""
        cdef float milliseconds = 0
        cdef CUresult result
        self.usable()
        if not (self.timing and since.timing):
            raise UsageError("elapsed() needs two events made with timing=True")
        with nogil:
            result = pn_event_elapsed(self.device, &milliseconds, since.c, self.c)
        self.check(result, "cuEventElapsedTime")
        return milliseconds / 1e3

    def done(self, timeout=None):
        """A Work that ends when the recorded point has been reached.

        Args:
            timeout: seconds, None for no deadline.
        """
        cdef CUresult result
        cdef Watch watch
        self.usable()
        watch = new_watch(self, timeout)
        Py_INCREF(watch)
        with nogil:
            result = pn_watch_event(&watch.c, self.device, self.c)
        if result != CUDA_SUCCESS:
            drop(watch)
        self.check(result, "cuEventQuery")
        return watch

    def __await__(self):
        return self.done().__await__()
