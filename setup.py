"""Everything is in pyproject.toml, save the C parts of Messenger, the KV store, the block hashes, the Conductor and the engine: without a
C compiler they are left out, and Python does their work."""

from collections.abc import Sequence
from glob import glob

from setuptools import Extension, setup


def native(package: str, *compile_args: str, link_args: Sequence[str] = ()) -> Extension:
    return Extension(
        f"{package}._native",
        sources=sorted(glob(f"{package}/native/*.c")),
        depends=sorted({*glob(f"{package}/native/*.h"), "springtide/native/buffers.h"}),
        extra_compile_args=["-std=gnu11", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", *compile_args],
        extra_link_args=list(link_args),
        optional=True,
    )


setup(
    ext_modules=[
        native("messenger", link_args=["-pthread"]),
        native("kvstore"),
        native("springtide"),
        native("conductor"),
        # torch has loaded its own libgomp of this name by then: both share one pool of threads.
        native("engine", "-O3", "-fopenmp", link_args=["-fopenmp", "-lm"]),
    ]
)
