"""Launchers: what their variables mean, one by one and where they meet."""

from __future__ import annotations

import asyncio

import pytest

from pynccl._bootstrap import Launch, locate, read_launch, slurm
from pynccl.errors import ConfigError

MASTER = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    **MASTER,
}
ELASTIC = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "job 7", "TORCHELASTIC_RESTART_COUNT": "2"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MVAPICH = {name.replace("OMPI_", "MV2_"): value for name, value in OPENMPI.items()}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST": "gpu[01-08]",
}
SLURM_ADDRESS = f"tcp://gpu07:{slurm.port('1234', '2')}/slurm-1234-2-0"


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


PLACES = {
    "nothing": ({}, Launch(0, 1, 0, 1, None, "nothing")),
    "torchrun": (TORCHRUN, Launch(5, 8, 1, 4, "tcp://node1:29500", "torchrun")),
    "torchrun, restarted": (
        ELASTIC,
        Launch(5, 8, 1, 4, "tcp://node1:29500/job_7-2", "torchrun"),
    ),
    "torchrun with its own store": (
        {**ELASTIC, "TORCHELASTIC_USE_AGENT_STORE": "True"},
        Launch(5, 8, 1, 4, "store://node1:29500/job_7-2", "torchrun"),
    ),
    "torchrun, IPv6": (
        {**TORCHRUN, "MASTER_ADDR": "fd00::1"},
        Launch(5, 8, 1, 4, "tcp://[fd00::1]:29500", "torchrun"),
    ),
    "set by hand, no local rank": (
        without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        Launch(5, 8, None, None, "tcp://node1:29500", "torchrun"),
    ),
    "set by hand, one rank": (
        {"RANK": "0", "WORLD_SIZE": "1"},
        Launch(0, 1, None, None, None, "torchrun"),
    ),
    "set by hand from Open MPI": (
        {"RANK": "3", "WORLD_SIZE": "4", **MASTER, **OPENMPI},
        Launch(3, 4, 1, 2, "tcp://node1:29500", "torchrun"),
    ),
    "set by hand from Slurm": (
        {"RANK": "5", "WORLD_SIZE": "7", **MASTER, **SLURM},
        Launch(5, 7, 1, None, "tcp://node1:29500", "torchrun"),
    ),
    "RANK wins over Open MPI": (
        {**TORCHRUN, **OPENMPI},
        Launch(5, 8, 1, 4, "tcp://node1:29500", "torchrun"),
    ),
    "Open MPI": (OPENMPI, Launch(3, 4, 1, 2, "mpi://", "openmpi")),
    "Open MPI with a master": (
        {**OPENMPI, **MASTER},
        Launch(3, 4, 1, 2, "tcp://node1:29500", "openmpi"),
    ),
    "Open MPI, one rank": (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        Launch(0, 1, None, None, None, "openmpi"),
    ),
    "Open MPI under Slurm": (
        {**OPENMPI, **SLURM},
        Launch(3, 4, 1, 2, "mpi://", "openmpi"),
    ),
    "MVAPICH": (MVAPICH, Launch(3, 4, 1, 2, "mpi://", "mvapich")),
    "MPICH": (MPICH, Launch(3, 4, 1, 2, "mpi://", "mpich")),
    "Cray PALS": (PALS, Launch(3, 4, 1, 2, "mpi://", "mpich")),
    "MPICH's mpiexec under Slurm": (
        {**MPICH, **SLURM},
        Launch(3, 4, 1, 2, "mpi://", "mpich"),
    ),
    "srun --mpi=pmi2": (
        {"PMI_RANK": "5", "PMI_SIZE": "7", **SLURM},
        Launch(5, 7, 1, 3, SLURM_ADDRESS, "slurm"),
    ),
    "Slurm": (SLURM, Launch(5, 7, 1, 3, SLURM_ADDRESS, "slurm")),
    "Slurm, only the job's variables": (
        without(
            SLURM, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
        ),
        Launch(5, 7, 1, None, SLURM_ADDRESS.replace("gpu07", "gpu01"), "slurm"),
    ),
    "Slurm, requeued": (
        {**SLURM, "SLURM_RESTART_COUNT": "3"},
        Launch(5, 7, 1, 3, SLURM_ADDRESS[:-1] + "3", "slurm"),
    ),
    "Slurm with a master": (
        {**SLURM, **MASTER},
        Launch(5, 7, 1, 3, "tcp://node1:29500", "slurm"),
    ),
    "Slurm with a master's name only": (
        {**SLURM, "MASTER_ADDR": "head"},
        Launch(5, 7, 1, 3, SLURM_ADDRESS.replace("gpu07", "head"), "slurm"),
    ),
    "Slurm and WORLD_SIZE that agree": (
        {**SLURM, "WORLD_SIZE": "7"},
        Launch(5, 7, 1, 3, SLURM_ADDRESS, "slurm"),
    ),
    "a batch script of Slurm's, which is one process": (
        without(SLURM, "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"),
        Launch(0, 1, 0, 1, None, "nothing"),
    ),
}


@pytest.mark.parametrize(("environ", "launch"), PLACES.values(), ids=PLACES)
def test_what_the_environment_says(environ: dict[str, str], launch: Launch) -> None:
    assert read_launch(environ) == launch


