"""Which code a figure is of: the commit, whether the files were as committed, and git's hash of each package that it depends on.

Hashes of trees are compared, not histories: a shallow clone has them, too. Where there is no git at all nothing is known, and that is said.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parents[1]
NOT_THERE = "0" * 40
"""Hash of a package that the commit does not have."""
UNCOMMITTED = "uncommitted"
"""In the place of a hash, of a package whose files are not as committed."""

_STORE = ("springtide", "messenger", "kvstore")
_CORES = (*_STORE, "node_runtime", "prefill_node", "decode_node", "mixed_node", "conductor", "gateway", "simulator")
_CLUSTER = (*_STORE, "engine", "node_runtime", "prefill_node", "decode_node", "mixed_node", "conductor", "gateway", "deploy")
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "batches": _CLUSTER,
    "cluster": _CLUSTER,
    "conductor": ("springtide", "conductor", "gateway", "node_runtime"),
    "console": ("springtide", "conductor", "gateway"),
    "cpp": (*_CLUSTER, "simulator"),
    "caching": _CLUSTER,
    "moves": _CLUSTER,
    "engine": (*_STORE, "engine", "node_runtime", "prefill_node", "decode_node"),
    "fidelity": (*_CLUSTER, "simulator"),
    "fleet": ("springtide", "conductor", "gateway", "node_runtime", "deploy"),
    "gpu": ("springtide", "messenger", "engine"),
    "hostile": _CLUSTER,
    "index": ("springtide", "kvstore"),
    "kv_codecs": ("springtide", "engine"),
    "kv_quantisation": ("springtide", "engine"),
    "kvstore": _STORE,
    "messenger": ("springtide", "messenger"),
    "replay": _CORES,
    "room": _CLUSTER,
    "scaling": (*_CLUSTER, "simulator"),
    "serve": (*_CLUSTER, "simulator"),
    "setup": (*_CLUSTER, "tests", "Makefile", "pyproject.toml", "constraints.txt"),
    "simulator": _CORES,
    "speculation": _CLUSTER,
    "structured": _CLUSTER,
    "ssd": ("springtide", "kvstore"),
    "tracing": _CLUSTER,
}
"""What the figures of each benchmark depend on, from the root of the repository, beside the benchmark itself."""
_WRITTEN_BY = {"kv_codecs": "kv_compression", "kv_quantisation": "kv_compression"}
"""Where a benchmark has another name than its results."""


def packages_of(name: str) -> tuple[str, ...]:
    """The packages behind `results/NAME.json`, NAME being a benchmark's, or that with a hyphen and more, and last the benchmark's own file.
    Raises KeyError for others."""
    benchmark = name.partition("-")[0]
    return (*PACKAGES[benchmark], f"benchmarks/{_WRITTEN_BY.get(benchmark, benchmark)}.py")


def provenance(name: str) -> dict[str, Any]:
    """`commit`, empty where there is no git; `dirty`, whether what the figures of the benchmark depend on, itself included, is other than
    committed, None where that is not known; `trees`, package -> hash."""
    packages = packages_of(name)
    changed = _uncommitted([*packages, "benchmarks", ":!benchmarks/results"])
    return {
        "commit": _git("rev-parse", "--short", "HEAD") or "",
        "dirty": None if changed is None else bool(changed),
        "trees": _committed(packages),
    }


def trees() -> dict[str, str]:
    """Every package -> its hash as it is now. Empty where there is no git."""
    packages = sorted({package for name in PACKAGES for package in packages_of(name)})
    changed = _uncommitted(packages) or []
    return _committed(packages) | {package: UNCOMMITTED for package in packages if any(_within(path, package) for path in changed)}


def changed_since(measured: Mapping[str, str], now: Mapping[str, str]) -> list[str] | None:
    """The packages that are no longer as they were `measured`. None: not known, of one of the two."""
    if not measured or not now:
        return None
    return [package for package, tree in measured.items() if now.get(package, NOT_THERE) != tree]


def _committed(packages: Collection[str]) -> dict[str, str]:
    if _git("rev-parse", "HEAD") is None:
        return {}
    return {package: _git("rev-parse", "--verify", "--quiet", f"HEAD:{package}") or NOT_THERE for package in packages}


def _uncommitted(paths: Sequence[str]) -> list[str] | None:
    """Files under `paths` that are not as committed. None: not known."""
    status = _git("status", "--porcelain", "--no-renames", "--untracked-files=all", "--", *paths)
    return None if status is None else [line[3:] for line in status.splitlines()]


def _within(path: str, package: str) -> bool:
    return path == package or path.startswith(f"{package}/")


def _git(*arguments: str) -> str | None:
    """What it printed, None where it could not. Somebody else's repository around an unpacked archive does not count."""
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(CHECKOUT.parent)}
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=CHECKOUT, env=environment)
    except FileNotFoundError:
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None
