"""NCCL's versioned structs besides ncclConfig_t, as bytes: each member can be made wrong."""

from __future__ import annotations

import ctypes
import struct
from typing import TypeAlias

MAGIC, SIM_MAGIC, VERSION, UNSET = 0xCAFEBEEF, 0x74685283, 23203, -(1 << 31)

Memory: TypeAlias = "ctypes.Array[ctypes.c_char]"


def _address(text: bytes | None, owner: list[object]) -> int:
    if text is None:
        return 0
    memory = ctypes.create_string_buffer(text)
    owner.append(memory)
    return ctypes.addressof(memory)


def _made(raw: bytes, owner: list[object]) -> Memory:
    memory = ctypes.create_string_buffer(raw, len(raw))
    memory.owner = owner  # type: ignore[attr-defined]
    return memory


def coll_config(
    size: int = 72,
    magic: int = MAGIC,
    version: int = VERSION,
    *,
    bounds: tuple[int, int, int, int] = (UNSET,) * 4,
    selection: bytes | None = None,
    force: int = 1,
    policy: int = UNSET,
    event: int = 0,
) -> Memory:
    """An ncclCollConfig_t; `bounds` are minCTAs, maxCTAs, nvlsCTAs and cgaClusterSize."""
    owner: list[object] = []
    raw = struct.pack(
        "<QIIQiiiiQiiQQ",
        size, magic, version, 0, *bounds, _address(selection, owner), force, policy, 0, event,
    )  # fmt: skip
    return _made(raw, owner)


def simulation(size: int = 24, magic: int = SIM_MAGIC, version: int = VERSION) -> Memory:
    """An ncclSimInfo_t with the estimate that means none."""
    return _made(struct.pack("<QIIf4x", size, magic, version, -1.0), [])


def estimate(info: Memory) -> float:
    """The estimate in an ncclSimInfo_t, in microseconds."""
    value: float = struct.unpack_from("<f", info.raw, 16)[0]
    return value


def encryption(
    size: int = 32,
    magic: int = MAGIC,
    version: int = VERSION,
    *,
    mode: int = 0,
    key: bytes | None = None,
) -> Memory:
    """An ncclEncryptionConfig_t."""
    owner: list[object] = []
    raw = struct.pack("<QIIi4xQ", size, magic, version, mode, _address(key, owner))
    return _made(raw, owner)


PROPERTIES_BYTES = 152
PROPERTIES = {
    "rank": ("i", 16),
    "nRanks": ("i", 20),
    "cudaDev": ("i", 24),
    "deviceApiSupport": ("?", 32),
    "multimemSupport": ("?", 33),
    "nLsaTeams": ("i", 40),
    "hostRmaSupport": ("?", 44),
}


def properties(magic: int = MAGIC, version: int = VERSION) -> Memory:
    """An ncclCommProperties_t, to be filled."""
    raw = struct.pack("<QII", PROPERTIES_BYTES, magic, version)
    return _made(raw.ljust(PROPERTIES_BYTES, b"\xee"), [])


def property_of(memory: Memory, name: str) -> int | bool:
    """One member of an ncclCommProperties_t."""
    kind, offset = PROPERTIES[name]
    value: int | bool = struct.unpack_from(f"<{kind}", memory.raw, offset)[0]
    return value


class Desc(ctypes.Structure):
    """ncclWaitSignalDesc_t."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("opCnt", "peer", "sigIdx", "ctx"))


def descriptors(*each: tuple[int, int, int, int]) -> ctypes.Array[Desc]:
    """An array of ncclWaitSignalDesc_t: count, peer, index and context of each."""
    return (Desc * len(each))(*each)
