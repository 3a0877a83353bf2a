"""Rules about the text of every file: its size, its name, and what must not stand in it."""

from __future__ import annotations

import re
from pathlib import Path

import tree

LIMIT = 500
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc"}
# Spelt in two parts, so that this file keeps its own rule.
PROMISES = re.compile(r"\b(?:TO" + "DO|FIX" + "ME|X" + "XX|HA" + r"CK)\b")
# A folder of somebody's machine; a file in such a place is never part of the project.
MACHINE = re.compile(r"(?<![\w.*])/(?:ho" + "me|ro" + "ot|wo" + "rk|Us" + r"ers)/\w")
NOT_ASCII = re.compile("[\u2018\u2019\u201c\u201d\u00a0\u200b]")


def too_long(root: Path) -> list[str]:
    """Files over the limit of 500 lines."""
    counts = {
        path: len(path.read_text("utf-8").splitlines())
        for path in tree.files(root, *tree.ROOMS)
    }
    return [
        f"{p.relative_to(root)}: {n} lines, over {LIMIT}"
        for p, n in counts.items()
        if n > LIMIT
    ]


def vague_names(root: Path) -> list[str]:
    """Modules and folders whose name says nothing of what is in them."""
    return [
        f"{path.relative_to(root)}: says nothing of what is in it"
        for path in tree.files(root, *tree.ROOMS)
        if VAGUE & {part.strip("_") for part in path.relative_to(root).with_suffix("").parts}
    ]


def bad_words(root: Path) -> list[str]:
    """Promises instead of work, paths of a machine, typographic quotes and invisible spaces."""
    breaches = []
    for path in tree.files(root, *tree.ROOMS):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            for pattern in (PROMISES, MACHINE, NOT_ASCII):
                if found := pattern.search(line):
                    breaches.append(f"{path.relative_to(root)}:{number}: {found[0]!a}")
    return breaches
