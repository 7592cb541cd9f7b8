"""pyverbs, imported when it is first needed: a machine without RDMA devices need not have it."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from springtide.errors import SpringtideError

_SYSFS = Path("/sys/class/infiniband")
_ENUM_MODULES = ("pyverbs.libibverbs_enums", "pyverbs.enums")
"""Modules with the enums, in rdma-core 59 and in 44."""


class RdmaUnavailable(SpringtideError):
    """The machine cannot do RDMA, or not as it was asked to; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Verbs:
    """The modules of pyverbs that the transport uses. Untyped, as pyverbs is."""

    enums: Any
    addr: Any
    cq: Any
    device: Any
    mr: Any
    pd: Any
    qp: Any
    wr: Any
    error: type[Exception]
    """The error that a refused verb raises; its `error_code` is the errno."""


def kernel_devices() -> list[str]:
    """Names of the RDMA devices that this kernel has, sorted. It needs no pyverbs."""
    return sorted(path.name for path in _SYSFS.iterdir()) if _SYSFS.is_dir() else []


@functools.cache
def load() -> Verbs:
    """The modules of pyverbs. Raises RdmaUnavailable when pyverbs, or the libibverbs that it was built for, is missing."""
    try:
        modules = {name: importlib.import_module(f"pyverbs.{name}") for name in ("addr", "cq", "device", "mr", "pd", "qp", "wr")}
        error = importlib.import_module("pyverbs.pyverbs_error").PyverbsRDMAError
        return Verbs(enums=_enums(), error=error, **modules)
    except ImportError as problem:
        raise RdmaUnavailable(
            f"rdma needs pyverbs (pip install 'springtide[rdma]', or Debian's python3-pyverbs) and libibverbs: {problem}"
        ) from problem


def _enums() -> ModuleType:
    problem: ImportError | None = None
    for name in _ENUM_MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            problem = error
    assert problem is not None
    raise problem
