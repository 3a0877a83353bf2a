"""Bad networks, bad strangers: slow, cut, stalled, half-open peers; garbage; cancellation."""

from __future__ import annotations

import asyncio
import random
import struct
import time

import pytest
from support.meeting import close, free_port, meet, outcomes, rank, run, tcp, until
from support.proxy import Faults, Proxy

from pynccl._bootstrap import Session, door
from pynccl._bootstrap.frames import HEADER, MAGIC, VERSION, Kind, encode
from pynccl.errors import BootstrapError, DeadlineError


async def through(proxy: Proxy, address: str, size: int = 3, **options: float) -> list[Session]:
    """Rank 0 on its port, the others through the proxy."""
    others = (rank(n, size, tcp(proxy.port), **options) for n in range(1, size))
    return list(await asyncio.gather(rank(0, size, address, **options), *others))


# strangers


async def knock(port: int, data: bytes) -> bytes:
    """Send bytes to a port and return all that comes back until the other side hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(), 5.0)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        bytes(1000),
        MAGIC + b"\xff" * 60,
        HEADER.pack(MAGIC, VERSION, Kind.OPEN, 0, 2**31),
        HEADER.pack(MAGIC, VERSION, Kind.OPEN, 0, 1025) + bytes(1025),
        encode(Kind.HELLO, b'{"rank": 1, "size": 2}'),
        encode(Kind.PROOF, bytes(32)),
        encode(Kind.OPEN, b"short"),
        encode(Kind.BYE, b"{}"),
    ],
    ids=["http", "tls", "zeros", "header", "huge", "large", "hello", "proof", "open", "bye"],
)
def test_garbage_on_the_port_is_hung_up_on_and_harms_nobody(data: bytes) -> None:
    async def main() -> None:
        port = free_port()
        zero = asyncio.ensure_future(rank(0, 2, tcp(port)))
        await asyncio.sleep(0.05)
        assert await knock(port, data) == b""
        await close(await rank(1, 2, tcp(port)), await zero)

    run(main)


def test_a_flood_of_silent_connections_does_not_keep_ranks_out() -> None:
    async def main() -> None:
        port = free_port()
        zero = asyncio.ensure_future(rank(0, 2, tcp(port)))
        await asyncio.sleep(0.05)
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(80)]
        await close(await rank(1, 2, tcp(port)), await zero)
        for _, writer in silent:
            writer.close()

    run(main)


def test_a_half_open_connection_is_dropped_after_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_SECONDS", 0.2)

    async def main() -> None:
        port = free_port()
        zero = asyncio.ensure_future(rank(0, 2, tcp(port)))
        await asyncio.sleep(0.05)
        start = time.monotonic()
        assert await knock(port, MAGIC) == b""
        assert 0.1 < time.monotonic() - start < 1.0
        await close(await rank(1, 2, tcp(port)), await zero)

    run(main)


def test_a_stranger_that_answers_instead_of_rank_0_is_found_out() -> None:
    async def main() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"220 mail ready\r\n")
            await reader.read()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        [error] = await outcomes(rank(1, 2, tcp(port), timeout=0.5))
        assert isinstance(error, DeadlineError)
        assert "not a pynccl frame: it starts with b'220 '" in str(error)
        server.close()
        # The place is free again: rank 0 comes late, and the rank that waits finds it.
        one = asyncio.ensure_future(rank(1, 2, tcp(port)))
        await close(await rank(0, 2, tcp(port), delay=0.2), await one)

    run(main)


# bad networks


@pytest.mark.parametrize("faults", [Faults(delay=0.03), Faults(piece=1), Faults(piece=7)])
def test_slow_and_dripping_connections_are_waited_for(faults: Faults) -> None:
    async def main() -> None:
        port = free_port()
        async with Proxy(port, faults) as proxy:
            sessions = await through(proxy, tcp(port))
            await asyncio.gather(*(session.report(True) for session in sessions))
            await close(*sessions)

    run(main)


@pytest.mark.parametrize("towards_rank_0", [True, False])
@pytest.mark.parametrize("after", [0, 5, 12, 60, 100, 130, 160, 200, 300])
def test_a_connection_that_breaks_on_the_way_in_is_made_again(
    towards_rank_0: bool, after: int
) -> None:
    broken = Faults(cut_up=after) if towards_rank_0 else Faults(cut_down=after)

    async def main() -> None:
        port = free_port()
        async with Proxy(port, None, broken, broken) as proxy:
            found = await outcomes(
                rank(0, 2, tcp(port), timeout=3), rank(1, 2, tcp(proxy.port), timeout=3)
            )
            # Past the first few hundred bytes the rank has been let in: then a break is a loss.
            for result in found:
                if isinstance(result, Exception):
                    assert after >= 120, result
                    assert isinstance(result, BootstrapError)
            if after < 120:
                assert proxy.accepted == 3
            await close(*(s for s in found if isinstance(s, Session)))

    run(main)


def test_a_break_after_hello_is_healed_by_the_same_process_coming_again() -> None:
    async def main() -> None:
        port = free_port()
        async with Proxy(port, Faults(), Faults(cut_down=110)) as proxy:
            zero = asyncio.ensure_future(rank(0, 3, tcp(port)))
            one = asyncio.ensure_future(rank(1, 3, tcp(proxy.port)))
            await asyncio.sleep(0.3)
            assert proxy.accepted == 2
            sessions = [await rank(2, 3, tcp(port)), await one, await zero]
            await close(*sessions)

    run(main)


def test_a_rank_that_vanishes_while_others_are_awaited_ends_the_attempt() -> None:
    async def main() -> None:
        port = free_port()
        async with Proxy(port) as proxy:
            zero = asyncio.ensure_future(rank(0, 3, tcp(port)))
            one = asyncio.ensure_future(rank(1, 3, tcp(proxy.port)))
            two = asyncio.ensure_future(rank(2, 3, tcp(proxy.port), delay=5.0))
            await asyncio.sleep(0.2)
            start = time.monotonic()
            proxy.cut()
            found = await outcomes(zero, one)
            assert time.monotonic() - start < 4.0
            assert [type(error) for error in found] == [BootstrapError] * 2
            assert "rank 1 came and vanished" in str(found[0])
            assert "rank 0 vanished before all ranks had come" in str(found[1])
            two.cancel()
            await asyncio.wait({two})

    run(main)


def test_a_stalled_connection_ends_with_the_deadline() -> None:
    async def main() -> None:
        port = free_port()
        async with Proxy(port, Faults(stalled=True)) as proxy:
            found = await outcomes(
                rank(0, 2, tcp(port), timeout=0.5), rank(1, 2, tcp(proxy.port), timeout=0.5)
            )
            assert [type(error) for error in found] == [DeadlineError] * 2
            assert [error.missing for error in found] == [(1,), (0,)]

    run(main)


def test_a_cut_afterwards_is_a_loss_on_both_sides() -> None:
    async def main() -> None:
        port = free_port()
        async with Proxy(port) as proxy:
            sessions = await through(proxy, tcp(port))
            told: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
            for session in sessions:
                session.on_lost(lambda ranks, _, r=session.rank: told[r].update(ranks))  # type: ignore[misc]
            proxy.cut()
            await until(lambda: told == {0: {1, 2}, 1: {0}, 2: {0}})
            assert told == {0: {1, 2}, 1: {0}, 2: {0}}
            await close(*sessions)

    run(main)


# cancellation


@pytest.mark.parametrize("seed", range(12))
def test_a_cancelled_join_leaves_nothing_and_the_others_hear_of_it(seed: int) -> None:
    chance = random.Random(seed)
    victim = chance.randrange(3)
    moment = chance.choice([0.0, 0.001, 0.002, 0.004, 0.008, 0.05])

    async def main() -> None:
        address = tcp(free_port())
        # Rank 2 is late enough that the attempt cannot be over before the cancellation.
        tasks = [
            asyncio.ensure_future(rank(n, 3, address, timeout=1.0, delay=0.1 * (n == 2)))
            for n in range(3)
        ]
        await asyncio.sleep(moment)
        tasks[victim].cancel()
        found = await outcomes(*tasks)
        assert isinstance(found[victim], asyncio.CancelledError)
        for number, result in enumerate(found):
            if number != victim:
                assert isinstance(result, BootstrapError | DeadlineError), result
        # And the port serves the next attempt at once.
        await close(*await meet(3, address))

    run(main)


def test_the_cancelled_rank_is_named_at_once() -> None:
    async def main() -> None:
        address = tcp(free_port())
        zero, one = (asyncio.ensure_future(rank(n, 3, address)) for n in range(2))
        await asyncio.sleep(0.1)
        start = time.monotonic()
        one.cancel()
        found = await outcomes(zero, one)
        assert "rank 1 gave up: it was cancelled" in str(found[0])
        assert time.monotonic() - start < 2.5
        zero, one = (asyncio.ensure_future(rank(n, 3, address)) for n in range(2))
        await asyncio.sleep(0.1)
        start = time.monotonic()
        zero.cancel()
        found = await outcomes(zero, one)
        assert "rank 0 gave up: it was cancelled" in str(found[1])
        assert time.monotonic() - start < 0.5

    run(main)


def test_fields_of_the_wrong_type_end_the_connection_and_not_rank_0() -> None:
    bodies = [
        b'{"rank": "1", "size": 2, "ticket": "", "seconds": null, "hello": {}}',
        b'{"rank": 1, "size": 2, "ticket": "", "seconds": NaN, "hello": {}}',
        b'{"rank": 1, "size": 2, "ticket": "", "seconds": 1, "hello": {"a": 1}}',
        b'{"rank": 1, "size": 2, "ticket": "", "seconds": 1, "hello": []}',
        b"[" * 60_000,
    ]

    async def main() -> None:
        from pynccl._bootstrap.channel import Channel, Cut
        from pynccl._bootstrap.client import connect
        from pynccl._bootstrap.frames import STRANGER_LIMIT
        from pynccl._bootstrap.handshake import Caller

        port = free_port()
        zero = asyncio.ensure_future(rank(0, 2, tcp(port)))
        await asyncio.sleep(0.05)
        for body in bodies:
            channel = Channel(STRANGER_LIMIT)
            await connect(channel, 2, ("127.0.0.1", port), None, "")
            caller = Caller(key=b"", room="", expected=b"", rank=1)
            channel.send(Kind.OPEN, caller.open())
            channel.send(Kind.PROOF, caller.prove(await channel.receive()))
            caller.verify(await channel.receive())
            channel.send(Kind.HELLO, body)
            with pytest.raises(Cut):
                await channel.receive()
            channel.abort()
        await close(await rank(1, 2, tcp(port)), await zero)

    run(main)
    assert struct.calcsize(HEADER.format) == 12
