"""Everything is in pyproject.toml, save the C parts of Messenger, the KV store, the block hashes, the Conductor and the engine. They are no
option: a build that cannot have them ends with one line that says what it lacks."""

import platform
import shutil
from collections.abc import Sequence
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, ExecError, PlatformError


class BuildNative(build_ext):
    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (CCompilerError, ExecError, PlatformError) as error:
            raise SystemExit(self._lack() or f"{ext.name}, a C part of Springtide, does not build: {error}") from None

    def _lack(self) -> str | None:
        """Of what a machine most often has not."""
        command = self.compiler.compiler_so[0]
        if shutil.which(command) is None:
            return f"Springtide needs a C compiler, and there is no {command} (on Debian and Ubuntu: apt-get install gcc python3-dev)"
        if not any(Path(directory, "Python.h").exists() for directory in self.include_dirs):
            return "Springtide needs Python's headers, and there is no Python.h (on Debian and Ubuntu: apt-get install python3-dev)"
        return None


def native(package: str, *compile_args: str, link_args: Sequence[str] = ()) -> Extension:
    return Extension(
        f"{package}._native",
        sources=sorted(glob(f"{package}/native/*.c")),
        depends=sorted({*glob(f"{package}/native/**/*.h", recursive=True), "springtide/native/buffers.h"}),
        extra_compile_args=["-std=gnu11", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", *compile_args],
        extra_link_args=list(link_args),
    )


# torch has loaded its own libgomp of this name by then: both share one pool of threads.
KERNELS = native("engine", "-O3", "-fopenmp", link_args=["-fopenmp", "-lm"])

setup(
    cmdclass={"build_ext": BuildNative},
    ext_modules=[
        native("messenger", link_args=["-pthread"]),
        native("kvstore"),
        native("springtide"),
        native("conductor"),
        # Written in the vectors of x86-64; on any other processor models are computed by torch.
        *([KERNELS] if platform.machine() == "x86_64" else []),
    ],
)
