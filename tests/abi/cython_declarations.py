"""Hold the declarations of a .pxd to the C headers that they stand for.

Cython believes its .pxd, and C converts a number silently: a count declared as an int would be
cut in two with no word from either compiler. So the declarations are turned back into C, as
assertions on the types that the headers have.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import toolchain
from declarations import ROOT, Member, read_members

SUFFIX = re.compile(r"\)\s*(?:noexcept|except|nogil|with gil)\b.*$")


@dataclass
class Extern:
    """What one `cdef extern from` block declares: C types by the C expression that has them."""

    header: str
    types: dict[str, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)


def read_pxd(text: str) -> list[Extern]:
    """The extern blocks of a .pxd. Raises ValueError for a declaration that it cannot read."""
    blocks = []
    text = re.sub(r"#[^\n]*", "", text)
    pattern = r'^cdef extern from "([^"]+)"[^\n]*:\n((?:[ \t]+[^\n]*\n|\s*\n)*)'
    for header, body in re.findall(pattern, text, flags=re.M):
        block = Extern(header)
        _read_block(textwrap.dedent(body), block)
        blocks.append(block)
    return blocks


def _read_block(body: str, block: Extern) -> None:
    struct: str | None = None
    for indented, line in _logical_lines(body):
        if not indented:
            struct = None
        if opened := re.fullmatch(r"(?:ctypedef |cdef )?(?:struct|enum|union) ?(\w*):", line):
            struct = opened[1] if "enum" not in line else None
        elif line.startswith("ctypedef ") or line == "pass":
            continue  # what a name stands for is in the header; Cython needs only its kind
        elif struct is not None:
            for member in _struct_members(SUFFIX.sub(")", line)):
                block.types[f"(({struct} *)0)->{member.name}"] = member.type
        elif function := re.fullmatch(r"([\w *]+?)(\w+)\((.*)\)", SUFFIX.sub(")", line)):
            block.types[function[2]] = f"{function[1].strip()} ({function[3] or 'void'})"
        elif constants := re.fullmatch(
            r"(?:const )?(?:(?:unsigned )?\w+ )?(\w+(?:, ?\w+)*),?", line
        ):
            block.names += re.findall(r"\w+", constants[1])
        else:
            raise ValueError(f"a declaration that the checks cannot read: {line!r}")


def _struct_members(line: str) -> list[Member]:
    if "(" in line or "," not in line:
        return read_members(line)
    first, *others = line.split(",")
    (member,) = read_members(first)
    return [member, *(Member(other.strip(), member.type) for other in others)]


def _logical_lines(body: str) -> Iterator[tuple[bool, str]]:
    """Each declaration on one line, and whether it is indented; brackets join lines."""
    pending, indented = "", False
    for line in body.splitlines():
        if not line.strip():
            continue
        if not pending:
            indented = line[0].isspace()
        pending = f"{pending} {line.strip()}".strip()
        if pending.count("(") == pending.count(")"):
            yield indented, pending
            pending = ""
    if pending:
        raise ValueError(f"a bracket that never closes: {pending!r}")


def complaint(text: str, directory: Path, source: Path = ROOT / "src") -> str:
    """What the C compiler says of a .pxd's declarations; empty when they are the headers'."""
    lines = []
    for block in read_pxd(text):
        lines.append(f'#include "{block.header}"')
        lines += [_assertion(*declared) for declared in block.types.items()]
        lines += [f"enum {{ pn_seen_{name} = sizeof({name}) }};" for name in block.names]
    return toolchain.compile_c(
        "\n".join(lines) + "\n", directory, flags=("-fsyntax-only", "-I", str(source))
    )[1]


def _assertion(expression: str, declared: str) -> str:
    # Cython's bint stands for a C truth value of either kind.
    spellings = {re.sub(r"\bbint\b", kind, declared) for kind in ("int", "_Bool")}
    same = " || ".join(
        f"__builtin_types_compatible_p(__typeof__({expression}), {spelt})"
        for spelt in sorted(spellings)
    )
    return f'_Static_assert({same}, "{expression} is not: {declared}");'
