"""`join`: all ranks meet, or all ranks hear the same reason why not."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time

import pytest
from support.meeting import (
    PAYLOAD,
    close,
    free_port,
    meet,
    open_sockets,
    outcomes,
    payload,
    rank,
    run,
    tcp,
)

from pynccl._bootstrap import Session, join
from pynccl.errors import BootstrapError, ConfigError, DeadlineError


@pytest.mark.parametrize("size", range(1, 9))
def test_all_ranks_know_all_hellos_and_the_payload(size: int) -> None:
    async def main() -> None:
        sessions = await meet(size, tcp(free_port()))
        for number, session in enumerate(sessions):
            assert (session.rank, session.size) == (number, size)
            assert session.payload == PAYLOAD
            assert [hello["host"] for hello in session.hellos] == [
                f"host{other}" for other in range(size)
            ]
        await close(*sessions)

    run(main)


def test_a_single_rank_opens_nothing_and_needs_no_address() -> None:
    async def main() -> None:
        before = open_sockets()
        session = await join(
            None, rank=0, size=1, hello={"a": "b"}, payload=payload, timeout=1.0
        )
        assert open_sockets() == before
        assert (session.payload, session.hellos) == (PAYLOAD, ({"a": "b"},))
        await session.report(True)
        assert await session.ask(1.0) == {0: ""}
        await session.close()

    run(main)


def loopbacks() -> list[str]:
    """The loopback's names, with IPv6 where this machine has it."""
    hosts = ["127.0.0.1", "localhost"]
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return hosts
    return [*hosts, "[::1]"]


@pytest.mark.parametrize("host", loopbacks())
@pytest.mark.parametrize("secret", [None, "word"])
def test_every_form_of_the_loopback(host: str, secret: str | None) -> None:
    async def main() -> None:
        await close(*await meet(3, f"tcp://{host}:{free_port()}", secret=secret))

    run(main)


def test_a_name_that_means_this_host_binds_all_interfaces() -> None:
    async def main() -> None:
        port = free_port()
        address = f"tcp://{socket.gethostname()}:{port}"
        first = asyncio.ensure_future(rank(0, 2, address))
        second = await rank(1, 2, tcp(port), delay=0.1)
        await close(await first, second)

    run(main)


def test_a_late_rank_0_and_late_others_are_waited_for() -> None:
    async def main() -> None:
        address = tcp(free_port())
        delays = [0.4, 0.0, 0.6, 0.2]
        sessions = await asyncio.gather(
            *(rank(number, 4, address, delay=delay) for number, delay in enumerate(delays))
        )
        await close(*sessions)

    run(main)


def test_missing_ranks_are_named_to_all_who_came() -> None:
    async def main() -> None:
        address = tcp(free_port())
        start = time.monotonic()
        found = await outcomes(*(rank(n, 5, address, timeout=0.6) for n in (0, 1, 3)))
        assert time.monotonic() - start == pytest.approx(0.6, abs=0.5)
        for error in found:
            assert isinstance(error, DeadlineError)
            assert error.missing == (2, 4)
            assert error.operation == "connect"
            assert error.elapsed == pytest.approx(0.6, abs=0.5)
        assert len({str(error) for error in found}) == 1
        assert "ranks 2, 4 of 5 had not come after 0.6 s" in str(found[0])

    run(main)


def test_the_first_timeout_ends_the_attempt_for_all() -> None:
    async def main() -> None:
        address = tcp(free_port())
        found = await outcomes(
            rank(0, 3, address, timeout=30), rank(1, 3, address, timeout=0.5)
        )
        assert [error.missing for error in found] == [(2,), (2,)]
        assert "the timeout of rank 1 was the first" in str(found[0])
        assert str(found[0]) == str(found[1])

    run(main)


