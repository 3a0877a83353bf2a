"""Keep our sockets out of forked children.

A forked worker (a data loader, say) inherits every descriptor. If it outlives its parent, the
connection it knows nothing about stays open, and the peers never learn that the parent died; a
listener stays bound, and the next attempt finds its port in use.
"""

from __future__ import annotations

import os
import weakref

_held: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
_registered = False


def forget_in_child(owner: object, descriptor: int) -> None:
    """Let go of `descriptor` in every child forked from now until `drop`, or `owner` dies."""
    global _registered  # the process has one fork hook
    if not _registered and hasattr(os, "register_at_fork"):
        _registered = True
        os.register_at_fork(after_in_child=_let_go)
    _held[owner] = descriptor


def drop(owner: object) -> None:
    """Forget an owner that closes its descriptor: the number may soon be another file."""
    _held.pop(owner, None)


def _let_go() -> None:
    if not _held:
        return
    # Not close(): objects in the child still own the numbers and would close somebody else's
    # file.
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in list(_held.values()):
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
    _held.clear()
