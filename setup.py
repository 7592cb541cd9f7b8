"""Everything is in pyproject.toml, save the C parts of Messenger, the KV store, the block hashes and the Conductor: without a C compiler
they are left out, and Python does their work."""

from glob import glob

from setuptools import Extension, setup


def native(package: str, **options: list[str]) -> Extension:
    return Extension(
        f"{package}._native",
        sources=sorted(glob(f"{package}/native/*.c")),
        depends=sorted(glob(f"{package}/native/*.h")),
        extra_compile_args=["-std=gnu11", "-O2", "-ffp-contract=off", "-Wall", "-Wextra"],
        optional=True,
        **options,
    )


setup(ext_modules=[native("messenger", extra_link_args=["-pthread"]), native("kvstore"), native("springtide"), native("conductor")])
