"""Engines: libnccl with libcuda, the host engine, the no-op engine; each a table of functions.

An engine is opened once, at the first use of a device of its kind, and stays open: other
threads may be inside it. A result becomes an exception here and nowhere else.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize

from pynccl._native.abi cimport (
    CUDA_SUCCESS,
    CUdevice,
    CUuuid,
    ncclUniqueId,
    pn_device_get,
    pn_device_t,
    pn_engine_open,
    pn_engine_path,
    pn_engine_symbol,
    pn_forked,
    pn_live_watch_fork,
    pn_nccl_since,
    pn_outcome_t,
)

from pynccl import errors
from pynccl.types import RESULTS

_BY_RESULT = {
    1: errors.CudaError,
    2: errors.SystemCallError,
    3: errors.InternalError,
    4: errors.ConfigError,
    5: errors.UsageError,
    6: errors.RemoteError,
    8: errors.DeadlineError,
}
_MISMATCH = "mismatch: "


cdef object nccl_exception(int result, str function, str what, str detail):
    """The exception for an `ncclResult_t`: what failed, its name, the library's own words."""
    cls = _BY_RESULT.get(result, errors.NcclError)
    name = RESULTS[result] if 0 <= result < len(RESULTS) else f"result {result}"
    if detail.startswith(_MISMATCH):
        # The host engine's strict mode compares what NCCL never does.
        cls = errors.MismatchError
        detail = detail[len(_MISMATCH):]
    message = f"{what}: {function} returned {name} ({result})"
    if detail:
        message += f": {detail}"
    error = cls(message)
    error.function = function
    error.result = result
    return error


cdef object cuda_exception(Engine engine, int result, str function, str what):
    """The exception for a `CUresult`, with the driver's name and text for it."""
    cdef const char *name = NULL
    cdef const char *text = NULL
    with nogil:
        engine.c.cuda.cuGetErrorName(<CUresult>result, &name)
        engine.c.cuda.cuGetErrorString(<CUresult>result, &text)
    shown = name.decode() if name != NULL else "an unknown error"
    words = text.decode() if text != NULL else ""
    error = errors.CudaError(f"{what}: {function} returned {shown} ({result}): {words}")
    error.function = function
    error.result = result
    return error


cdef int check_nccl(Engine engine, ncclResult_t result, const char *function) except -1:
    cdef const char *detail
    if result == 0:
        return 0
    with nogil:
        detail = engine.c.nccl.ncclGetLastError(NULL)
    raise nccl_exception(
        result, function.decode(), engine.name, detail.decode(errors="replace")
    )


cdef int check_cuda(Engine engine, CUresult result, const char *function) except -1:
    if result == CUDA_SUCCESS:
        return 0
    raise cuda_exception(engine, result, function.decode(), engine.name)


