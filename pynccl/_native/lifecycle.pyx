"""A communicator's beginning and end as Works; its configuration; what is alive."""

from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from pynccl._native.abi cimport (
    NCCL_ABI_VERSION,
    NCCL_API_MAGIC,
    NCCL_CONFIG_UNDEF_INT,
    NCCL_SPLIT_NOCOLOR,
    PN_ABORT,
    PN_CLOSE,
    PN_INIT,
    PN_SPLIT,
    ncclConfig_t,
    pn_abort,
    pn_comm_t,
    pn_control_submit,
    pn_control_t,
    pn_depth_repairs,
    pn_launch_blocking,
    pn_live_read,
    pn_live_t,
)
from pynccl._native.handles cimport default_timeout_ns
from pynccl._native.uneven cimport UnevenOperations
from pynccl._native.work cimport Work, control_work

from operator import index

from pynccl._native.completion import start_reaper
from pynccl.errors import ConfigError, UsageError

cdef ncclConfig_t layout


cdef size_t offset(const int *member) noexcept:
    """Where a member of `layout` lies in an ncclConfig_t."""
    return <const char *>member - <const char *>&layout


# Public names of the configuration's integers, and where they lie.
CONFIG_FIELDS = {
    "cga_cluster_size": offset(&layout.cgaClusterSize),
    "min_ctas": offset(&layout.minCTAs),
    "max_ctas": offset(&layout.maxCTAs),
    "split_share": offset(&layout.splitShare),
    "traffic_class": offset(&layout.trafficClass),
    "collnet_enable": offset(&layout.collnetEnable),
    "cta_policy": offset(&layout.CTAPolicy),
    "nvls_ctas": offset(&layout.nvlsCTAs),
    "graph_usage_mode": offset(&layout.graphUsageMode),
}


cdef int whole(object value, str name) except? -1:
    """An int as C has it; no float, and no text that happens to look like one."""
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or not -2**31 <= number < 2**31:
        raise ConfigError(f"{name} must be an integer of 32 bits, not {value!r}")
    return number


cdef class Control:
    """The native block of a control operation, which the operation's Work keeps alive."""

    cdef pn_control_t c
    cdef ncclConfig_t config
    cdef bytes net_name
    cdef bytes comm_name

    def __cinit__(self, config=None):
        memset(&self.c, 0, sizeof(pn_control_t))
        cdef ncclConfig_t *made = &self.config
        memset(made, 0, sizeof(ncclConfig_t))
        made.size = sizeof(ncclConfig_t)
        made.magic = NCCL_API_MAGIC
        made.version = NCCL_ABI_VERSION
        # Every lane is a thread of its own, so that the blocking kind never blocks anybody.
        made.blocking = 1
        made.cgaClusterSize = made.minCTAs = made.maxCTAs = NCCL_CONFIG_UNDEF_INT
        made.splitShare = made.trafficClass = made.collnetEnable = NCCL_CONFIG_UNDEF_INT
        made.CTAPolicy = made.shrinkShare = made.nvlsCTAs = NCCL_CONFIG_UNDEF_INT
        made.nChannelsPerNetPeer = made.nvlinkCentricSched = NCCL_CONFIG_UNDEF_INT
        made.graphUsageMode = made.numRmaCtx = made.maxP2pPeers = NCCL_CONFIG_UNDEF_INT
        made.graphStreamOrdering = made.launchOrderImplicit = NCCL_CONFIG_UNDEF_INT
        made.numRmaSig = made.rmaEagerInit = made.hostCftMode = NCCL_CONFIG_UNDEF_INT
        made.nvlsHostMode = NCCL_CONFIG_UNDEF_INT
        self.c.config = made
        if config is not None:
            self.fill(dict(config))

    def fill(self, dict config):
        """Take the user's settings, by their public names."""
        cdef ncclConfig_t *made = &self.config
        if "min_ctas" in config and "max_ctas" not in config:
            # Releases up to 2.30.7 compare a lone minCTAs with an unset maxCTAs, and refuse it.
            config["max_ctas"] = max(64, whole(config["min_ctas"], "config setting min_ctas"))
        for name, value in config.items():
            if name == "net_name":
                self.net_name = str(value).encode()
                made.netName = self.net_name
                continue
            if name == "comm_name":
                self.comm_name = str(value).encode()
                made.commName = self.comm_name
                continue
            if name not in CONFIG_FIELDS:
                known = ", ".join(sorted([*CONFIG_FIELDS, "net_name", "comm_name"]))
                raise ConfigError(f"config has no setting {name!r}; it has {known}")
            number = whole(value, f"config setting {name}")
            (<int *>(<char *>made + <size_t>CONFIG_FIELDS[name]))[0] = number


