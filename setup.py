"""The compiled parts: what pyproject.toml cannot say.

Four shared objects without Python (the engine room, two engines, and an auditor of the dynamic
linker that brings one of them to other programs), and the extensions that
are linked to the engine room, so that its static state exists once.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
# Floating-point results are part of the engine's contract: no contraction, whatever CFLAGS say.
C_FLAGS = [
    "-std=gnu11",
    "-O3",
    "-g",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
]


def c_sources(room: str) -> list[str]:
    """The C files of a room of src."""
    return sorted(str(path.relative_to(HERE)) for path in (HERE / "src" / room).glob("*.c"))


def headers() -> list[str]:
    """Every header of src: a change of one rebuilds everything."""
    return sorted(str(path.relative_to(HERE)) for path in (HERE / "src").rglob("*.h"))


def profiling_names() -> list[str]:
    """NCCL's second name of each function, which an interposed library calls in its own."""
    lists = "".join(
        (HERE / "src" / "abi" / f"{n}.h").read_text("ascii") for n in ("symbols", "rest")
    )
    names = re.findall(r"^ *X\(.*, (nccl[A-Z]\w+), \(", lists, flags=re.M)
    return [f"-Wl,--defsym=p{name}={name}" for name in names]


class SharedObject(Extension):
    """A plain shared object in the package: ``name`` is its file's path without the ending."""

    def __init__(
        self, name: str, room: str, flags: list[str], link_flags: list[str] | None = None
    ) -> None:
        # symbolic: others, JAX among them, bring globals with the driver's names along.
        # nodelete: threads of ours may be inside it until the process ends.
        libraries = ["-Wl,-Bsymbolic", "-Wl,-z,defs", "-Wl,-z,nodelete"]
        libraries += ["-lpthread", "-ldl", "-lm"]
        super().__init__(
            name,
            c_sources(room),
            depends=headers(),
            extra_compile_args=C_FLAGS + flags,
            extra_link_args=libraries + (link_flags or []),
        )


class BuildExt(build_ext):
    """Builds shared objects under plain names, and links the extensions to the engine room."""

    def get_ext_filename(self, fullname: str) -> str:
        """No interpreter's tag in the name of what has no Python inside."""
        last = fullname.rpartition(".")[2]
        for extension in self.extensions:
            if (
                isinstance(extension, SharedObject)
                and extension.name.rpartition(".")[2] == last
            ):
                return str(Path(*fullname.split("."))) + ".so"
        return super().get_ext_filename(fullname)

    def build_extension(self, extension: Extension) -> None:
        """Link an extension to the engine room beside it."""
        if not isinstance(extension, SharedObject):
            # The engine room lies beside the extensions, in a wheel and in place alike.
            room = Path(self.get_ext_fullpath(extension.name)).parent
            extension.library_dirs.append(os.fspath(room))
        super().build_extension(extension)


def cython_extensions() -> list[Extension]:
    """One extension for each Cython module."""
    extensions = [
        Extension(
            f"pynccl._native.{path.stem}",
            [str(path.relative_to(HERE))],
            include_dirs=["src"],
            libraries=["pynccl_bind"],
            depends=headers(),
            extra_compile_args=["-std=gnu11", "-O3", "-g"],
            extra_link_args=["-Wl,-rpath,$ORIGIN"],
        )
        for path in sorted((HERE / "pynccl" / "_native").glob("*.pyx"))
    ]
    directives = {
        "language_level": 3,
        "boundscheck": False,
        "wraparound": False,
        "initializedcheck": False,
        "cdivision": True,
        "embedsignature": True,
        "embedsignature.format": "python",
    }
    return cythonize(extensions, compiler_directives=directives, build_dir="build/cython")


setup(
    ext_modules=[
        SharedObject("pynccl._native.libpynccl_bind", "bind", ["-fvisibility=default"]),
        SharedObject("pynccl._native.libpynccl_host", "host", [], profiling_names()),
        SharedObject("pynccl._native.libpynccl_noop", "noop", []),
        SharedObject("pynccl._native.libpynccl_preload", "preload", []),
        *cython_extensions(),
    ],
    cmdclass={"build_ext": BuildExt},
)
