"""Read the names that src/abi declares, so that a check made from them can forget none.

The headers there are written in a small part of C (no bit fields, no conditional declarations,
one declarator per member), which is what keeps this reader short. `read_header` refuses a
typedef that it cannot place, so that a declaration outside that part of C is an error and not
a gap.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from support.symbols import ABI, without_comments

ROOT = ABI.parents[1]


@dataclass(frozen=True)
class Member:
    """One member of a struct: its name, and its type without it (`int (*)(void)`)."""

    name: str
    type: str


@dataclass
class Header:
    """What one header declares, in the order of its text."""

    enumerators: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    structs: dict[str, list[Member]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


def read_header(text: str) -> Header:
    """The declarations of a header's text. Raises ValueError for one it cannot read."""
    text = without_comments(text)
    header = Header()
    for name, value in re.findall(r"^#define[ \t]+(\w+)[ \t]+(\S.*)$", text, flags=re.M):
        if value:
            header.constants.append(name)
    text = re.sub(r"^#.*$", "", text, flags=re.M)
    for declaration in _top_level_declarations(text):
        _place(declaration, header)
    return header


def _top_level_declarations(text: str) -> list[str]:
    found, depth, start = [], 0, 0
    for at, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == ";" and depth == 0:
            found.append(" ".join(text[start:at].split()))
            start = at + 1
    if text[start:].strip():
        raise ValueError(f"no declaration: {text[start:].strip()!r}")
    return found


def _place(declaration: str, header: Header) -> None:
    if body := re.fullmatch(r"typedef enum(?: \w+)? \{(.*)\} \w+", declaration):
        names = re.findall(r"(\w+)\s*=", body[1])
        if len(names) != len([part for part in body[1].split(",") if part.strip()]):
            raise ValueError(f"an enumerator without a value: {declaration!r}")
        header.enumerators += names
    elif body := re.fullmatch(r"typedef struct(?: \w+)? \{(.*)\} (\w+)", declaration):
        header.structs[body[2]] = read_members(body[1])
    elif body := re.fullmatch(
        r"typedef [^{}]*?\(\*(?=\w+\)\()(\w+).*|typedef [^{}()]*?(\w+)", declaration
    ):
        header.aliases[body[1] or body[2]] = declaration
    else:
        raise ValueError(f"a declaration that the checks cannot read: {declaration!r}")


def read_members(body: str) -> list[Member]:
    """The members in the body of a struct. Raises ValueError for one it cannot read."""
    members: list[Member] = []
    for part in (part.strip() for part in body.split(";")):
        if not part:
            continue
        if pointer := re.fullmatch(r"(.*?\(\*)(\w+)(\).*)", part):
            members.append(Member(pointer[2], pointer[1] + pointer[3]))
        elif plain := re.fullmatch(r"(.*?)(\w+)((?:\[\w+\])*)", part):
            if "," in part:
                raise ValueError(f"several members in one declaration: {part!r}")
            members.append(Member(plain[2], (plain[1] + plain[3]).strip()))
        else:
            raise ValueError(f"a member that the checks cannot read: {part!r}")
    return members


def our_header(name: str) -> Header:
    return read_header((ABI / name).read_text("utf-8"))