def check_config(config):
    """Raise ConfigError if a communicator's settings, or the process's, could not be used."""
    Control(config)
    default_timeout_ns()


cdef class Lifecycle(UnevenOperations):
    """A communicator that can be brought up, split and ended; behind Communicator."""

    # NCCL keeps the pointer to the communicator's name, so the block that owns it stays.
    cdef object name_kept

    def _native_init(self, bytes unique_id not None, config, timeout):
        """Join the clique of a unique id (``ncclCommInitRankConfig``); a Work."""
        if len(unique_id) != 128:
            raise ConfigError(f"a unique id has 128 bytes, not {len(unique_id)}")
        cdef Control control = Control(config)
        cdef const char *raw = unique_id
        start_reaper()
        self.settle_here()
        self.name_kept = control
        memcpy(control.c.id.internal, raw, 128)
        cdef Work work = control_work(self, PN_INIT, timeout)
        work.keep = control
        work.c.argument = &control.c
        with nogil:
            pn_control_submit(&work.c)
        return work

    def _native_split(self, Lifecycle child, color, int key, config, timeout):
        """Fill `child`, a blank handle on the same device (``ncclCommSplit``); a Work."""
        self.usable()
        cdef Control control = Control(config)
        if config is None:
            control.c.config = NULL  # a child without a configuration takes its parent's
        child.settle_here()
        child.name_kept = control
        control.c.child = child.c
        control.c.color = NCCL_SPLIT_NOCOLOR if color is None else whole(color, "color")
        if color is not None and control.c.color < 0:
            raise ConfigError(f"color must be a number from 0 on, or None, not {color!r}")
        control.c.key = key
        cdef Work work = control_work(self, PN_SPLIT, timeout)
        # The child keeps the block: if the block kept the child, it would die with the next
        # garbage collection only, and what it has on the device would stay until then.
        work.keep = control, child
        work.control = control
        work.c.argument = &control.c
        with nogil:
            pn_control_submit(&work.c)
        return work

    def _native_close(self, timeout):
        """Finalize and destroy (``ncclCommFinalize``, ``ncclCommDestroy``); a Work."""
        cdef Work work = control_work(self, PN_CLOSE, timeout)
        with nogil:
            pn_control_submit(&work.c)
        return work


def split_member(Work work):
    """Whether a split that has ended gave this rank a communicator."""
    return (<Control>work.control).c.member


def abort_all(list comms, timeout, bound):
    """Abort several communicators in one native group (``ncclCommAbort``); a Work.

    Args:
        comms: communicators; those that are closed already are left out.
        timeout: seconds after which the Work gives up.
        bound: seconds to wait for threads that are inside a call before the handles are
            abandoned.
    """
    cdef int count = len(comms), i
    cdef int64_t bound_ns = int(bound * 1e9)
    if not count:
        raise UsageError("there is nothing to abort")
    cdef pn_comm_t **raw = <pn_comm_t **>malloc(count * sizeof(pn_comm_t *))
    if raw == NULL:
        raise MemoryError
    for i in range(count):
        raw[i] = (<Lifecycle>comms[i]).c
    cdef Work work = control_work(comms[0], PN_ABORT, timeout)
    work.keep = comms
    with nogil:
        pn_abort(raw, count, &work.c, bound_ns)
    free(raw)
    return work


def live():
    """Counts of live native objects, and of what had to be given up."""
    cdef pn_live_t counts
    pn_live_read(&counts)
    return {
        "operations": counts.operations,
        "communicators": counts.communicators,
        "streams": counts.streams,
        "events": counts.events,
        "gates": counts.gates,
        "lanes": counts.lanes,
        "aborts_running": counts.helpers,
        "event_loops": counts.mailboxes,
        "allocations": counts.memory,
        "registrations": counts.registrations,
        "operators": counts.operators,
        "abandoned_communicators": counts.abandoned_communicators,
        "stuck_threads": counts.stuck_threads,
        "group_depth_repairs": pn_depth_repairs,
    }


def set_launch_blocking(bint on):
    """Send all through the lanes: CUDA_LAUNCH_BLOCKING makes each launch wait for its end."""
    global pn_launch_blocking
    pn_launch_blocking = on  # no-cython-lint
