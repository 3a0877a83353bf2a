"""What a rule is, and the list of all of them.

A rule is a function that makes calls and says what each must return. It is asked of a library
in a thread of its own, since the state of a group belongs to a thread. Rules differ in what
they need:

NOTHING
    holds on any machine, with or without a device;
NO_DEVICE
    is about a machine without a device;
DEVICES
    needs devices, and speaks to the library and the driver only by their public functions, so
    that it can be asked of real GPUs too;
HOST
    needs devices and a setting of the host engine.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from conformance.trial import Trial

    Body: TypeAlias = Callable[[Trial], None]


class Needs(enum.Enum):
    """What must be there for a rule to be asked."""

    NOTHING = "nothing"
    NO_DEVICE = "no device"
    DEVICES = "devices"
    HOST = "the host engine"


@dataclass(frozen=True)
class Rule:
    """One rule: its section, what it says, and the function that asks."""

    section: str
    says: str
    body: Body
    needs: Needs
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Section and text: rules are known by it."""
        return f"{self.section}: {self.says}"


RULES: list[Rule] = []


def rule(
    section: str, says: str, needs: Needs = Needs.NOTHING, **settings: str
) -> Callable[[Body], Body]:
    """Make a rule of a function; `settings` are the keys and values of pn_host_set."""

    def add(body: Body) -> Body:
        RULES.append(Rule(section, says, body, needs, settings))
        return body

    return add


def every_rule() -> list[Rule]:
    """All rules, in the order of the sections; names are unique."""
    from conformance import modules

    modules.load()
    names = [one.name for one in RULES]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ValueError(f"two rules have one name: {sorted(repeated)}")
    return RULES
