"""The ends of loops, interpreters and processes, with everything open and stuck; and forks."""

from __future__ import annotations

import pytest
from processes import run

# ---- the interpreter goes --------------------------------------------------------------------

LEFT_OPEN = {
    "idle": "kept = asyncio.run(made())",
    "a stuck operation": """
inject("op:stuck")
async def main():
    global kept, works
    kept = await made()
    works = [comm.all_reduce(np.ones(4)) for comm in kept]
asyncio.run(main())
""",
    "a stuck call": """
inject("call:stuck,name=ncclAllReduce")
async def main():
    global kept, works
    kept = await made()
    works = [comm.all_reduce(np.ones(4)) for comm in kept]
    await asyncio.sleep(0.05)
asyncio.run(main())
""",
    "a stuck init": """
inject("call:stuck,name=ncclCommInitRankConfig")
async def main():
    try:
        await pynccl.create_all(["cpu:0", "cpu:1"], timeout=0.1)
    except pynccl.DeadlineError:
        pass
asyncio.run(main())
""",
    "a stuck abort": """
inject("abort:stuck")
async def main():
    global kept
    kept = await made()
    await kept[0].abort(timeout=0.1)
    await kept[1].close(timeout=0.1)
try:
    asyncio.run(main())
except pynccl.NcclError:
    pass
""",
    "a stuck destroy": """
inject("destroy:stuck")
async def main():
    global kept
    kept = await made()
    await asyncio.gather(*(comm.close(timeout=0.1) for comm in kept), return_exceptions=True)
asyncio.run(main())
""",
    "streams and events": """
inject("op:stuck")
async def main():
    global kept
    comms = await made()
    stream = pynccl.Stream("cpu:0")
    work = comms[0].all_reduce(np.ones(4), stream=stream)
    kept = comms, stream, stream.record(), stream.done(), work
asyncio.run(main())
""",
}


@pytest.mark.parametrize("what", LEFT_OPEN)
def test_exit_with_everything_open(temper: str, what: str) -> None:
    """No exit waits for a peer or for what is stuck; nothing but the warnings is printed."""
    program = LEFT_OPEN[what] + '\nprint("go", time.perf_counter(), flush=True)'
    ended = run(program, "-Wdefault::ResourceWarning", temper=temper)
    assert ended.status == 0, ended.errors
    assert ended.output.startswith("go")
    assert ended.seconds < 2 + 1.5, ended.errors  # the start of an interpreter included
    rest = [line for line in ended.errors.splitlines() if "ResourceWarning" not in line]
    # The source line that a warning quotes is indented.
    assert [line for line in rest if line.strip() and not line.startswith("  ")] == []


def test_exit_in_a_block_that_raises(temper: str) -> None:
    ended = run(
        """
async def main():
    comms = await made()
    async with comms[0] as comm:
        comm.all_reduce(np.ones(4))
        sys.exit(7)
asyncio.run(main())
""",
        "-Wignore",
        temper=temper,
    )
    assert (ended.status, ended.errors) == (7, "")


# ---- the loop goes ---------------------------------------------------------------------------

CLOSED_LOOP = """
import weakref
threading.excepthook = lambda args: print("thread raised", args.exc_value)
sys.unraisablehook = lambda args: print("unraisable", args.exc_value)
class Tracked(np.ndarray):
    pass
x = np.ones(4, np.float32).view(Tracked)
alive = weakref.ref(x)

async def first():
    global comms, started
    comms = await made(1)
    await comms[0].all_reduce(np.ones(4, np.float32))
    inject("op:delay=300ms")
    work = comms[0].all_reduce(x)
    asyncio.ensure_future(waits(work))
    await asyncio.sleep(0.01)

async def waits(work):
    await work

{run}(first())
del x
gc.collect()
print("pinned", alive() is not None)
time.sleep(0.5)
gc.collect()
print("let go", alive() is None)

async def second():
    inject("")
    y = np.full(4, 5, np.float32)
    await comms[0].all_reduce(y)
    print(y[0])
    await comms[0].close()

{run}(second())
time.sleep(0.1)
print(pynccl.diagnostics()["operations"])
"""


