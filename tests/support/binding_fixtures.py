"""The fixtures of tests/binding for other folders: tempers, loops, coroutine tests, no leaks.

A conftest imports the names that it wants; what tests/binding has to offer by name (`cliques`,
`foreign_stream`) can be imported then, too.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

BINDING = Path(__file__).parent.parent / "binding"


def _load() -> ModuleType:
    sys.path.append(str(BINDING))
    spec = importlib.util.spec_from_file_location("binding_conftest", BINDING / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_conftest = _load()
temper = _conftest.temper
loop = _conftest.loop
nothing_left = _conftest.nothing_left
pytest_pyfunc_call = _conftest.pytest_pyfunc_call
pytest_runtest_makereport = _conftest.pytest_runtest_makereport
