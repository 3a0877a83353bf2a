"""What the public modules show to users: names, docstrings, and the C functions behind them."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType

import tree

PUBLIC_MODULES = ("pynccl", "pynccl.errors", "pynccl.types", "pynccl.config", "pynccl.testing")


def public_modules() -> Iterator[ModuleType]:
    """The public modules that the tree has, imported from wherever pynccl is installed."""
    for name in PUBLIC_MODULES:
        path = tree.ROOT.joinpath(*name.split("."))
        if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
            yield importlib.import_module(name)


def export_breaches(module: ModuleType) -> list[str]:
    """Where `__all__` is not sorted, or not exactly what the module shows."""
    name, listed = module.__name__, getattr(module, "__all__", None)
    if listed is None:
        return [f"{name}: has no __all__"]
    breaches = []
    if list(listed) != sorted(set(listed)):
        breaches.append(f"{name}: __all__ is not sorted and unique")
    breaches += [
        f"{name}: __all__ names {n}, which is not there"
        for n in listed
        if not hasattr(module, n)
    ]
    breaches += [
        f"{name}: shows {shown}, which __all__ does not name"
        for shown, value in vars(module).items()
        if not shown.startswith("_") and shown not in listed and _is_shown(module, value)
    ]
    return breaches


def _is_shown(module: ModuleType, value: object) -> bool:
    # The package shows what it binds; a module may also bind what it imports for its own use.
    if isinstance(value, ModuleType):
        return False
    if module.__name__ == "pynccl":
        return type(value).__module__ != "__future__"
    return getattr(value, "__module__", None) == module.__name__


def public_objects(module: ModuleType) -> Iterator[tuple[str, object]]:
    """The exported classes and functions, with the classes' public methods and properties."""
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name, None)
        if inspect.isclass(value):
            yield f"{module.__name__}.{name}", value
            for member, found in vars(value).items():
                if not member.startswith("_") and _is_described(found):
                    yield f"{module.__name__}.{name}.{member}", found
        elif inspect.isroutine(value) or _is_described(value):
            yield f"{module.__name__}.{name}", value


def _is_described(member: object) -> bool:
    return (
        inspect.isroutine(member)
        or isinstance(member, (property, classmethod, staticmethod))
        or type(member).__name__ in ("cython_function_or_method", "getset_descriptor")
    )


def docstring_breaches(module: ModuleType) -> list[str]:
    return [
        f"{name}: has no docstring"
        for name, value in public_objects(module)
        if not (getattr(value, "__doc__", None) or "").strip()
    ]


def operation_names(symbols: str) -> dict[str, str]:
    """The Python name of each NCCL function in symbols.h: ncclAllReduce is all_reduce."""
    names = {}
    for function in re.findall(r"\b(nccl[A-Z]\w*), \(", symbols):
        plain = function.removeprefix("nccl").removeprefix("Comm").replace("Allto", "AllTo")
        words = re.findall(r"[A-Z][a-z0-9]*", plain)
        names["_".join(words).lower()] = function
    return names


def c_name_breaches(cls: type, symbols: str) -> list[str]:
    """Methods that stand for an NCCL function and do not name it in their docstring."""
    functions = operation_names(symbols)
    return [
        f"{cls.__name__}.{name}: does not name {functions[name]}"
        for name, value in vars(cls).items()
        if name in functions and functions[name] not in (getattr(value, "__doc__", None) or "")
    ]