def test_without_rank_0_the_others_say_how_they_tried() -> None:
    async def main() -> None:
        port = free_port()
        start = time.monotonic()
        [error] = await outcomes(rank(1, 2, tcp(port), timeout=0.5))
        assert time.monotonic() - start == pytest.approx(0.5, abs=0.4)
        assert isinstance(error, DeadlineError)
        assert error.missing == (0,)
        assert "rank 1 could not reach rank 0 in 0.5 s" in str(error)
        assert f"127.0.0.1 port {port}: {os.strerror(errno.ECONNREFUSED)}" in str(error)

    run(main)


def test_a_host_that_does_not_exist_is_named() -> None:
    async def main() -> None:
        [error] = await outcomes(rank(1, 2, "tcp://no-such-host.invalid:4000", timeout=0.5))
        assert isinstance(error, DeadlineError)
        assert "no-such-host.invalid" in str(error)

    run(main)


def test_different_sizes_are_named_on_all_ranks_also_the_late_ones() -> None:
    async def main() -> None:
        address = tcp(free_port())
        found = await outcomes(
            rank(0, 3, address), rank(1, 4, address, delay=0.1), rank(2, 3, address, delay=0.4)
        )
        assert all(isinstance(error, BootstrapError) for error in found)
        assert len({str(error) for error in found}) == 1
        assert "rank 1 (host host1" in str(found[0])
        assert "as one of 4 ranks, rank 0 (host host0" in str(found[0])

    run(main)


def test_a_rank_beyond_the_size_that_the_others_have() -> None:
    async def main() -> None:
        address = tcp(free_port())
        found = await outcomes(rank(0, 2, address), rank(5, 6, address))
        assert {type(error) for error in found} == {BootstrapError}
        assert "rank 5" in str(found[0])

    run(main)


def test_a_rank_that_comes_twice_is_named_on_all_ranks() -> None:
    async def main() -> None:
        address = tcp(free_port())
        found = await outcomes(
            rank(0, 3, address),
            rank(1, 3, address, hello={"host": "one"}),
            rank(1, 3, address, hello={"host": "two"}, delay=0.2),
            rank(2, 3, address, delay=0.3),
        )
        assert {type(error) for error in found} == {BootstrapError}
        assert len({str(error) for error in found}) == 1
        assert "rank 1 came twice" in str(found[0])
        assert "host one" in str(found[0])
        assert "host two" in str(found[0])

    run(main)


def test_two_who_both_are_rank_0_cannot_both_listen() -> None:
    async def main() -> None:
        port = free_port()
        first = asyncio.ensure_future(rank(0, 2, tcp(port), timeout=1.0))
        start = time.monotonic()
        [error] = await outcomes(rank(0, 2, tcp(port), delay=0.1))
        assert time.monotonic() - start < 0.5
        assert isinstance(error, BootstrapError)
        assert f"port {port} is in use" in str(error)
        assert isinstance(error.__cause__, OSError)
        assert error.__cause__.errno == errno.EADDRINUSE
        await outcomes(first)

    run(main)


def test_a_failed_check_reaches_all_ranks_and_sees_the_hellos_in_rank_order() -> None:
    seen = []

    def check(hellos: list[dict[str, str]]) -> str | None:
        seen.append([hello["device"] for hello in hellos])
        return "ranks 0 and 2 use the same GPU A"

    async def main() -> None:
        address = tcp(free_port())
        devices = "ABA"
        found = await outcomes(
            *(rank(n, 3, address, hello={"device": devices[n]}, check=check) for n in range(3))
        )
        assert [type(error) for error in found] == [BootstrapError] * 3
        assert {str(error) for error in found} == {"ranks 0 and 2 use the same GPU A"}

    run(main)
    assert seen == [["A", "B", "A"]]  # called once, on rank 0


