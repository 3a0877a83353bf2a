"""A copy of a shared object in which some of its functions cannot be found.

The linker passes over a name of the dynamic symbol table that has no address. Nothing else in
the object changes: what calls such a function from inside does so without that table.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

ELF64_LITTLE = b"\x7fELF\x02\x01"
SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym
SHT_DYNSYM = 11
STB_WEAK = 2


def veil(source: Path, target: Path, hidden: Callable[[str], bool]) -> list[str]:
    """Copy an object without the symbols for which ``hidden`` is true; return their names.

    Raises:
        OSError: it is no object for a 64-bit little-endian machine.
    """
    data = bytearray(source.read_bytes())
    if not data.startswith(ELF64_LITTLE):
        raise OSError(f"{source} is no 64-bit little-endian ELF object")
    (first,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [SECTION.unpack_from(data, first + i * size) for i in range(count)]
    symbols = next(section for section in sections if section[1] == SHT_DYNSYM)
    names_at = sections[symbols[6]][4]
    found = []
    for at in range(symbols[4], symbols[4] + symbols[5], SYMBOL.size):
        name, info, other, *_ = SYMBOL.unpack_from(data, at)
        begin = names_at + name
        text = data[begin : data.index(0, begin)].decode()
        if hidden(text):
            found.append(text)
            SYMBOL.pack_into(data, at, name, STB_WEAK << 4 | info & 15, other, 0, 0, 0)
    target.write_bytes(data)
    target.chmod(0o755)
    return found
