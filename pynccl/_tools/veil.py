"""A copy of a shared object in which some functions cannot be found by their names.

An older NCCL lacks what came later, and its clients ask for it by name. The copy differs from
the object in one letter of each such name, which neither the dynamic linker nor ``ld`` finds
then; all else, and what the functions do for whoever has their addresses, stays.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

_SECTION_HEADERS = struct.Struct("<40xQ10xHH2x")  # of the file's header: offset, size, number
_SECTION = struct.Struct("<4xI16xQQI4x8xQ")  # type, offset, size, linked section, entry's size
_DYNSYM = 11


def without(image: bytes, absent: Callable[[str], bool]) -> bytes:
    """The object's bytes, with the names that are absent made unfindable.

    Args:
        image: a 64-bit little-endian ELF shared object.
        absent: says of each exported name whether it must not be found.

    Raises:
        ValueError: it is no such object.
    """
    veiled = bytearray(image)
    for at, name in _exported(image):
        if absent(name):
            veiled[at] = ord("_")
    return bytes(veiled)


def _exported(image: bytes) -> Iterator[tuple[int, str]]:
    """Where each name of the dynamic symbol table lies in the file, and the name."""
    if image[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF object")
    start, size, count = _SECTION_HEADERS.unpack_from(image)
    sections = [_SECTION.unpack_from(image, start + size * i) for i in range(count)]
    for kind, offset, length, linked, entry in sections:
        if kind != _DYNSYM:
            continue
        names = sections[linked][1]
        for symbol in range(offset, offset + length, entry):
            at = names + struct.unpack_from("<I", image, symbol)[0]
            yield at, image[at : image.index(b"\0", at)].decode("ascii")