ERRORS = {
    "no size": ({"RANK": "0"}, ["RANK='0'", "WORLD_SIZE is not set"]),
    "no rank": ({"WORLD_SIZE": "4"}, ["RANK is not set", "WORLD_SIZE='4'"]),
    "only a master": (MASTER, ["RANK is not set", "MASTER_ADDR='node1'"]),
    "no master": (
        without(TORCHRUN, "MASTER_ADDR", "MASTER_PORT"),
        ["MASTER_ADDR is not set", "MASTER_PORT is not set", "RANK='5'"],
    ),
    "half a master": (
        without(TORCHRUN, "MASTER_PORT"),
        ["MASTER_ADDR='node1'", "MASTER_PORT is not set"],
    ),
    "rank too large": ({**TORCHRUN, "RANK": "8"}, ["RANK='8'", "WORLD_SIZE='8'", "0 to 7"]),
    "rank negative": ({**TORCHRUN, "RANK": "-1"}, ["RANK='-1'"]),
    "no number": ({**TORCHRUN, "RANK": "two"}, ["RANK='two' is not a whole number"]),
    "port out of range": ({**TORCHRUN, "MASTER_PORT": "70000"}, ["MASTER_PORT='70000'"]),
    "local rank too large": (
        {**TORCHRUN, "LOCAL_RANK": "4"},
        ["LOCAL_RANK='4'", "LOCAL_WORLD_SIZE='4'"],
    ),
    "MPI without a size": ({"PMI_RANK": "1"}, ["PMI_RANK='1'", "PMI_SIZE is not set"]),
    "MPI and WORLD_SIZE disagree": (
        {**OPENMPI, "WORLD_SIZE": "8"},
        ["OMPI_COMM_WORLD_SIZE='4'", "WORLD_SIZE='8'", "contradict"],
    ),
    "Slurm and WORLD_SIZE disagree": (
        {**SLURM, "WORLD_SIZE": "8"},
        ["SLURM_STEP_NUM_TASKS='7'", "WORLD_SIZE='8'", "contradict"],
    ),
    "Slurm without nodes": (
        without(SLURM, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        ["SLURM_STEP_NODELIST is not set"],
    ),
    "Slurm without a size": (
        without(SLURM, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ["SLURM_PROCID='5'", "SLURM_NTASKS is not set"],
    ),
}


@pytest.mark.parametrize(("environ", "parts"), ERRORS.values(), ids=ERRORS)
def test_what_is_wrong_is_shown_with_names_and_values(
    environ: dict[str, str], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_launch(environ)
    for part in parts:
        assert part in str(caught.value)


# locate: address and arguments on top


def place(address: str, environ: dict[str, str], **given: int) -> Launch:
    return asyncio.run(locate(address, environ, **given))


def test_env_takes_everything_from_the_launcher() -> None:
    assert place("env://", TORCHRUN) == read_launch(TORCHRUN)
    assert place("env://", {}) == read_launch({})


def test_another_address_takes_only_the_place() -> None:
    found = place("tcp://head:4000", TORCHRUN)
    assert found == Launch(5, 8, 1, 4, "tcp://head:4000", "torchrun")
    unaddressed = without(TORCHRUN, "MASTER_ADDR", "MASTER_PORT")
    assert place("file:///x", unaddressed).address == "file:///x"
    assert place("tcp://head:4000", {}) == Launch(0, 1, 0, 1, None, "nothing")


def test_arguments_win_over_the_environment() -> None:
    assert place("tcp://h:1", TORCHRUN, rank=1, size=2) == Launch(
        1, 2, 1, 4, "tcp://h:1", "arguments"
    )
    assert place("tcp://h:1", {}, rank=1, size=2) == Launch(
        1, 2, None, None, "tcp://h:1", "arguments"
    )
    assert place("env://", MASTER, rank=1, size=2).address == "tcp://node1:29500"
    assert place("env://", {}, rank=0, size=1).address is None


@pytest.mark.parametrize(
    ("address", "environ", "given", "complaint"),
    [
        ("env://", {}, {"rank": 1, "size": 2}, "no address"),
        ("env://", {}, {"rank": 1}, "rank=1 is given, but nothing says 0"),
        ("env://", TORCHRUN, {"size": 9}, "size=9 is given, but torchrun says 8"),
        ("tcp://h:1", {}, {"rank": 2, "size": 2}, "rank=2 of size=2"),
        ("tcp://h", {}, {"rank": 0, "size": 2}, "no port"),
        ("nonsense", TORCHRUN, {}, "none of env://"),
    ],
)
def test_arguments_that_do_not_fit(
    address: str, environ: dict[str, str], given: dict[str, int], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        place(address, environ, **given)


# Slurm's notations


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu1", ["gpu1"]),
        ("gpu1,gpu2", ["gpu1", "gpu2"]),
        ("gpu[7]", ["gpu7"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("gpu[1-2,5],login", ["gpu1", "gpu2", "gpu5", "login"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("a[1-2]-ib0,b.example.org", ["a1-ib0", "a2-ib0", "b.example.org"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ],
)
def test_node_lists(text: str, hosts: list[str]) -> None:
    assert list(slurm.expand(text)) == hosts
    assert slurm.first_node(text) == hosts[0]


def test_the_first_of_many_nodes_is_found_without_writing_out_the_others() -> None:
    assert slurm.first_node("n[1-999999999]") == "n1"


@pytest.mark.parametrize("text", ["", ",", "gpu[1-2", "gpu]1[", "gpu[a-b]", "gpu[[1]]", "n[]"])
def test_what_is_no_node_list(text: str) -> None:
    with pytest.raises(ConfigError, match="node list"):
        list(slurm.expand(text))


def test_task_counts() -> None:
    assert [slurm.tasks_on_node("4(x2),3", node) for node in range(4)] == [4, 4, 3, None]
    with pytest.raises(ConfigError, match="task counts"):
        slurm.tasks_on_node("four", 0)


def test_ports_stay_in_their_range_and_differ_between_steps() -> None:
    ports = [slurm.port(str(job), str(step)) for job in range(1000, 1100) for step in range(3)]
    assert len(set(ports)) == len(ports)
    assert all(1024 < port < 32768 for port in [*ports, slurm.port("4294967295", "4294967290")])