@pytest.mark.parametrize("runner", ["asyncio.run", "__import__('uvloop').run"])
def test_a_loop_that_is_closed_with_work_in_flight(temper: str, runner: str) -> None:
    """Buffers stay until the device is done; the next loop goes on with the communicator."""
    ended = run(CLOSED_LOOP.format(run=runner), temper=temper)
    assert ended.status == 0, ended.errors
    assert ended.output.split("\n") == ["pinned True", "let go True", "5.0", "0", ""]
    assert ended.errors == ""


def test_collected_in_any_order(temper: str) -> None:
    """Four ranks go with the garbage: quickly, with one warning each, and nothing stays."""
    ended = run(
        """
async def main():
    for seed in range(3):
        comms = await made(4)
        works = [comm.all_reduce(np.ones(4)) for comm in comms]
        await pynccl.wait(*works)
        del works
        random.Random(seed).shuffle(comms)
        begun = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ResourceWarning)
            while comms:
                one = comms.pop()
                one.itself = one  # a cycle: only the collector can find it
                del one
            while pynccl.diagnostics()["communicators"] and time.perf_counter() < begun + 5:
                gc.collect()  # again: the engine room may have held a Work a moment longer
                await asyncio.sleep(0.005)
        print(time.perf_counter() - begun < 1, len(caught),
              len({str(one.message) for one in caught}), pynccl.diagnostics()["streams"])
asyncio.run(main())
""",
        temper=temper,
    )
    assert ended.output == "True 4 4 0\n" * 3, ended.errors


# ---- forks -----------------------------------------------------------------------------------

FORKED = """
import signal
warnings.simplefilter("ignore")

def told(call):
    try:
        call()
    except pynccl.UsageError as error:
        return "fork" in str(error)
    return False

async def awaits(what):
    await what

async def main():
    global comms, work, done, stream, event
    comms = await made()
    x = np.ones(4, np.float32)
    done = comms[0].all_reduce(x)
    await pynccl.wait(done, comms[1].all_reduce(x))
    work = comms[0].all_reduce(x, timeout=20)
    stream = pynccl.Stream("cpu:0")
    event = stream.record()

asyncio.run(main())
pid = os.fork()
if pid == 0:
    signal.alarm(10)
    loop = asyncio.new_event_loop()
    refused = {
        "issue": told(lambda: comms[0].all_reduce(np.ones(4))),
        "barrier": told(comms[0].barrier),
        "await": told(lambda: loop.run_until_complete(awaits(work))),
        "await finished": told(lambda: loop.run_until_complete(awaits(done))),
        "done": told(work.done),
        "result": told(work.result),
        "exception": told(work.exception),
        "wait": told(work.wait),
        "order": told(lambda: work.order(stream.handle)),
        "stream": told(stream.query),
        "await stream": told(stream.done),
        "event": told(event.query),
        "record": told(lambda: event.record(stream)),
        "new stream": told(lambda: pynccl.Stream("cpu:0")),
        "new communicator": told(lambda: loop.run_until_complete(made())),
        "split": told(lambda: loop.run_until_complete(comms[0].split(0))),
        "close": told(lambda: loop.run_until_complete(comms[0].close())),
        "abort": told(lambda: loop.run_until_complete(comms[0].abort())),
    }
    loop.close()
    print([what for what, right in refused.items() if not right], flush=True)
    repr(comms), repr(work)
    del comms, work, done, stream, event
    gc.collect()
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

async def goes_on():
    await comms[1].all_reduce(np.ones(4, np.float32))
    await work
    await stream
    await asyncio.gather(*(comm.close() for comm in comms))

asyncio.run(goes_on())
print("unharmed")
"""


def test_a_fork(temper: str) -> None:
    """The child is told, and ends cleanly; the parent does not notice."""
    ended = run(FORKED, temper=temper)
    assert ended.output == "[]\n3\nunharmed\n", ended.errors
    assert ended.errors == ""


def test_a_fork_after_the_import_alone(temper: str) -> None:
    ended = run(
        """
pid = os.fork()
async def main():
    async with (await made(1))[0] as comm:
        x = np.ones(2)
        await comm.all_reduce(x)
        os.write(1, b"%g " % x.sum())  # in one piece: both write
asyncio.run(main())
if pid:
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""",
        temper=temper,
    )
    assert ended.output == "2 2 0\n", ended.errors
