"""The C compiler and the vendors' headers, as far as this machine has them."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

NO_CUDA_HEADERS = "no CUDA headers: waits for cuda.h (CUDA_HOME, /usr/local/cuda, a CUDA wheel)"

# What nccl.h takes from the CUDA headers it includes. With these it can be read on any machine.
STAND_INS = {
    "cuda_runtime.h": (
        "#define CUDART_VERSION 12000\n"
        "#include <stddef.h>\n"
        "typedef struct CUstream_st *cudaStream_t;\n"
        "typedef struct CUevent_st *cudaEvent_t;\n"
    ),
    # Beside our own declarations, theirs is the type.
    "cuda.h": "#ifndef PYNCCL_CUDA_ABI_H\ntypedef int CUmemLocationType;\n#endif\n",
    "cuda_fp16.h": "typedef struct { unsigned short bits; } __half;\ntypedef __half half;\n",
    "cuda_bf16.h": "typedef struct { unsigned short bits; } __nv_bfloat16;\n",
}


def compiler() -> list[str]:
    """The C compiler that builds the package: CC, else the first of cc, gcc, clang."""
    if chosen := os.environ.get("CC"):
        return shlex.split(chosen)
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path]
    raise FileNotFoundError("no C compiler: set CC")


def compile_c(
    source: str,
    directory: Path,
    *,
    include: tuple[Path, ...] = (),
    flags: tuple[str, ...] = (),
) -> tuple[Path, str]:
    """Compile the text of a C program; gives the binary's path and what the compiler said.

    An empty string means that it compiled. The vendors' folders are system folders to the
    compiler, so that only our own text is held to our warnings.
    """
    program = directory / "program.c"
    program.write_text(source)
    binary = directory / "program"
    command = [*compiler(), "-std=gnu11", "-Wall", "-Wextra", "-Werror", *flags]
    for folder in include:
        command += ["-isystem", str(folder)]
    command += [str(program), "-o", str(binary)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return binary, "" if done.returncode == 0 else done.stderr or f"exit {done.returncode}"


def run_table(binary: Path) -> dict[str, int]:
    """Run a program that prints `name value` lines."""
    done = subprocess.run([str(binary)], capture_output=True, text=True, timeout=60, check=True)
    return {
        name: int(value)
        for name, value in (line.rsplit(" ", 1) for line in done.stdout.splitlines())
    }


def site_folders() -> list[Path]:
    folders = [sysconfig.get_path("platlib"), sysconfig.get_path("purelib"), *sys.path]
    return [
        Path(folder) for folder in dict.fromkeys(folders) if folder and Path(folder).is_dir()
    ]


def nccl_wheel() -> Path | None:
    """The folder of the installed NCCL wheel: include/nccl.h and lib/libnccl.so.2 are in it."""
    for site in site_folders():
        folder = site / "nvidia" / "nccl"
        if (folder / "include" / "nccl.h").is_file():
            return folder
    return None


def write_stand_ins(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    for name, text in STAND_INS.items():
        (directory / name).write_text(f"#pragma once\n{text}")
    return directory


def cuda_header_folders() -> tuple[Path, ...]:
    """Folders that hold cuda.h and what it needs, or an empty tuple.

    CUDA_HOME wins over /usr/local/cuda, and both over the wheels; the wheels split the toolkit
    into several folders, all of which are given.
    """
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home and (Path(home) / "include" / "cuda.h").is_file():
            return (Path(home) / "include",)
    wheels = tuple(
        folder
        for site in site_folders()
        for folder in sorted((site / "nvidia").glob("*/include"))
        if folder.parent.name != "nccl"
    )
    return wheels if any((folder / "cuda.h").is_file() for folder in wheels) else ()


def dlpack_header() -> Path | None:
    """The newest dlpack.h that an installed package ships, by its own version macros."""
    candidates = {"tvm_ffi": "include/dlpack/dlpack.h", "torch": "include/ATen/dlpack.h"}
    found = []
    for package, path in candidates.items():
        spec = importlib.util.find_spec(package)
        for location in (spec.submodule_search_locations or ()) if spec else ():
            if (header := Path(location) / path).is_file():
                found.append(header)
    return max(found, key=_dlpack_version, default=None)


def _dlpack_version(header: Path) -> tuple[int, ...]:
    text = header.read_text("utf-8")
    return tuple(
        int(match[1])
        for part in ("MAJOR", "MINOR")
        if (match := re.search(rf"#define DLPACK_{part}_VERSION (\d+)", text))
    )