cdef class Engine:
    """A loaded pair of libraries.

    Args:
        name: what messages call it: ``"nccl"``, ``"host"`` or ``"noop"``.
        nccl_path, cuda_path: the files; they may be the same.
        is_cuda: whether its arrays live on GPUs.

    Raises:
        NotSupportedError: a library cannot be loaded or lacks a required function; the message
            has the loader's own words.
    """

    def __cinit__(self, str name, str nccl_path, str cuda_path, bint is_cuda):
        cdef char why[512]
        cdef bytes nccl = nccl_path.encode()
        cdef bytes cuda = cuda_path.encode()
        cdef const char *nccl_c = nccl
        cdef const char *cuda_c = cuda
        cdef pn_engine_t *engine
        why[0] = 0
        with nogil:
            engine = pn_engine_open(nccl_c, cuda_c, why, sizeof(why))
        if engine == NULL:
            raise errors.NotSupportedError(
                f"the {name} engine cannot be loaded: {(<bytes>why).decode()}"
            )
        pn_live_watch_fork()
        self.c = engine
        self.name = name
        self.is_cuda = is_cuda

    @property
    def version(self):
        """NCCL's version code, as ``ncclGetVersion`` gives it: 23203 is 2.32.3."""
        return self.c.nccl_version

    @property
    def driver_version(self):
        """The CUDA driver's version, as ``cuDriverGetVersion`` gives it: 13000 is 13.0."""
        return self.c.driver_version

    def path(self, str function):
        """The file from which a function was taken, or None if the library lacks it."""
        cdef bytes name = function.encode()
        cdef const char *found = pn_engine_path(self.c, name)
        return None if found == NULL else found.decode()

    def has(self, str function):
        """Whether the loaded library has the function."""
        cdef bytes name = function.encode()
        return pn_engine_symbol(self.c, name) != NULL

    def require(self, str function):
        """Raise NotSupportedError, naming the first release, unless the library has it."""
        if self.has(function):
            return
        cdef bytes name = function.encode()
        cdef int since = pn_nccl_since(name)
        cdef int loaded = self.c.nccl_version
        first = f"{since // 10000}.{since // 100 % 100}"
        if since % 100:
            first += f".{since % 100}"
        here = f"{loaded // 10000}.{loaded // 100 % 100}.{loaded % 100}"
        needs = f"needs NCCL {first}" if since else "is not known here"
        raise errors.NotSupportedError(f"{function} {needs}, loaded is {here}")

    cdef int usable(self) except -1:
        """Raise in the child of a process that has opened the engine."""
        if pn_forked:
            raise errors.UsageError(
                f"the {self.name} engine was opened before a fork: neither CUDA nor NCCL can "
                "be used in the child; start it with the spawn method"
            )
        return 0

    def unique_id(self):
        """128 fresh bytes for one communicator (``ncclGetUniqueId``).

        The calling process must live until every rank has been initialised; an id serves once.
        """
        cdef ncclUniqueId made
        cdef ncclResult_t result
        self.usable()
        with nogil:
            result = self.c.nccl.ncclGetUniqueId(&made)
        check_nccl(self, result, b"ncclGetUniqueId")
        return PyBytes_FromStringAndSize(made.internal, 128)

    def parameter(self, str key):
        """A library parameter's value as text (``ncclParamGetParameter``, NCCL 2.30)."""
        self.require("ncclParamGetParameter")
        cdef bytes name = key.encode()
        cdef const char *name_c = name
        cdef const char *value = NULL
        cdef int length = 0
        cdef ncclResult_t result
        with nogil:
            result = self.c.nccl.ncclParamGetParameter(name_c, &value, &length)
        check_nccl(self, result, b"ncclParamGetParameter")
        return value.decode() if value != NULL else ""

    def device_count(self):
        """How many devices there are (``cuDeviceGetCount``); initialises the driver."""
        cdef int count = 0
        cdef CUresult result
        self.usable()
        with nogil:
            result = self.c.cuda.cuInit(0)
            if result == CUDA_SUCCESS:
                result = self.c.cuda.cuDeviceGetCount(&count)
        check_cuda(self, result, b"cuDeviceGetCount")
        return count

    def device_identity(self, int ordinal):
        """A device's UUID, PCI bus id and name, which tell ranks apart before they start."""
        cdef CUdevice device
        cdef CUuuid uuid
        cdef char bus[32]
        cdef char name[128]
        cdef CUresult result
        bus[0] = name[0] = 0
        with nogil:
            result = self.c.cuda.cuInit(0)
            if result == CUDA_SUCCESS:
                result = self.c.cuda.cuDeviceGet(&device, ordinal)
            if result == CUDA_SUCCESS:
                result = self.c.cuda.cuDeviceGetUuid_v2(&uuid, device)
            if result == CUDA_SUCCESS:
                self.c.cuda.cuDeviceGetPCIBusId(bus, 32, device)
                self.c.cuda.cuDeviceGetName(name, 128, device)
        check_cuda(self, result, b"cuDeviceGetUuid")
        return PyBytes_FromStringAndSize(uuid.bytes, 16).hex(), bus.decode(), name.decode()

    cdef pn_device_t *device(self, int ordinal) except NULL:
        cdef pn_outcome_t why
        cdef pn_device_t *found
        self.usable()
        with nogil:
            found = pn_device_get(self.c, ordinal, &why)
        if found == NULL:
            raise cuda_exception(
                self, why.code, why.function.decode(), f"{self.name} device {ordinal}"
            )
        return found
