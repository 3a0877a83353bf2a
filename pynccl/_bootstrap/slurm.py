"""Slurm's way of writing things: node lists, task counts, and a port nobody had to choose."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pynccl.errors import ConfigError

FIRST_PORT, PORTS = 10_240, 20_480
"""The ports a job may get: above the well-known ones, below Linux's ephemeral range (32768)."""

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def first_node(nodelist: str) -> str:
    """Return the first host of a node list: "gpu07" of "gpu[07-09,12],login1"."""
    return next(expand(nodelist))


def expand(nodelist: str) -> Iterator[str]:
    """Yield the hosts of a node list in order; the widths of numbers are kept.

    "r[1-2]n[01-02]" has two ranges and gives four hosts. Raises `ConfigError` for what is no
    node list.
    """
    items = _split(nodelist)
    if not items:
        raise ConfigError(f"node list {nodelist!r} names no host")
    for item in items:
        yield from _expand_item(nodelist, item)


def tasks_on_node(counts: str, node: int) -> int | None:
    """Return the tasks on a node by its index: "4(x2),3" is 4, 4 and 3; None past the end."""
    position = 0
    for item in counts.split(","):
        match = _COUNT.fullmatch(item.strip())
        if match is None:
            raise ConfigError(f"task counts {counts!r} are not in the form 4(x2),3")
        position += int(match[2] or 1)
        if node < position:
            return int(match[1])
    return None


def port(job: str, step: str) -> int:
    """Return the port of a job step: the same on all its ranks, likely unlike other steps'."""
    return FIRST_PORT + (_digits(job) * 131 + _digits(step)) % PORTS


def _digits(text: str) -> int:
    return int("".join(re.findall(r"\d", text)) or 0)


def _split(nodelist: str) -> list[str]:
    items, depth, current = [], 0, ""
    for char in nodelist:
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise ConfigError(f"node list {nodelist!r}: brackets do not match")
        if char == "," and depth == 0:
            items.append(current)
            current = ""
        else:
            current += char
    if depth:
        raise ConfigError(f"node list {nodelist!r}: brackets do not match")
    return [item.strip() for item in (*items, current) if item.strip()]


def _expand_item(nodelist: str, item: str) -> Iterator[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        yield item
        return
    inside, _, tail = rest.partition("]")
    for part in inside.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"node list {nodelist!r}: {part!r} is no number and no range")
        low, high = match[1], match[2] or match[1]
        for number in range(int(low), int(high) + 1):
            for end in _expand_item(nodelist, tail):
                yield f"{head}{number:0{len(low)}}{end}"
