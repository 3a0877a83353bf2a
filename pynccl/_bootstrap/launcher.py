"""Which rank of how many is this process, and where do the ranks meet? Ask the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pynccl._bootstrap import slurm
from pynccl._bootstrap.address import Mpi, parse, tcp_address
from pynccl.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """A process's place in its job.

    `local_rank` and `local_size` count the processes of the job on this host; None where the
    launcher does not say. `address` is for `join`; None where one is alone. `source` names who
    said so: "arguments", "torchrun", "openmpi", "mpich", "mvapich", "slurm" or "nothing".
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    address: str | None
    source: str


@dataclass(frozen=True)
class _Names:
    """The variables of one launcher; of the local ones the first that is set counts."""

    source: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


_TORCHRUN = _Names("torchrun", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
_MPI = (
    _Names(
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Names(
        "mvapich",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Names(
        "mpich",
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
)
_SLURM = _Names("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_LOCALID",), ())


async def locate(
    address: str,
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    size: int | None = None,
) -> Launch:
    """Return the place of this process for an address as the user wrote it.

    `rank` and `size` that are given win over the environment. `env://` takes the address from
    the launcher too; `mpi://` without a launcher asks mpi4py's COMM_WORLD.

    Raises `ConfigError`.
    """
    meeting = None if address in ("env://", "env:") else parse(address)
    if isinstance(meeting, Mpi) and rank is None and size is None and not _launched(environ):
        from pynccl._bootstrap.mpi import place

        rank, size = await place()
    if rank is not None and size is not None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank={rank} of size={size}: must be 0 <= rank < size")
        launch = _from_arguments(environ, rank, size, needs_address=meeting is None)
    else:
        launch = read_launch(environ, needs_address=meeting is None)
        for name, given, found in (("rank", rank, launch.rank), ("size", size, launch.size)):
            if given is not None and given != found:
                raise ConfigError(
                    f"{name}={given} is given, but {launch.source} says {found}; "
                    "give both rank and size, or neither"
                )
    if meeting is not None:
        launch = replace(launch, address=address if launch.size > 1 else None)
    return launch


def read_launch(environ: Mapping[str, str], *, needs_address: bool = True) -> Launch:
    """Return what the launcher wrote into the environment; rank 0 of 1 where there was none.

    RANK wins, then MPI's variables, then Slurm's. Raises `ConfigError` that shows the variables
    and their values where they are incomplete or contradict each other.
    """
    if "RANK" in environ:
        return _torchrun(environ, needs_address)
    for names in _MPI:
        if names.rank in environ:
            if names.source == "mpich" and _srun_agrees(environ):
                break
            return _mpi(environ, names)
    if _under_srun(environ):
        return _slurm(environ)
    stray = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if any(name in environ for name in stray):
        raise ConfigError(
            f"RANK is not set, but {_show(environ, *stray)}; "
            "set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or none to run alone"
        )
    return Launch(0, 1, 0, 1, None, "nothing")


def _launched(environ: Mapping[str, str]) -> bool:
    ranks = ("RANK", *(names.rank for names in _MPI))
    return any(name in environ for name in ranks) or _under_srun(environ)


def _from_arguments(
    environ: Mapping[str, str], rank: int, size: int, *, needs_address: bool
) -> Launch:
    address = None
    if needs_address and size > 1:
        if not _launched(environ):  # MASTER_ADDR and MASTER_PORT alone are enough here
            address = _master(environ, None)
        else:
            address = read_launch(environ).address
        if address is None:
            raise ConfigError(
                f"rank={rank} and size={size} are given, but no address: "
                "give tcp://host:port, or set MASTER_ADDR and MASTER_PORT"
            )
    local_rank = local_size = None
    if _launched(environ):
        found = read_launch(environ, needs_address=False)
        local_rank, local_size = found.local_rank, found.local_size
    elif "LOCAL_RANK" in environ:
        local_rank, local_size = _local(environ, _TORCHRUN)
    return Launch(rank, size, local_rank, local_size, address, "arguments")


# one function a launcher


def _torchrun(environ: Mapping[str, str], needs_address: bool) -> Launch:
    rank, size = _rank_and_size(environ, _TORCHRUN)
    local_rank, local_size = _local(environ, _TORCHRUN)
    if local_rank is None:
        local_rank, local_size = _borrowed_local(environ, rank, size)
    address = None
    if size > 1 and needs_address:
        address = _master(environ, _attempt(environ))
        if address is None:
            raise ConfigError(
                f"{_show(environ, 'RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')}; "
                "MASTER_ADDR and MASTER_PORT are needed to meet the other ranks"
            )
    return Launch(rank, size, local_rank, local_size, address, "torchrun")


def _mpi(environ: Mapping[str, str], names: _Names) -> Launch:
    rank, size = _rank_and_size(environ, names)
    local_rank, local_size = _local(environ, names)
    address = None if size == 1 else _master(environ, None) or "mpi://"
    return Launch(rank, size, local_rank, local_size, address, names.source)


def _slurm(environ: Mapping[str, str]) -> Launch:
    names = _slurm_names(environ)
    rank, size = _rank_and_size(environ, names)
    local_rank, _ = _local(environ, names)
    local_size = None
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if counts and "SLURM_NODEID" in environ:
        local_size = slurm.tasks_on_node(counts, _integer(environ, "SLURM_NODEID"))
    address = None
    if size > 1:
        address = _slurm_address(environ)
    return Launch(rank, size, local_rank, local_size, address, "slurm")


def _slurm_address(environ: Mapping[str, str]) -> str:
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        found = _master(environ, None)
        assert found is not None
        return found
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    host = environ.get("MASTER_ADDR") or (slurm.first_node(nodes) if nodes else None)
    if not job or not host:
        wanted = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
        raise ConfigError(f"cannot tell where rank 0 runs: {_show(environ, *wanted)}")
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or "0"
    restart = environ.get("SLURM_RESTART_COUNT", "0")
    if "MASTER_PORT" in environ:
        port = _integer(environ, "MASTER_PORT")
    else:
        port = slurm.port(job, step)
    return tcp_address(host, port, f"slurm-{job}-{step}-{restart}")


# reading variables


def _rank_and_size(environ: Mapping[str, str], names: _Names) -> tuple[int, int]:
    if names.size not in environ:
        raise ConfigError(f"{_show(environ, names.rank, names.size)}: both are needed")
    rank, size = _integer(environ, names.rank), _integer(environ, names.size)
    if not 0 <= rank < size:
        raise ConfigError(
            f"{_show(environ, names.rank, names.size)}: the rank must be 0 to {size - 1}"
        )
    if names is not _TORCHRUN and "WORLD_SIZE" in environ:
        other = _integer(environ, "WORLD_SIZE")
        if other != size:
            raise ConfigError(
                f"{_show(environ, names.size, 'WORLD_SIZE')} contradict each other; "
                "unset WORLD_SIZE, or set RANK too"
            )
    return rank, size


def _local(environ: Mapping[str, str], names: _Names) -> tuple[int | None, int | None]:
    rank_name = next((name for name in names.local_rank if name in environ), None)
    size_name = next((name for name in names.local_size if name in environ), None)
    rank = _integer(environ, rank_name) if rank_name else None
    size = _integer(environ, size_name) if size_name else None
    if rank_name and (rank is None or rank < 0 or (size is not None and rank >= size)):
        shown = _show(environ, rank_name, *([size_name] if size_name else []))
        raise ConfigError(f"{shown}: the local rank is out of range")
    return rank, size


def _borrowed_local(
    environ: Mapping[str, str], rank: int, size: int
) -> tuple[int | None, int | None]:
    """Find the local rank for RANK and WORLD_SIZE that were set from another launcher's."""
    for names in _MPI:
        if names.rank in environ and _rank_and_size(environ, names) == (rank, size):
            return _local(environ, names)
    if _under_srun(environ):
        names = _slurm_names(environ)
        if names.size in environ and _rank_and_size(environ, names) == (rank, size):
            return _local(environ, names)
    return None, None


def _slurm_names(environ: Mapping[str, str]) -> _Names:
    if _SLURM.size in environ:
        return _SLURM
    return replace(_SLURM, size="SLURM_NTASKS")


def _under_srun(environ: Mapping[str, str]) -> bool:
    # A batch script has SLURM_PROCID=0 and the job's SLURM_NTASKS as well, but it is one
    # process; only a step that srun started has a step id.
    step = "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ
    return step and "SLURM_PROCID" in environ


def _srun_agrees(environ: Mapping[str, str]) -> bool:
    """Tell whether srun itself set PMI's variables: then mpi4py is not needed."""
    if not _under_srun(environ):
        return False
    names = _slurm_names(environ)
    pairs = ((names.rank, "PMI_RANK"), (names.size, "PMI_SIZE"))
    return all(environ.get(ours) == environ.get(theirs) for ours, theirs in pairs)


def _master(environ: Mapping[str, str], attempt: str | None) -> str | None:
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not host and not port:
        return None
    if not host or not port:
        raise ConfigError(f"{_show(environ, 'MASTER_ADDR', 'MASTER_PORT')}: both are needed")
    number = _integer(environ, "MASTER_PORT")
    if not 0 < number < 65536:
        raise ConfigError(f"{_show(environ, 'MASTER_PORT')}: a port is 1 to 65535")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and attempt is not None:
        return tcp_address(host, number, attempt, scheme="store")
    return tcp_address(host, number, attempt or "")


def _attempt(environ: Mapping[str, str]) -> str | None:
    run = environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return None
    safe = "".join(char if char.isalnum() or char in "-._" else "_" for char in run)
    return f"{safe}-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(f"{name}={environ[name]!r} is not a whole number") from None


def _show(environ: Mapping[str, str], *names: str) -> str:
    return ", ".join(
        f"{name}={environ[name]!r}" if name in environ else f"{name} is not set"
        for name in names
    )
