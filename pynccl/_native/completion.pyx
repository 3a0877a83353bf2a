"""How the interpreter learns that operations have ended: done list, event loops, reaper.

1. From its submission until it comes out of the done list, the engine room holds a reference to
   an Operation, and the Operation holds its arrays: nobody needs to keep it for its buffers to
   live.
2. A communicator that is dropped is aborted, which gives back the buffers of what has failed
   with it: so an operation that has failed, and stays for its buffers, holds its communicator
   no more. It is told so when the failure is drained, before it can come out of the done list.
3. drain_done is called with the GIL by every issue, every poll, every loop that wakes up, and
   by the reaper thread for what nobody else has drained within 10 ms.
4. Each loop has one eventfd and one mailbox. A wait's token holds its Reactor, so that a
   mailbox outlives every wait that is addressed to it. The mailbox of a loop that was closed
   meanwhile is emptied by drain_done until nothing is addressed to it any more.
"""

from cpython.exc cimport PyErr_WriteUnraisable
from cpython.mem cimport PyMem_Free
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t

from pynccl._native.abi cimport (
    PN_BURST_ENDS_TURN,
    PN_BURST_GOES_ON,
    PN_OK,
    pn_burst_await,
    pn_burst_reset,
    pn_burst_t,
    pn_burst_turn,
    pn_done_some,
    pn_asking_take,
    pn_done_take,
    pn_forked,
    pn_mailbox_free,
    pn_mailbox_new,
    pn_mailbox_take,
    pn_op_t,
    pn_parting_take,
    pn_reaper_stop,
    pn_reaper_wait,
    pn_suspended,
    pn_uneven_t,
    pn_wait_t,
)

import atexit
import threading
import weakref
from asyncio import _get_running_loop

cdef object running_loop = _get_running_loop


cdef class Operation:
    """A native operation, and what owns its buffers until the device is done with them."""

    cdef int failed(self) except -1:
        """It has ended with a failure, and is about to be let go of."""
        return 0

    cdef int asked(self) except -1:
        """Others have told how much comes; it waits for an answer."""
        return 0

    cdef int ended(self) except -1:
        """It has ended well, and is about to be let go of."""
        return 0

    cdef int parted(self) except -1:
        """Its communicator has failed: it must not hold it any longer."""
        return 0


# ---- draining --------------------------------------------------------------------------------

# What was taken from the engine room is nowhere else: an exception amid a list, which may be
# a Ctrl-C, is raised again once the rest has been seen to.

cdef int drain_done() except -1:
    """Let go of everything that the device is done with."""
    cdef pn_op_t *done = pn_done_take()
    # What asks or parts has not been let go of, unless it is on the done list as well: so these
    # come first. They are held before anything else, since that may drain in its turn.
    cdef pn_uneven_t *asking = held_asking(pn_asking_take())
    cdef pn_op_t *parting = held_parting(pn_parting_take())
    cdef object trouble = None
    while asking != NULL or parting != NULL or done != NULL:
        try:
            answer_all(&asking)
            part_all(&parting)
            release_all(&done)
        except BaseException as error:
            trouble = error
    # An operation is put on the done list after its waits into their mailboxes.
    if orphans:
        empty_orphans()
    if trouble is not None:
        raise trouble
    return 0


cdef pn_uneven_t *held_asking(pn_uneven_t *first) noexcept:
    cdef pn_uneven_t *asking = first
    while asking != NULL:
        Py_INCREF(<object>asking.op.owner)
        asking = asking.next
    return first


cdef pn_op_t *held_parting(pn_op_t *first) noexcept:
    cdef pn_op_t *op = first
    while op != NULL:
        Py_INCREF(<object>op.owner)
        op = op.next_parting
    return first


# These move a list on before they do anything that may fail; `held` is a reference of its own.

cdef int answer_all(pn_uneven_t **asking) except -1:
    """Let each operation of a list of asking ones, held for that, answer."""
    cdef Operation held
    while asking[0] != NULL:
        held = <Operation>asking[0].op.owner
        asking[0] = asking[0].next
        Py_DECREF(held)
        held.asked()
    return 0


cdef int part_all(pn_op_t **parting) except -1:
    """Let each operation of a list of parting ones, held for that, leave its communicator."""
    cdef Operation held
    while parting[0] != NULL:
        held = <Operation>parting[0].owner
        parting[0] = parting[0].next_parting
        Py_DECREF(held)
        held.parted()
    return 0


cdef int release_all(pn_op_t **done) except -1:
    """Let go of each operation of a list of those that have ended."""
    cdef Operation held
    cdef pn_op_t *op
    while done[0] != NULL:
        op = done[0]
        done[0] = op.next_done
        held = <Operation>op.owner
        Py_DECREF(held)
        held.keep = None
        held.waits = None
        if op.outcome.source != PN_OK:
            held.failed()
        else:
            held.ended()
    return 0