def test_what_the_payload_raises_goes_through_on_rank_0_and_is_told_to_the_others() -> None:
    async def broken() -> bytes:
        raise OSError("no unique id today")

    async def main() -> None:
        address = tcp(free_port())
        first, second = await outcomes(rank(0, 2, address, payload=broken), rank(1, 2, address))
        assert type(first) is OSError
        assert isinstance(second, BootstrapError)
        assert "rank 0 failed: no unique id today" in str(second)

    run(main)


def test_a_payload_that_never_comes_is_bounded_by_the_deadline() -> None:
    async def never() -> bytes:
        await asyncio.Event().wait()
        return b""

    async def main() -> None:
        for size in (1, 2):
            address = tcp(free_port())
            found = await outcomes(
                *(rank(n, size, address, payload=never, timeout=0.5) for n in range(size))
            )
            assert [type(error) for error in found] == [DeadlineError] * size
            assert [error.missing for error in found] == [(0,)] * size

    run(main)


def test_the_next_attempt_can_use_the_port_while_the_first_session_lives() -> None:
    async def main() -> None:
        address = tcp(free_port())
        sessions: list[Session] = []
        for _ in range(3):
            sessions += await meet(3, address)
        await close(*sessions)

    run(main)


def test_a_wrong_secret_fails_that_rank_and_rank_0_says_who_was_refused() -> None:
    async def main() -> None:
        address = tcp(free_port())
        zero, wrong, none, right = await outcomes(
            rank(0, 4, address, secret="word", timeout=1.0),
            rank(1, 4, address, secret="guess", timeout=1.0),
            rank(2, 4, address, timeout=1.0),
            rank(3, 4, address, secret="word", timeout=1.0),
        )
        for error in (wrong, none):
            assert isinstance(error, BootstrapError)
            assert "was not let in" in str(error)
        assert isinstance(right, DeadlineError)
        assert str(zero) == str(right)
        assert zero.missing == (1, 2)
        assert "; refused: rank " in str(zero)
        assert "rank 1 at 127.0.0.1" in str(zero)
        assert "wrong secret" in str(zero)

    run(main)


def test_a_rank_with_the_right_secret_takes_the_place_of_the_refused_one() -> None:
    async def main() -> None:
        address = tcp(free_port())
        zero = asyncio.ensure_future(rank(0, 2, address, secret="word"))
        [error] = await outcomes(rank(1, 2, address, secret="guess"))
        assert isinstance(error, BootstrapError)
        await close(await rank(1, 2, address, secret="word"), await zero)

    run(main)


def test_two_jobs_on_one_port_do_not_mix() -> None:
    async def main() -> None:
        port = free_port()
        mine = asyncio.ensure_future(rank(0, 2, f"{tcp(port)}/mine"))
        [stranger] = await outcomes(rank(1, 2, f"{tcp(port)}/theirs", timeout=0.5))
        assert isinstance(stranger, DeadlineError)
        assert "serves another job" in str(stranger)
        await close(await rank(1, 2, f"{tcp(port)}/mine"), await mine)

    run(main)


@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        ({"rank": 2, "size": 2}, "rank 2 of 2"),
        ({"rank": -1, "size": 2}, "rank -1 of 2"),
        ({"rank": 0, "size": 0}, "rank 0 of 0"),
        ({"rank": True, "size": 2}, "rank True of 2"),
        ({"rank": 0, "size": 2, "hello": {"pid": 3}}, "must be str"),
        ({"rank": 0, "size": 2, "hello": {"x": "y" * 70_000}}, "larger than"),
        ({"rank": 0, "size": 2, "secret": b""}, "secret is empty"),
        ({"rank": 0, "size": 2, "address": None}, "no address"),
        ({"rank": 0, "size": 2, "address": "env://"}, "none of"),
    ],
)
def test_wrong_arguments(place: dict[str, object], complaint: str) -> None:
    async def main() -> None:
        arguments = {"address": tcp(4000), "hello": {}, "timeout": 1.0, **place}
        with pytest.raises(ConfigError, match=complaint):
            await join(**arguments)  # type: ignore[arg-type]

    run(main)
