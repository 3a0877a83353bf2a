"""The modules that hold rules; importing them fills the list."""

from __future__ import annotations

import importlib

NAMES = (
    "rules_groups",
    "rules_states",
    "rules_background",
    "rules_creation",
    "rules_children",
    "rules_endings",
    "rules_collectives",
    "rules_arithmetic",
    "rules_messages",
    "rules_streams",
    "rules_capture",
    "rules_memory",
    "rules_device",
    "rules_onesided",
    "rules_percall",
    "rules_library",
)


def load() -> None:
    """Import all of them."""
    for name in NAMES:
        importlib.import_module(f"conformance.{name}")
