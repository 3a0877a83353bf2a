"""The kinds of event loops on which the tests run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any

KINDS = ["plain", "debug", "uvloop", *(["eager"] if sys.version_info >= (3, 12) else [])]


def run_on(kind: str, main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end on a fresh loop of a kind."""
    if kind == "uvloop":
        import uvloop

        uvloop.run(main)
        return

    async def eagerly() -> None:
        factory: Any = getattr(asyncio, "eager_task_factory")  # noqa: B009 (Python 3.12)
        asyncio.get_running_loop().set_task_factory(factory)
        await main

    asyncio.run(eagerly() if kind == "eager" else main, debug=kind == "debug")
