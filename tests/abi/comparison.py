"""Compare what src/abi declares with what a vendor's header declares, through the compiler.

Two programs print one table of numbers each (enumerators, constants, sizes, alignments,
offsets), one from our headers and one from the vendor's. Types that no number shows (an int
where the vendor has a float) are compared by the compiler, in the vendor's program.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import toolchain
from declarations import Header
from support.symbols import Symbol

# Names of ours that the vendor spells otherwise.
VENDOR_SPELLING = {
    "NCCL_ABI_VERSION": "NCCL_VERSION_CODE",
    "NCCL_SIM_INFO_MAGIC": "((ncclSimInfo_t)NCCL_SIM_INFO_INITIALIZER).magic",
}
# Members whose type differs on purpose; their size and offset are still compared.
OTHER_TYPE = {
    (
        "DLDevice",
        "device_type",
    ): "an int32_t, since a producer may send codes that no enum of ours names",
}
# Makes cuda.h declare every exported name as it is, with no macro that renames an old one.
EXPORTED_NAMES = "#define __CUDA_API_VERSION_INTERNAL\n"
# Makes nccl.h declare what the library exports on Linux, also what it calls deprecated.
NCCL_HEADER = (
    "#define NCCL_OS_LINUX\n"
    '#pragma GCC diagnostic ignored "-Wdeprecated-declarations"\n'
    "#include <nccl.h>\n"
    "#include <nccl_device.h>"
)


@dataclass(frozen=True)
class Side:
    """One side of a comparison: the lines that include its headers, and their folders."""

    include: str
    folders: tuple[Path, ...]


def table_program(side: Side, header: Header, *, vendor: bool) -> str:
    """The C program that prints `name value` for everything in `header`, as `side` has it."""
    lines = ["#include <stddef.h>", "#include <stdio.h>", side.include]
    if vendor:
        lines += _type_assertions(header)
    lines.append("int main(void) {")
    for name in header.enumerators + header.constants:
        value = VENDOR_SPELLING.get(name, name) if vendor else name
        lines.append(_row(name, value))
    for struct, members in header.structs.items():
        lines.append(_row(f"sizeof {struct}", f"sizeof({struct})"))
        lines.append(_row(f"alignof {struct}", f"_Alignof({struct})"))
        for member in members:
            place = f"{struct}.{member.name}"
            lines.append(_row(place, f"offsetof({struct}, {member.name})"))
            lines.append(_row(f"sizeof {place}", f"sizeof((({struct} *)0)->{member.name})"))
    lines += ["    return 0;", "}"]
    return "\n".join(lines) + "\n"


def _row(label: str, value: str) -> str:
    return f'    printf("{label} %lld\\n", (long long)({value}));'


def _type_assertions(header: Header) -> list[str]:
    # C lets a typedef be repeated only with the same type: that is the whole check of an alias.
    lines = [f"{alias};" for alias in header.aliases.values()]
    for struct, members in header.structs.items():
        for member in members:
            if (struct, member.name) not in OTHER_TYPE:
                lines.append(
                    f"_Static_assert(__builtin_types_compatible_p("
                    f"__typeof__((({struct} *)0)->{member.name}), {member.type}), "
                    f'"{struct}.{member.name} is not: {member.type}");'
                )
    return lines


def differences(header: Header, ours: Side, vendors: Side, directory: Path) -> list[str]:
    """Every way in which the vendor's header differs from ours; empty when they agree."""
    tables: list[dict[str, int]] = []
    for side, vendor in ((ours, False), (vendors, True)):
        folder = directory / ("vendor" if vendor else "ours")
        folder.mkdir()
        source = table_program(side, header, vendor=vendor)
        binary, complaint = toolchain.compile_c(source, folder, include=side.folders)
        if complaint:
            return [complaint]
        tables.append(toolchain.run_table(binary))
    mine, theirs = tables
    return [
        f"{name}: ours {mine[name]}, vendor {theirs[name]}"
        for name in mine
        if mine[name] != theirs[name]
    ]


def prototype_complaint(vendors: Side, abi: Path, directory: Path) -> str:
    """What the compiler says of prototypes.h after the vendor's headers; empty is good."""
    source = (
        f'{vendors.include}\n#define PYNCCL_ABI_TYPES_FROM_VENDOR\n#include "prototypes.h"\n'
    )
    return toolchain.compile_c(
        source, directory, include=vendors.folders, flags=("-fsyntax-only", "-I", str(abi))
    )[1]


def undeclared(vendors: Side, symbols: list[Symbol], directory: Path) -> str:
    """What the compiler says when each name is used with the vendor's headers alone.

    A name that the vendor does not know would pass as a prototype, for want of a clash.
    """
    uses = "\n".join(f"    (void)&{symbol.name};" for symbol in symbols)
    source = f"{vendors.include}\nint main(void) {{\n{uses}\n    return 0;\n}}\n"
    return toolchain.compile_c(
        source, directory, include=vendors.folders, flags=("-fsyntax-only",)
    )[1]