def _reap():
    """The reaper thread: drains what no issue, poll or loop has come for."""
    while True:
        with nogil:
            again = pn_reaper_wait()
        if not again:
            return
        try:
            drain_done()
            sweep()
        except BaseException:  # nobody else would come for what ends after this
            PyErr_WriteUnraisable(None)


cdef object reaper = None
cdef object starting = threading.Lock()


def start_reaper():
    """Start the reaper thread, with the first communicator of the process."""
    global reaper
    with starting:
        if reaper is None:
            reaper = threading.Thread(target=_reap, name="pynccl-reaper", daemon=True)
            reaper.start()
            atexit.register(stop_reaper)


def stop_reaper():
    """Stop the reaper; at exit, so that no thread runs Python while the interpreter goes."""
    with nogil:
        pn_reaper_stop()


# ---- loops -----------------------------------------------------------------------------------

cdef dict reactors = {}
# Those of closed loops to which waits are still addressed.
cdef list orphans = []


cdef class Reactor:
    """One event loop's side: an eventfd in its selector, and the mailbox behind it."""

    def __cinit__(self, loop):
        self.box = pn_mailbox_new()
        if self.box == NULL:
            raise OSError("no eventfd could be made for the event loop")
        self.loop = weakref.ref(loop)

    def __dealloc__(self):
        # Every wait's token holds a reference to its reactor, so none is left here.
        if self.box != NULL and not pn_forked:
            pn_mailbox_free(self.box)

    cdef int drain_box(self) except -1:
        cdef pn_wait_t *waits
        cdef object trouble = None
        with nogil:
            waits = pn_mailbox_take(self.box)
        loop = self.loop()
        while waits != NULL:
            try:
                self.deliver_all(&waits, loop)
            except BaseException as error:
                trouble = error
        if trouble is not None:
            raise trouble
        return 0

    cdef int deliver_all(self, pn_wait_t **waits, object loop) except -1:
        """Tell each wait of a list that it has ended; to be called again after an exception."""
        cdef pn_wait_t *wait
        closed = loop is None or loop.is_closed()
        mine = not closed and running_loop() is loop
        while waits[0] != NULL:
            wait = waits[0]
            waits[0] = wait.next
            self.waiting -= 1
            if mine:
                pn_suspended(-1)
            token = <tuple>wait.token
            Py_DECREF(token)
            PyMem_Free(wait)
            if not closed:
                self.tell(loop, token)
        return 0

    cdef int tell(self, object loop, tuple token) except -1:
        cdef object trouble = None
        _, work, futures = token
        for future in <list>futures:
            try:
                if type(future) is tuple:
                    work.settle((<tuple>future)[0])
                elif not future.done():
                    future.set_result(None)
            except Exception as error:  # one that cannot be told must not silence the rest
                loop.call_exception_handler(
                    {"message": "a wait could not be told its end", "exception": error}
                )
            except BaseException as error:
                trouble = error
        if trouble is not None:
            raise trouble
        return 0

    def on_readable(self):
        """Called by the loop: deliver everything that has ended since the last time."""
        pn_burst_reset()
        self.drain_box()
        if pn_done_some():
            drain_done()


cdef class Doorbell:
    """What a loop's selector holds: it dies when the loop is closed, and tells so."""

    cdef Reactor reactor

    def __init__(self, Reactor reactor):
        self.reactor = reactor

    def __call__(self):
        self.reactor.on_readable()

    def __del__(self):
        sweep()


def sweep():
    """Forget the loops that were closed."""
    for key, reactor in list(reactors.items()):
        loop = (<Reactor>reactor).loop()
        if loop is None or loop.is_closed():
            if reactors.pop(key, None) is reactor:
                orphans.append(reactor)
    empty_orphans()


cdef int empty_orphans() except -1:
    """Drop what was addressed to closed loops; forget those to which nothing is any more."""
    for reactor in list(orphans):
        (<Reactor>reactor).drain_box()
        if not (<Reactor>reactor).waiting and reactor in orphans:
            orphans.remove(reactor)
    return 0


cdef Reactor reactor_of(object loop):
    found = reactors.get(id(loop))
    if found is not None and (<Reactor>found).loop() is loop:
        return found
    sweep()
    made = Reactor(loop)
    loop.add_reader((<Reactor>made).box.fd, Doorbell(made))
    reactors[id(loop)] = made
    return made


# ---- fairness --------------------------------------------------------------------------------

def loop_has_turned():
    """Called by the loop, once it has been round since a burst of awaits ended."""
    pn_burst_turn()


cdef bint gives_way(int64_t now) except -1:
    """Whether this await of finished work has to let the loop go round first."""
    cdef pn_burst_t burst = pn_burst_await(now)
    if burst == PN_BURST_GOES_ON:
        return False
    if burst == PN_BURST_ENDS_TURN:
        loop = running_loop()
        if loop is None:
            pn_burst_turn()
        else:
            loop.call_soon(loop_has_turned)
    return True
