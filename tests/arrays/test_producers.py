"""Every odd shape of DLPack: taken rightly or refused by name, and nothing is kept."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import tensors
from cliques import all_reduced, clique
from tensors import COPIED, CUDA, CUDA_HOST, PADDED, READ_ONLY, ROCM, Old, Tensor, Versioned

import pynccl
from pynccl import InvalidBufferError, testing

MAKERS: dict[str, Callable[[], type[Tensor]]] = {
    "versioned": lambda: Versioned,
    "unversioned": lambda: Old,
    "table": tensors.table_type,
}


@pytest.fixture(params=MAKERS)
def made(request: pytest.FixtureRequest) -> type[Tensor]:
    """Run the test with each way of giving a tensor out."""
    return MAKERS[request.param]()


@contextlib.asynccontextmanager
async def refuses(match: str) -> AsyncIterator[Any]:
    """Expect the block to raise, to issue nothing and to keep nothing; the next call works."""
    async with clique(1) as comms:
        with testing.journal() as journal, pytest.raises(InvalidBufferError, match=match):
            yield comms[0]
        assert journal.calls == []
        assert comms[0].issued == 0
        assert tensors.none_held()
        await all_reduced(comms)


def floats(*shape: int) -> Any:
    return np.arange(1, 1 + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


# ---- what fits -------------------------------------------------------------------------------

FITS: dict[str, tuple[Callable[[Any], Any], list[float]]] = {
    "no strides": (lambda made: made(floats(2, 2), has_strides=0), [1, 2, 3, 4]),
    "no axes": (lambda made: made(floats(1).reshape(()), has_shape=0, has_strides=0), [1]),
    "an offset": (lambda made: made(floats(8), shape=(4,), byte_offset=16), [5, 6, 7, 8]),
    "one row of any stride": (lambda made: made(floats(1, 3), strides=(-7, 1)), [1, 2, 3]),
    "no elements": (lambda made: made(floats(0), data=None, strides=(-3,)), []),
    "no columns": (lambda made: made(floats(4, 0), strides=(99, 98)), []),
    "read-only": (lambda made: made(floats(2), flags=READ_ONLY), [1, 2]),
    "pinned": (lambda made: made(floats(2), device_type=CUDA_HOST), [1, 2]),
    "a later minor version": (lambda made: made(floats(2), minor=9), [1, 2]),
}


@pytest.mark.parametrize("name", FITS)
async def test_a_tensor_that_fits(temper: str, made: type[Tensor], name: str) -> None:
    make, values = FITS[name]
    async with clique(1) as comms:
        x = make(made)
        out = np.zeros(len(values), np.float32)
        await comms[0].all_reduce(x, out=out)
        assert out.tolist() == values
    assert tensors.none_held()


async def test_a_tensor_may_be_the_output(temper: str, made: type[Tensor]) -> None:
    async with clique(2) as comms:
        outs = [made(np.zeros(4, np.float32)) for _ in comms]
        works = [c.all_reduce(floats(4), out=out) for c, out in zip(comms, outs, strict=True)]
        assert all([await work is out for work, out in zip(works, outs, strict=True)])
        assert [out.array.tolist() for out in outs] == [[2, 4, 6, 8]] * 2
    assert tensors.none_held()


# ---- what does not ---------------------------------------------------------------------------

MISFITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "reversed": (
        lambda made: made(floats(4), strides=(-1,)),
        r"x must be contiguous.*axis 0 of shape \(4,\) has a stride of -1",
    ),
    "columns": (lambda made: made(floats(4, 4)[:, :2]), "axis 0 .* a stride of 4 .* 2 is"),
    "repeated": (lambda made: made(floats(4), strides=(0,)), "a stride of 0 elements"),
    "no memory": (
        lambda made: made(floats(4), data=None),
        "no DLPack tensor: 1 axes.*no memory",
    ),
    "a negative length": (lambda made: made(floats(4), shape=(-4,)), "negative length"),
    "no lengths": (lambda made: made(floats(4), has_shape=0), "no DLPack tensor"),
    "negative axes": (lambda made: made(floats(4), ndim=-1), "-1 axes"),
    "too many to count": (
        lambda made: made(floats(1, 1), shape=(1 << 40, 1 << 40), has_strides=0),
        "more elements than can be counted",
    ),
    "on a GPU": (
        lambda made: made(floats(4), device_type=CUDA),
        'x is on a device .DLPack device type 2.*device="cuda',
    ),
    "on ROCm": (lambda made: made(floats(4), device_type=ROCM), "DLPack device type 10"),
    "handles": (
        lambda made: made(floats(4), code=3),
        "32 bits in 1 lanes .DLPack type code 3.; expected whole bytes",
    ),
    "no bits": (lambda made: made(floats(4), bits=0), "elements of 0 bits in 1 lanes"),
    "ragged rows": (
        lambda made: made(np.zeros(3, np.uint8), shape=(2, 3), ndim=2, bits=4, has_strides=0),
        "elements of 4 bits in 1 lanes .*rows of whole bytes",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
async def test_a_tensor_that_does_not_fit(made: type[Tensor], name: str) -> None:
    make, message = MISFITS[name]
    async with refuses(message) as comm:
        comm.all_gather(make(made))


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"major": 2}, r"x speaks DLPack 2\.1, expected 1\.x"),
        ({"flags": READ_ONLY}, "x is read-only"),
        ({"flags": COPIED}, "exported as a copy, although its library was asked not to copy"),
    ],
    ids=["version", "read-only", "copied"],
)
@pytest.mark.parametrize("kind", ["versioned", "table"])
async def test_what_only_newer_tensors_tell(
    kind: str, told: dict[str, Any], message: str
) -> None:
    async with refuses(message) as comm:
        comm.all_reduce(MAKERS[kind]()(floats(4), **told))


# ---- elements --------------------------------------------------------------------------------

REDUCED = {
    (0, 8), (1, 8), (0, 32), (1, 32), (0, 64), (1, 64), (2, 16), (2, 32), (2, 64), (4, 16),
    (10, 8), (12, 8),
}  # fmt: skip
COMPLEX, BOOL = 5, 6


async def test_every_type_of_element() -> None:
    """Whole bytes are moved; what NCCL has no type for is not reduced; and nothing crashes."""
    memory = np.zeros(8 * 255 * 17, np.uint8)
    moved = 0
    async with clique(1, warm=True) as comms:
        for code in (*range(20), 255):
            for bits in (0, 1, 2, 4, 6, 7, 8, 12, 16, 24, 32, 64, 128, 255):
                for lanes in (0, 1, 2, 3, 4, 16):
                    x = Versioned(memory, code=code, bits=bits, lanes=lanes, shape=(8,))
                    if bits * lanes and code != 3:
                        work = comms[0].broadcast(x)
                        assert work.nbytes == bits * lanes  # eight elements
                        await work
                        moved += 1
                    else:
                        with pytest.raises(
                            InvalidBufferError, match=f"of {bits} bits in {lanes}"
                        ):
                            comms[0].broadcast(x)
                    reduces = lanes == 1 and (code, bits) in REDUCED
                    if code in (COMPLEX, BOOL):
                        continue  # as pairs, and by "any" and "all"
                    if reduces:
                        await comms[0].all_reduce(x)
                    else:
                        with pytest.raises(InvalidBufferError):
                            comms[0].all_reduce(x)
        await all_reduced(comms)
    assert moved > 1000
    assert tensors.none_held()


@pytest.mark.parametrize(
    ("shape", "bits", "flags", "nbytes"),
    [
        ((6,), 4, 0, 3),
        ((2, 4), 4, 0, 4),
        ((4, 2), 4, 0, 4),
        ((3,), 4, PADDED, 3),
        ((2, 3), 4, PADDED, 6),
        ((4, 4), 6, 0, 12),
        ((0, 3), 4, 0, 0),
    ],
)
async def test_elements_of_less_than_a_byte(
    shape: tuple[int, ...], bits: int, flags: int, nbytes: int
) -> None:
    """Packed ones go where each row is whole bytes; padded ones have a byte each."""
    memory = np.arange(64, dtype=np.uint8)
    x = Versioned(memory, code=17, bits=bits, ndim=len(shape), shape=shape, flags=flags,
                  has_strides=0)  # fmt: skip
    out = np.zeros(nbytes, np.uint8)
    async with clique(1) as comms:
        work = comms[0].all_gather(x, out=Versioned(out, **FOUR, flags=flags, bits=bits,
                                                    ndim=len(shape), shape=shape))  # fmt: skip
        assert work.nbytes == nbytes
        await work
        assert out.tolist() == list(range(nbytes))
        with pytest.raises(InvalidBufferError, match="moved but not reduced"):
            comms[0].all_reduce(x)


FOUR = {"code": 17, "has_strides": 0}

# ---- misbehaviour ----------------------------------------------------------------------------


def raising(error: BaseException) -> type[Tensor]:
    class Raising(Tensor):
        def __dlpack__(self, **_: Any) -> Any:
            raise type(error)(*error.args)

    return Raising


def giving(what: Callable[[Tensor], Any]) -> type[Tensor]:
    class Giving(Tensor):
        def __dlpack__(self, **_: Any) -> Any:
            return what(self)

    return Giving


ODD: dict[str, tuple[type[Tensor], str]] = {
    "BufferError": (raising(BufferError("no")), "x cannot be taken by DLPack from Raising: no"),
    "TypeError": (raising(TypeError("1\n2")), "x cannot be taken by DLPack from Raising: 1$"),
    "anything": (raising(ZeroDivisionError("oh")), "from Raising: oh"),
    "no capsule": (giving(lambda _: object()), "gave no unused DLPack capsule"),
    "None": (giving(lambda _: None), "gave no unused DLPack capsule"),
    "a used capsule": (
        giving(lambda x: x.capsule("used_dltensor_versioned")),
        "no unused DLPack capsule",
    ),
    "another capsule": (
        giving(lambda x: x.capsule("arrow_schema")),
        "no unused DLPack capsule",
    ),
}


@pytest.mark.parametrize("name", ODD)
async def test_an_odd_producer(name: str) -> None:
    kind, message = ODD[name]
    async with clique(1) as comms:
        with testing.journal() as journal:
            with pytest.raises(InvalidBufferError, match=message) as raised:
                comms[0].all_reduce(kind(floats(4)))
            assert journal.calls == []
        assert "\n" not in str(raised.value)
        if name.endswith("Error"):
            assert type(raised.value.__cause__).__name__ == name
        await all_reduced(comms)
    assert tensors.none_held()


async def test_an_interrupt_is_no_refusal() -> None:
    async with clique(1) as comms:
        with pytest.raises(KeyboardInterrupt):
            comms[0].all_reduce(raising(KeyboardInterrupt())(floats(4)))
        await all_reduced(comms)


async def test_one_capsule_for_two_operations(temper: str) -> None:
    """Borrowed, never renamed: a library that gives the same capsule again is not wrong."""
    kind = giving(lambda x: x.again)  # type: ignore[attr-defined]
    x = kind(floats(4))
    x.again = capsule = Versioned(x.array).capsule("dltensor_versioned")  # type: ignore[attr-defined]
    async with clique(1, warm=True) as comms:
        with testing.faults("op:delay=20ms"):
            outs = [np.zeros(4, np.float32) for _ in range(2)]
            works = [comms[0].all_reduce(x, out=out) for out in outs]
            await pynccl.wait(*works)
        assert [out.tolist() for out in outs] == [[1, 2, 3, 4]] * 2
    assert repr(capsule).startswith('<capsule object "dltensor_versioned"')
    del x, capsule
    assert tensors.none_held()
    assert tensors.number("deleted_badly") == 0


# ---- what is asked, and how often ------------------------------------------------------------


@pytest.mark.parametrize("kind", [tensors.Uncopied, tensors.Old, tensors.Oldest])
async def test_an_old_signature_is_asked_as_it_can_be(kind: type[Tensor]) -> None:
    async with clique(1) as comms:
        for _ in range(2):
            await comms[0].all_reduce(kind(floats(4)))


async def test_the_signature_is_remembered_by_type() -> None:
    calls: list[dict[str, Any]] = []

    class Picky(Tensor):
        def __dlpack__(self, **options: Any) -> Any:
            calls.append(options)
            if options:
                raise TypeError("takes nothing")
            return self.capsule("dltensor")

    async with clique(1) as comms:
        await comms[0].all_reduce(Picky(floats(4)))
        assert calls == [{"max_version": (1, 1), "copy": False}, {"max_version": (1, 1)}, {}]
        del calls[:]
        await comms[0].all_reduce(Picky(floats(4)))
        assert calls == [{}]


@pytest.mark.parametrize("offered", [True, False])
async def test_a_type_is_looked_at_once(offered: bool) -> None:
    looks: list[str] = []

    class Watched(type):
        def __getattribute__(cls, name: str) -> Any:
            looks.append(name)
            return super().__getattribute__(name)

    base = tensors.table_type() if offered else Versioned
    kind = Watched("Kind", (base,), {})
    async with clique(1) as comms:
        for count in (1, 0, 0):
            await comms[0].all_reduce(kind(floats(4)))
            await comms[0].all_reduce(floats(4))  # another type in between
            assert looks.count("__dlpack_c_exchange_api__") == count
            del looks[:]


async def test_a_type_may_go_and_its_address_serve_another() -> None:
    async with clique(1) as comms:
        for number in range(50):
            kind = type("Kind", (Versioned if number % 2 else Old,), {})
            x = kind(floats(1))
            await comms[0].all_reduce(x)
            assert len(x.asked) == 1
            gone = weakref.ref(kind)
            del kind, x
            gc.collect()
            assert gone() is None


# ---- tables ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (1, "from Tabled: not today$"),
        (2, "its library does not say why"),
        (3, "its library does not say why"),
    ],
)
async def test_a_table_that_gives_nothing(fault: int, message: str) -> None:
    async with refuses(message) as comm:
        comm.all_reduce(tensors.table_type()(floats(4), fault=fault))


async def test_tables_of_other_versions() -> None:
    async with clique(1) as comms:
        for table, capsules in (("later_table", 0), ("alien_table", 1), ("empty_table", 1)):
            x = tensors.tabled(table, Versioned)(floats(4))
            await comms[0].all_reduce(x)
            assert len(x.asked) == capsules, table


async def test_what_is_no_table() -> None:
    class Odd(Versioned):
        __dlpack_c_exchange_api__ = 12345

    async with clique(1) as comms:
        x = Odd(floats(4))
        await comms[0].all_reduce(x)
        assert len(x.asked) == 1
