"""Settings of one collective call: ``ncclCollConfig_t`` by name.

NCCL checks them locally and expects the same on every rank. A call with settings goes through
the lane, since it may choose an algorithm that no call has used before.
"""

from libc.stdint cimport uint64_t
from libc.string cimport memset

from pynccl._native.abi cimport (
    NCCL_ABI_VERSION,
    NCCL_API_MAGIC,
    NCCL_CONFIG_UNDEF_INT,
    PN_ALL_GATHER,
    PN_ALL_REDUCE,
    PN_ALL_TO_ALL,
    PN_BROADCAST,
    PN_GATHER,
    PN_REDUCE,
    PN_REDUCE_SCATTER,
    PN_SCATTER,
    ncclCollConfig_t,
)
from pynccl._native.handles cimport CommHandle
from pynccl._native.work cimport Work

from collections.abc import Mapping
from operator import index

from pynccl.errors import ConfigError

cdef dict FUNCTIONS = {
    PN_ALL_REDUCE: "ncclAllReduceConfig",
    PN_REDUCE: "ncclReduceConfig",
    PN_BROADCAST: "ncclBroadcastConfig",
    PN_ALL_GATHER: "ncclAllGatherConfig",
    PN_REDUCE_SCATTER: "ncclReduceScatterConfig",
    PN_ALL_TO_ALL: "ncclAlltoAllConfig",
    PN_GATHER: "ncclGatherConfig",
    PN_SCATTER: "ncclScatterConfig",
}
CALL_SETTINGS = (
    "min_ctas", "max_ctas", "nvls_ctas", "cga_cluster_size", "cta_policy", "algorithm",
    "force_algorithm", "profiler_tag",
)


cdef class CallConfig:
    """The native block, which lives as long as its operation."""

    cdef ncclCollConfig_t c
    cdef bytes algorithm

    def __cinit__(self):
        memset(&self.c, 0, sizeof(ncclCollConfig_t))
        self.c.size = sizeof(ncclCollConfig_t)
        self.c.magic = NCCL_API_MAGIC
        self.c.version = NCCL_ABI_VERSION
        self.c.minCTAs = self.c.maxCTAs = self.c.nvlsCTAs = NCCL_CONFIG_UNDEF_INT
        self.c.cgaClusterSize = self.c.CTAPolicy = NCCL_CONFIG_UNDEF_INT
        self.c.forceAlgSelection = 1

    cdef int fill(self, object config) except -1:
        if not isinstance(config, Mapping):
            raise ConfigError(f"config must be a mapping of settings, not {config!r}")
        for name, value in config.items():
            if name not in CALL_SETTINGS:
                raise ConfigError(
                    f"a call has no setting {name!r}; it has {', '.join(CALL_SETTINGS)}"
                )
            if name == "algorithm":
                if not isinstance(value, str):
                    raise ConfigError(f"call setting algorithm must be text, not {value!r}")
                self.algorithm = value.encode()
                self.c.algSelection = self.algorithm
            elif name == "force_algorithm":
                self.c.forceAlgSelection = bounded(name, value, 0, 1)
            elif name == "profiler_tag":
                # NCCL keeps the upper half for tags of its own.
                self.c.userProfilerTag = <uint64_t>bounded(name, value, 0, 2**63 - 1)
            elif name == "cta_policy":
                self.c.CTAPolicy = bounded(name, value, 0, 3)
            elif name == "min_ctas":
                self.c.minCTAs = bounded(name, value, 1, 64)
            elif name == "max_ctas":
                self.c.maxCTAs = bounded(name, value, 1, 64)
            elif name == "nvls_ctas":
                self.c.nvlsCTAs = bounded(name, value, 1, 64)
            else:
                self.c.cgaClusterSize = bounded(name, value, 0, 8)
        if self.c.minCTAs > self.c.maxCTAs and self.c.maxCTAs != NCCL_CONFIG_UNDEF_INT:
            raise ConfigError(
                f"call setting min_ctas ({self.c.minCTAs}) is over max_ctas ({self.c.maxCTAs})"
            )
        return 0


cdef object bounded(str name, object value, object least, object most):
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise ConfigError(
            f"call setting {name} must be an integer from {least} to {most}, not {value!r}"
        )
    return number


cdef object configured(CommHandle comm, Work work, object config):
    """Have an operation carry settings; what is returned holds them.

    Raises:
        ConfigError: there is no such setting, or no such value.
        NotSupportedError: NCCL is older than 2.31.
    """
    cdef CallConfig made = CallConfig()
    comm.engine.require(FUNCTIONS[work.c.kind])
    made.fill(config)
    work.c.config = &made.c
    work.c.may_wait = True
    return made
