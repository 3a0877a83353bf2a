"""Ctrl-C in every phase: the process ends at once, and as interrupted processes do."""

from __future__ import annotations

import signal

import pytest
from processes import run

LIMIT = 2.0
"""Seconds from the signal to the end of the process."""

# Each prints "go" when it waits, on the loop or in a blocking call.
PHASES = {
    "rendezvous": """
async def main():
    print("go", flush=True)
    await pynccl.connect(f"file:///tmp/pynccl-{os.getpid()}", rank=1, size=2, device="cpu")
asyncio.run(main())
""",
    "rendezvous of rank 0": """
async def main():
    print("go", flush=True)
    await pynccl.connect(f"file:///tmp/pynccl-{os.getpid()}", rank=0, size=2, device="cpu")
asyncio.run(main())
""",
    "init that waits": """
async def main():
    unique_id = await pynccl.unique_id("cpu")
    print("go", flush=True)
    await pynccl.Communicator.create(2, 0, unique_id, device="cpu")
asyncio.run(main())
""",
    "stuck init": """
async def main():
    with testing.faults("call:stuck,name=ncclCommInitRankConfig"):
        making = asyncio.ensure_future(made())
        await asyncio.sleep(0.05)
        print("go", flush=True)
        await making
asyncio.run(main())
""",
    "operation": """
async def main():
    async with (await made())[0] as comm:
        print("go", flush=True)
        await comm.all_reduce(np.ones(4))
asyncio.run(main())
""",
    "operation in a stuck call": """
async def main():
    comms = await made()
    with testing.faults("call:stuck,name=ncclAllReduce"):
        async with comms[0] as comm:
            print("go", flush=True)
            await comm.all_reduce(np.ones(4))
asyncio.run(main())
""",
    "close": """
async def main():
    comms = await made()
    print("go", flush=True)
    await comms[0].close()
asyncio.run(main())
""",
    "stuck destroy": """
async def main():
    comms = await made()
    with testing.faults("destroy:stuck"):
        print("go", flush=True)
        await asyncio.gather(*(comm.close() for comm in comms))
asyncio.run(main())
""",
    "stuck abort": """
async def main():
    comms = await made()
    with testing.faults("abort:stuck"):
        print("go", flush=True)
        await comms[0].abort()
asyncio.run(main())
""",
    "block that ends in a stuck abort": """
async def main():
    comms = await made()
    with testing.faults("abort:stuck"):
        async with comms[0] as comm:
            print("go", flush=True)
            await comm.all_reduce(np.ones(4))
asyncio.run(main())
""",
    "wait() without a loop": """
comms = asyncio.run(made())
work = comms[0].all_reduce(np.ones(4))
print("go", flush=True)
work.wait()
""",
    "first call, issued inline": """
async def main():
    comms = await made(1)
    with testing.faults("op:stuck"):
        print("go", flush=True)
        await comms[0].all_reduce(np.ones(4))
asyncio.run(main())
""",
}


@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c(temper: str, phase: str) -> None:
    ended = run(PHASES[phase], "-Wignore", temper=temper, interrupt=signal.SIGINT)
    assert ended.output.startswith("go\n"), ended.errors
    assert ended.status in (-signal.SIGINT, 130), ended.errors
    assert ended.seconds < LIMIT, ended.errors
    assert ended.errors.rstrip().endswith("KeyboardInterrupt"), ended.errors


@pytest.mark.parametrize("phase", ["stuck init", "operation", "stuck abort"])
def test_ctrl_c_on_uvloop(temper: str, phase: str) -> None:
    program = PHASES[phase].replace("asyncio.run(", "__import__('uvloop').run(")
    ended = run(program, "-Wignore", temper=temper, interrupt=signal.SIGINT)
    assert ended.output.startswith("go\n"), ended.errors
    assert ended.status in (-signal.SIGINT, 130), ended.errors
    assert ended.seconds < LIMIT, ended.errors
