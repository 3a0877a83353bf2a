"""What NCCL answers where no GPU is needed to ask: one table for every library we can load.

The real libnccl shows that the table is right, and the host engine and any other engine are
held to the same table. A probe is a sequence of calls on one thread. An argument is a number,
None for NULL, or the name of a piece of scratch memory (probe_child.Scratch) whose address is
passed; an ncclUniqueId passed by value is the memory "id" whatever is written in the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Argument: TypeAlias = "int | str | None"

SUCCESS, CUDA, SYSTEM, INTERNAL, ARGUMENT, USAGE, REMOTE, IN_PROGRESS, TIMEOUT = range(9)
FLOAT32, SUM = 7, 0
ONE, ZERO = 1, 0


@dataclass(frozen=True)
class Call:
    """One call, and what it must return: any one of these codes or texts; () is anything."""

    function: str
    arguments: tuple[Argument, ...]
    expected: tuple[int | str, ...]


@dataclass(frozen=True)
class Probe:
    """A sequence of calls that shows one rule.

    `reads` names scratch memory whose final content joins the results, and `finally_` is what
    it must be (left out where a test of its own looks at it).
    `without_gpu` is for answers that only a machine without a GPU gives.
    """

    name: str
    rule: str
    calls: tuple[Call, ...]
    reads: tuple[str, ...] = ()
    finally_: tuple[int | str | None, ...] = ()
    without_gpu: bool = False


def call(function: str, *arguments: Argument, gives: int | str | tuple[int | str, ...]) -> Call:
    return Call(function, arguments, gives if isinstance(gives, tuple) else (gives,))


START = call("ncclGroupStart", gives=SUCCESS)
END = call("ncclGroupEnd", gives=SUCCESS)
END_REFUSED = call("ncclGroupEnd", gives=USAGE)
# A library that leaked its group depth answers this once with success, and is then repaired.
END_MAY_REPAIR = call("ncclGroupEnd", gives=(SUCCESS, USAGE))

ERROR_TEXTS = (
    "no error",
    "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    "unhandled system error (run with NCCL_DEBUG=INFO for details)",
    "internal error - please report this issue to the NCCL developers",
    "invalid argument (run with NCCL_DEBUG=WARN for details)",
    "invalid usage (run with NCCL_DEBUG=WARN for details)",
    "remote process exited or there was a network error",
    "NCCL operation in progress",
    "timeout",
    "unknown result code",
)

# Every operation on a NULL communicator, with arguments that are otherwise in order.
NULL_COMMUNICATOR_OPERATIONS: tuple[tuple[str, tuple[Argument, ...]], ...] = (
    ("ncclAllReduce", ("bytes", "bytes", ONE, FLOAT32, SUM, None, None)),
    ("ncclReduce", ("bytes", "bytes", ONE, FLOAT32, SUM, 0, None, None)),
    ("ncclBroadcast", ("bytes", "bytes", ONE, FLOAT32, 0, None, None)),
    ("ncclBcast", ("bytes", ONE, FLOAT32, 0, None, None)),
    ("ncclAllGather", ("bytes", "bytes", ONE, FLOAT32, None, None)),
    ("ncclReduceScatter", ("bytes", "bytes", ONE, FLOAT32, SUM, None, None)),
    ("ncclAlltoAll", ("bytes", "bytes", ONE, FLOAT32, None, None)),
    ("ncclGather", ("bytes", "bytes", ONE, FLOAT32, 0, None, None)),
    ("ncclScatter", ("bytes", "bytes", ONE, FLOAT32, 0, None, None)),
    ("ncclSend", ("bytes", ONE, FLOAT32, 0, None, None)),
    ("ncclRecv", ("bytes", ONE, FLOAT32, 0, None, None)),
    ("ncclPutSignal", ("bytes", ONE, FLOAT32, 0, None, ZERO, 0, 0, 0, None, None)),
    ("ncclSignal", (0, 0, 0, 0, None, None)),
    ("ncclWaitSignal", (1, "bytes", None, None)),
    ("ncclAllReduceConfig", ("bytes", "bytes", ONE, FLOAT32, SUM, None, None, None)),
    ("ncclReduceConfig", ("bytes", "bytes", ONE, FLOAT32, SUM, 0, None, None, None)),
    ("ncclBroadcastConfig", ("bytes", "bytes", ONE, FLOAT32, 0, None, None, None)),
    ("ncclAllGatherConfig", ("bytes", "bytes", ONE, FLOAT32, None, None, None)),
    ("ncclReduceScatterConfig", ("bytes", "bytes", ONE, FLOAT32, SUM, None, None, None)),
    ("ncclAlltoAllConfig", ("bytes", "bytes", ONE, FLOAT32, None, None, None)),
    ("ncclGatherConfig", ("bytes", "bytes", ONE, FLOAT32, 0, None, None, None)),
    ("ncclScatterConfig", ("bytes", "bytes", ONE, FLOAT32, 0, None, None, None)),
)
# Queries and local calls on a NULL communicator; none of them touches the group of the thread.
NULL_COMMUNICATOR_QUERIES: tuple[tuple[str, tuple[Argument, ...]], ...] = (
    ("ncclCommCount", (None, "int")),
    ("ncclCommUserRank", (None, "int")),
    ("ncclCommCuDevice", (None, "int")),
    ("ncclCommGetAsyncError", (None, "int")),
    ("ncclRedOpCreatePreMulSum", ("int", "scalar", FLOAT32, 1, None)),
    ("ncclRedOpDestroy", (77, None)),
    ("ncclCommRegister", (None, "bytes", 64, "pointer")),
    ("ncclCommWindowRegister", (None, "bytes", 64, "pointer", 1)),
    ("ncclCommWindowDeregister", (None, "bytes")),
    ("ncclCommSuspend", (None, 1)),
    ("ncclCommResume", (None,)),
    ("ncclCommMemStats", (None, 3, "bytes")),
    ("ncclCommGetUniqueId", (None, "id")),
)

BAD_ALL_REDUCE = call(
    "ncclAllReduce", "bytes", "bytes", ONE, FLOAT32, SUM, None, None, gives=ARGUMENT
)

VERSION, LAST_ERROR, UNIQUE_IDS, KEYS = "version", "last error", "unique ids", "parameter keys"

PROBES: tuple[Probe, ...] = (
    Probe(
        VERSION, "one number", (call("ncclGetVersion", "int", gives=SUCCESS),), reads=("int",)
    ),
    Probe(
        UNIQUE_IDS,
        "ids need no GPU, are 128 bytes, and no two are the same",
        (
            call("ncclGetUniqueId", "id", gives=SUCCESS),
            call("ncclGetUniqueId", "id2", gives=SUCCESS),
        ),
        reads=("id", "id2"),
    ),
    Probe(
        LAST_ERROR,
        "a NULL communicator is as good as any: the text belongs to the process",
        (BAD_ALL_REDUCE, Call("ncclGetLastError", (None,), ())),
    ),
    Probe(
        KEYS,
        "the keys are counted",
        (call("ncclParamGetAllParameterKeys", "pointer", "int", gives=SUCCESS),),
        reads=("int",),
    ),
    Probe(
        "version into NULL",
        "GetVersion refuses a NULL output",
        (call("ncclGetVersion", None, gives=ARGUMENT),),
    ),
    Probe(
        "error texts",
        "each code has its text, and a code that is none is called unknown",
        tuple(
            call("ncclGetErrorString", code, gives=text)
            for code, text in (
                *enumerate(ERROR_TEXTS),
                (-1, ERROR_TEXTS[-1]),
                (99, ERROR_TEXTS[-1]),
            )
        ),
    ),
    Probe(
        "unique id into NULL",
        "GetUniqueId refuses a NULL output",
        (call("ncclGetUniqueId", None, gives=ARGUMENT),),
    ),
    # ---- groups
    Probe(
        "end without start",
        "End at depth 0 is invalid usage and changes nothing",
        (END_REFUSED,) * 2,
    ),
    Probe(
        "start and end",
        "an empty group ends well, and is then closed",
        (START, END, END_REFUSED),
    ),
    Probe(
        "nested groups",
        "an inner End returns success; only as many Ends as Starts are taken",
        (START, START, START, END, END, END, END_REFUSED),
    ),
    Probe(
        "sticky error",
        "a bad operation makes the outermost End return its code, once; the depth is then 0",
        (START, BAD_ALL_REDUCE, call("ncclGroupEnd", gives=ARGUMENT), END_REFUSED),
    ),
    Probe(
        "sticky error in a nested group",
        "an inner End does not report the error and does not clear it",
        (START, START, BAD_ALL_REDUCE, END, call("ncclGroupEnd", gives=ARGUMENT), END_REFUSED),
    ),
    Probe(
        "sticky error is cleared",
        "the group after a failed one is clean",
        (START, BAD_ALL_REDUCE, call("ncclGroupEnd", gives=ARGUMENT), START, END, END_REFUSED),
    ),
    Probe(
        "an error outside a group is not kept",
        "an operation outside a group opens and closes its own, so nothing sticks to the next",
        (BAD_ALL_REDUCE, START, END, END_REFUSED),
    ),
    *(
        Probe(
            f"{function} on NULL",
            "an operation on NULL is an invalid argument and leaves no group open",
            (call(function, *arguments, gives=ARGUMENT), END_REFUSED),
        )
        for function, arguments in NULL_COMMUNICATOR_OPERATIONS
    ),
    *(
        Probe(
            f"{function} on NULL in a group",
            "an operation on a NULL communicator poisons the group it is in",
            (
                START,
                call(function, *arguments, gives=ARGUMENT),
                call("ncclGroupEnd", gives=ARGUMENT),
                END_REFUSED,
            ),
        )
        for function, arguments in NULL_COMMUNICATOR_OPERATIONS
    ),
    *(
        Probe(
            f"{function} on NULL in a group",
            "a query on NULL is an invalid argument and does not poison the group",
            (START, call(function, *arguments, gives=ARGUMENT), END, END_REFUSED),
        )
        for function, arguments in NULL_COMMUNICATOR_QUERIES
    ),
    Probe(
        "a bad data type on NULL",
        "the communicator is looked at before the other arguments; both are invalid arguments",
        (
            call("ncclAllReduce", "bytes", "bytes", ONE, 99, SUM, None, None, gives=ARGUMENT),
            END_REFUSED,
        ),
    ),
    Probe(
        "no elements on NULL",
        "a count of zero is dropped only after the checks",
        (
            call("ncclAllReduce", None, None, ZERO, FLOAT32, SUM, None, None, gives=ARGUMENT),
            END_REFUSED,
        ),
    ),
    Probe(
        "a simulated end outside a group",
        "it is an End: invalid usage at depth 0",
        (call("ncclGroupSimulateEnd", None, gives=USAGE), END_REFUSED),
    ),
    Probe(
        "no encryption settings",
        "a NULL struct asks for nothing",
        (call("ncclSetEncryption", None, gives=SUCCESS),),
    ),
    # ---- the end of a communicator
    *(
        Probe(
            f"{function} of NULL",
            "ending no communicator is no error",
            (call(function, None, gives=SUCCESS), END_REFUSED),
        )
        for function in ("ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort")
    ),
    Probe(
        "revoke of NULL",
        "revoking no communicator is no error, whatever the flags are",
        tuple(call("ncclCommRevoke", None, flags, gives=SUCCESS) for flags in (0, 7)),
    ),
    Probe(
        "growing with bad arguments",
        "no output, no ranks, a new rank without id, below 0, or beyond the number of ranks",
        (
            call("ncclCommGrow", None, 2, "id", 0, None, None, gives=ARGUMENT),
            call("ncclCommGrow", None, 0, "id", 0, "pointer", None, gives=ARGUMENT),
            call("ncclCommGrow", None, 2, None, 1, "pointer", None, gives=ARGUMENT),
            call("ncclCommGrow", None, 2, "id", -1, "pointer", None, gives=ARGUMENT),
            call("ncclCommGrow", None, 2, "id", 2, "pointer", None, gives=ARGUMENT),
            END_REFUSED,
        ),
        reads=("pointer",),
        finally_=(None,),
    ),
    Probe(
        "growing with bad arguments in a group",
        "what a new rank got wrong poisons the group; what is seen before that does not",
        (
            START,
            call("ncclCommGrow", None, 0, "id", 0, "pointer", None, gives=ARGUMENT),
            END,
            START,
            call("ncclCommGrow", None, 2, "id", 2, "pointer", None, gives=ARGUMENT),
            call("ncclGroupEnd", gives=ARGUMENT),
            END_REFUSED,
        ),
    ),
    Probe(
        "async error into NULL",
        "GetAsyncError refuses a NULL output",
        (call("ncclCommGetAsyncError", None, None, gives=ARGUMENT),),
    ),
    Probe(
        "built-in and unknown operators",
        "RedOpDestroy refuses built-in operators, codes that are none, and a NULL communicator",
        tuple(call("ncclRedOpDestroy", op, None, gives=ARGUMENT) for op in (SUM, -3, 77)),
    ),
    Probe(
        "deregister of NULL",
        "the communicator is looked at before the handle: two NULLs are an invalid argument",
        (call("ncclCommDeregister", None, None, gives=ARGUMENT),),
    ),
    # ---- parameters
    Probe(
        "an unknown parameter",
        "binding a key that NCCL does not know is an invalid argument and writes no handle",
        (call("ncclParamBind", "pointer", "unknown key", gives=ARGUMENT),),
        reads=("pointer",),
        finally_=(None,),
    ),
    Probe(
        "the text of an unknown parameter",
        "reading an unknown key is an invalid argument and gives NULL of length 0",
        (call("ncclParamGetParameter", "unknown key", "pointer", "int", gives=ARGUMENT),),
        reads=("pointer", "int"),
        finally_=(None, 0),
    ),
    Probe(
        "parameters into NULL",
        "the getters refuse NULL outputs",
        (
            call("ncclParamBind", None, "known key", gives=ARGUMENT),
            call("ncclParamGetParameter", "known key", None, None, gives=ARGUMENT),
            call("ncclParamGetAllParameterKeys", None, None, gives=ARGUMENT),
        ),
    ),
    # ---- creation: without a GPU, CUDA is asked before any argument is looked at
    Probe(
        "init without a GPU",
        "InitRank fails with the CUDA error, gives no handle and leaves no group open",
        (call("ncclCommInitRank", "pointer", 1, "id", 0, gives=CUDA), END_REFUSED),
        reads=("pointer",),
        finally_=(None,),
        without_gpu=True,
    ),
    Probe(
        "init of rank 3 of 2 without a GPU",
        "CUDA is asked before the rank is looked at",
        (call("ncclCommInitRank", "pointer", 2, "id", 3, gives=CUDA), END_REFUSED),
        without_gpu=True,
    ),
    Probe(
        "init with a configuration without a GPU",
        "InitRankConfig fails with the CUDA error; releases up to 2.32 leave a group open",
        (
            call("ncclCommInitRankConfig", "pointer", 1, "id", 0, None, gives=CUDA),
            END_MAY_REPAIR,
            END_REFUSED,
        ),
        without_gpu=True,
    ),
    Probe(
        "init with several ids without a GPU",
        "InitRankScalable asks CUDA before it counts the ids, and leaves a group open as well",
        (
            call("ncclCommInitRankScalable", "pointer", 1, 0, 0, "id", None, gives=CUDA),
            END_MAY_REPAIR,
            END_REFUSED,
        ),
        without_gpu=True,
    ),
    Probe(
        "init of all devices without a GPU",
        "InitAll fails with the CUDA error and leaves no group open",
        (call("ncclCommInitAll", "pointer", 1, None, gives=CUDA), END_REFUSED),
        without_gpu=True,
    ),
    Probe(
        "split of NULL without a GPU",
        "Split asks CUDA for the device before it looks at the communicator",
        (call("ncclCommSplit", None, 0, 0, "pointer", None, gives=CUDA), END_REFUSED),
        without_gpu=True,
    ),
    Probe(
        "memory without a GPU",
        "MemAlloc fails with the CUDA error",
        (call("ncclMemAlloc", "pointer", 1024, gives=CUDA),),
        without_gpu=True,
    ),
)
