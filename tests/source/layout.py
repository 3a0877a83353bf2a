"""Which room may know which: the arrows of imports and includes, read from the sources.

Every check takes the root of a tree and gives the list of its breaches, each as `file: what`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import tree

# From the ground up. A module may import what stands on a lower line, or on its own line.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("pynccl.errors", "pynccl.types"),
    ("pynccl.config",),
    ("pynccl._bootstrap",),
    ("pynccl._native.abi",),
    ("pynccl._native.engine",),
    ("pynccl._native.handles", "pynccl._native.view", "pynccl._native.completion"),
    ("pynccl._native.memory",),
    ("pynccl._native.dlpack_table", "pynccl._native.results"),
    ("pynccl._native.exchange",),
    ("pynccl._native.borrow",),
    ("pynccl._native.work", "pynccl._native.operators"),
    ("pynccl._native.streams",),
    ("pynccl._native.callconfig",),
    ("pynccl._native.issue",),
    ("pynccl._native.dtypes", "pynccl._native.register"),
    ("pynccl._native.ops",),
    ("pynccl._native.onesided",),
    ("pynccl._native.uneven",),
    ("pynccl._native.lifecycle",),
    ("pynccl._native",),
    ("pynccl._engines", "pynccl._flight", "pynccl._info"),
    ("pynccl._work",),
    ("pynccl._reactor",),
    ("pynccl._registration",),
    ("pynccl._communicator", "pynccl._group", "pynccl._stream"),
    ("pynccl._memory",),
    ("pynccl._connect",),
    ("pynccl",),
    ("pynccl._host",),
    ("pynccl.testing", "pynccl._tools"),
    ("pynccl.__main__",),
)
# Packages that stand on one line as a whole; of any other, each module has a line of its own.
WHOLE = ("pynccl._bootstrap", "pynccl._tools")
PUBLIC = {"errors", "types", "config", "testing", "__init__", "__main__"}
# What a package may see of pynccl, where that is less than everything below it.
ONLY = {"pynccl._bootstrap": ("pynccl.errors", "pynccl._bootstrap")}
C_ROOMS = {
    "abi": ("abi",),
    "bind": ("bind", "abi"),
    "host": ("host", "abi"),
    "noop": ("noop", "abi"),
    "preload": ("preload",),
}
FORBIDDEN_HEADERS = re.compile(r"Python\.h|numpy/|cuda|nccl\.h|dlpack/")


def module_name(path: Path, root: Path) -> str:
    parts = list(path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> int | None:
    """The line on which a module stands, or None where no line names it."""
    place = next((package for package in WHOLE if _inside(module, package)), module)
    return next((height for height, names in enumerate(LAYERS) if place in names), None)


def imports(path: Path, root: Path) -> Iterator[str]:
    """Every module or name of pynccl that a file imports or cimports, fully spelt.

    Imports inside functions and under TYPE_CHECKING count: they are arrows all the same.
    """
    package = module_name(path, root)
    if path.stem != "__init__":
        package = package.rpartition(".")[0]
    for base, level, names in _statements(path):
        start = base
        if level:
            kept = package.split(".")
            kept = kept[: len(kept) - level + 1]
            start = ".".join([*kept, base] if base else kept)
        for found in [f"{start}.{name}" for name in names] if names else [start]:
            if found == "pynccl" or found.startswith("pynccl."):
                yield found


def _statements(path: Path) -> Iterator[tuple[str, int, list[str]]]:
    """(module, leading dots, names) of each import; names is empty for `import module`."""
    text = path.read_text("utf-8")
    if path.suffix in (".py", ".pyi"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, 0, []
            elif isinstance(node, ast.ImportFrom):
                yield node.module or "", node.level, [alias.name for alias in node.names]
        return
    text = re.sub(r"#[^\n]*", "", text)
    pattern = r"^[ \t]*from[ \t]+(\.*)([\w.]*)[ \t]+c?import[ \t]+(?:\(([^)]*)\)|([^\n]+))"
    for dots, base, bracketed, plain in re.findall(pattern, text, flags=re.M):
        names = [part.split()[0] for part in (bracketed or plain).split(",") if part.strip()]
        yield base, len(dots), names
    for listed in re.findall(r"^[ \t]*c?import[ \t]+([\w., \t]+)", text, flags=re.M):
        for part in listed.split(","):
            yield part.split()[0], 0, []


def modules(root: Path) -> dict[str, list[Path]]:
    """Each module of the package with its files: a Cython module has up to three."""
    found: dict[str, list[Path]] = {}
    for path in tree.files(root, "pynccl", suffixes=(".py", ".pyi", ".pyx", ".pxd")):
        found.setdefault(module_name(path, root), []).append(path)
    return found


def _target(name: str, known: dict[str, list[Path]]) -> str:
    """The module that an imported name comes from: itself, or what it is defined in."""
    planned = {module for names in LAYERS for module in names}
    while name not in known and name not in planned and "." in name:
        name = name.rpartition(".")[0]
    return name


def python_arrows(root: Path) -> list[str]:
    """Imports that run up, leave the layers, or see more than ONLY lets them."""
    breaches = []
    known = modules(root)
    for module, paths in known.items():
        height = layer(module)
        if height is None:
            breaches.append(f"{module}: stands in no layer")
            continue
        for path in paths:
            for name in imports(path, root):
                target = _target(name, known)
                other = layer(target)
                where = f"{path.relative_to(root)}: imports {target}"
                if other is not None and other > height:
                    breaches.append(f"{where}, which is above it")
                for package, allowed in ONLY.items():
                    if _inside(module, package) and not any(
                        _inside(target, a) for a in allowed
                    ):
                        breaches.append(f"{where}, but may see only {', '.join(allowed)}")
    return breaches


def _inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def python_cycles(root: Path) -> list[str]:
    """Modules of one layer that import each other in a circle."""
    known = modules(root)
    graph = {
        module: {_target(name, known) for path in paths for name in imports(path, root)}
        - {module}
        for module, paths in known.items()
    }
    done: set[str] = set()
    breaches: list[str] = []

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            breaches.append(" -> ".join([*trail[trail.index(module) :], module]))
        elif module not in done:
            for target in sorted(graph.get(module, ())):
                visit(target, [*trail, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return breaches


def module_names(root: Path) -> list[str]:
    """Modules of the package itself that are neither public on purpose nor private by name."""
    return [
        f"pynccl/{path.name}: neither a public module nor private (_{path.name})"
        for path in tree.files(root, "pynccl", suffixes=(".py", ".pyx"))
        if path.parent == root / "pynccl"
        and path.stem not in PUBLIC
        and not path.stem.startswith("_")
    ]


def extern_declarations(root: Path) -> list[str]:
    """C declared outside abi.pxd, C pasted into Cython, and a .pyx pasted into another."""
    breaches = []
    for path in tree.files(root, "pynccl", suffixes=(".pyx", ".pxd")):
        where, text = path.relative_to(root), path.read_text("utf-8")
        for source in re.findall(r"^\s*cdef extern from ([^\s:]+)", text, flags=re.M):
            # What belongs to CPython may be declared where it is used, as cimports of it are.
            if source == "*":
                breaches.append(f"{where}: holds C code, which belongs in src/bind")
            elif source.strip("\"'") != "Python.h" and path.name != "abi.pxd":
                breaches.append(f"{where}: declares {source}, which belongs in abi.pxd")
        if re.search(r"^\s*include\b", text, flags=re.M):
            breaches.append(f"{where}: includes another source file")
    return breaches


def c_arrows(root: Path) -> list[str]:
    """Includes that leave a C room for one it must not know, or bring in Python or a vendor."""
    breaches = []
    for path in tree.files(root, "src", suffixes=(".c", ".h")):
        room = path.relative_to(root / "src").parts[0]
        where = path.relative_to(root)
        if room not in C_ROOMS:
            breaches.append(f"{where}: lies in a room that has no rule")
            continue
        for quote, name in re.findall(
            r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)', path.read_text("utf-8"), re.M
        ):
            if quote == "<":
                if FORBIDDEN_HEADERS.match(name):
                    breaches.append(f"{where}: includes <{name}>")
                continue
            source, target = (root / "src").resolve(), (path.parent / name).resolve()
            inside = target.is_relative_to(source) and target.relative_to(source).parts[0]
            if inside not in C_ROOMS[room]:
                breaches.append(
                    f'{where}: includes "{name}", but {room} knows only {C_ROOMS[room]}'
                )
    return breaches
