"""Registered memory and windows: leases on buffers that NCCL has been shown.

1. A Lease is one native registration of one allocation. A buffer of the same allocation that is
   registered again shares it; the last user's end deregisters.
2. Natively a lease is held from its making to its end, so that its buffer lives as long: it is
   let go of by the done list, or by the Work that has failed to make it.
3. Neither the lease nor its native side refers to the communicator's handle: one that is
   dropped without a close is aborted all the same, and what it had registered goes with it.
"""

from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.string cimport memset

from pynccl._native.abi cimport (
    NCCL_WIN_COLL_SYMMETRIC,
    NCCL_WIN_STRICT_ORDERING,
    PN_DEREGISTER,
    PN_FROM_MISSING,
    PN_READY,
    PN_REGISTER,
    pn_control_submit,
    pn_link_init,
    pn_memory_find,
)
from pynccl._native.completion cimport Operation
from pynccl._native.issue cimport Issuer, call_t
from pynccl._native.view cimport view_t
from pynccl._native.work cimport Work, begin_control, control_work

import weakref

from pynccl.errors import InvalidBufferError, NotSupportedError


cdef class Lease(Operation):
    """One native registration."""

    @property
    def work(self):
        """The Work that makes it, while somebody has it; None otherwise."""
        return self.making()

    @property
    def address(self):
        """Where the registered memory begins."""
        return <size_t>self.r.base

    @property
    def nbytes(self):
        """How much is registered, in bytes."""
        return self.r.bytes

    @property
    def window(self):
        """The native window as an int; 0 before it is made, and where there is none."""
        return <size_t>self.r.window


cdef class Making(Work):
    """The Work of a registration."""

    cdef Lease lease

    cdef int parted(self) except -1:
        self.comm.leases.pop(<size_t>&self.lease.r, None)
        return Work.parted(self)

    cdef int failed(self) except -1:
        self.lease.over = True
        if self.comm is not None:
            self.comm.leases.pop(<size_t>&self.lease.r, None)
        Py_DECREF(self.lease)
        return Work.failed(self)

    def make_error(self, int source):
        """Build the exception for an outcome."""
        if source == PN_FROM_MISSING:
            return NotSupportedError(
                f"{self.what()}: ncclCommWindowRegister succeeded and gave no window: this "
                "system has no symmetric memory between the ranks"
            )
        return Work.make_error(self, source)


def register(Issuer comm not None, buffer, bint window, bint strict, timeout):
    """Register the allocation in which a buffer lies.

    Returns:
        The lease, the Work that makes it or None if it is made, and the buffer's offset in it
        in bytes.

    Raises:
        InvalidBufferError: the buffer cannot be registered; nothing was issued.
        NotSupportedError: NCCL is older than 2.19 (2.27 for windows).
    """
    cdef call_t call
    cdef view_t view
    cdef void *base = NULL
    cdef size_t nbytes = 0, offset
    cdef int flags = 0
    cdef Lease lease
    comm.usable()
    comm.engine.require("ncclCommWindowRegister" if window else "ncclCommRegister")
    # Nothing reads the memory now, so its producer's streams do not matter.
    memset(&call, 0, sizeof(call_t))
    call.settled = True
    call.order.on_gpu = comm.engine.is_cuda
    keep = comm.look(&call, buffer, &view, "buffer")
    if view.count * view.itemsize == 0:
        raise InvalidBufferError("buffer has no bytes, so there is nothing to register")
    if not pn_memory_find(comm.c.device, view.data, &base, &nbytes):
        if window and not comm.engine.is_cuda:
            raise InvalidBufferError(
                "buffer cannot be a window: that takes memory from pynccl.empty()"
            )
        base = view.data
        nbytes = view.count * view.itemsize
    if window:
        flags = NCCL_WIN_COLL_SYMMETRIC | (NCCL_WIN_STRICT_ORDERING if strict else 0)
    for lease in comm.leases.values():
        offset = <size_t>base - <size_t>lease.r.base
        if (
            not lease.over and lease.r.is_window == window and lease.r.flags == flags
            and offset < lease.r.bytes and nbytes <= lease.r.bytes - offset
        ):
            lease.uses += 1
            return lease, lease.work, <size_t>view.data - <size_t>lease.r.base
    lease = Lease()
    pn_link_init(&lease.r.in_comm)
    lease.r.lease = &lease.c
    lease.r.base = base
    lease.r.bytes = nbytes
    lease.r.flags = flags
    lease.r.is_window = window
    lease.c.owner = <void *>lease
    lease.keep = keep
    lease.uses = 1
    cdef Making work = Making.__new__(Making)
    begin_control(work, comm, PN_REGISTER, timeout)
    work.keep = work.lease = lease
    work.c.argument = &lease.r
    work.c.nbytes = nbytes
    lease.making = weakref.ref(work)
    comm.leases[<size_t>&lease.r] = lease
    Py_INCREF(lease)
    with nogil:
        pn_control_submit(&work.c)
    return lease, work, <size_t>view.data - <size_t>base


def deregister(Issuer comm not None, Lease lease not None, timeout):
    """End one use of a lease; the Work that ends the last one, or None if none is needed."""
    lease.uses -= 1
    if lease.uses or lease.over:
        return None
    lease.over = True
    comm.leases.pop(<size_t>&lease.r, None)
    if comm.c.state != PN_READY:
        return None  # it goes, or has gone, with the communicator
    cdef Work work = control_work(comm, PN_DEREGISTER, timeout)
    work.keep = lease
    work.c.argument = &lease.r
    with nogil:
        pn_control_submit(&work.c)
    return work
