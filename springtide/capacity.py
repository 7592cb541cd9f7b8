"""What arenas of the configured size can hold, and whether a machine can hold them."""

from __future__ import annotations

from pathlib import Path

import psutil

from springtide.config import ClusterConfig, KVConfig
from springtide.errors import ConfigError
from springtide.modelinfo import KVSpec, ModelInfo

MIN_SLOTS = 2
_CGROUPS = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_HUGEPAGES = Path("/sys/kernel/mm/hugepages")


def arena_slots(kv: KVConfig, spec: KVSpec) -> int:
    """Raises ConfigError when an arena has no room for blocks."""
    slots = kv.arena_size // spec.bytes_per_slot
    if slots < MIN_SLOTS:
        raise ConfigError(
            f"kv.arena_size: {kv.arena_size} bytes has room for {slots} blocks; a block of {spec.block_tokens} tokens takes "
            f"{spec.bytes_per_slot} bytes with this model, and it must be room for at least {MIN_SLOTS}"
        )
    return slots


def context_tokens(config: ClusterConfig, info: ModelInfo) -> int:
    """The most tokens of one prompt and its output together: the model's context, or what one node's arena holds where that is less, for
    the node that decodes a sequence has all of it. Raises ConfigError when an arena has no room for blocks."""
    spec = info.kv_spec(config.dtype, config.kv.block_tokens)
    return min(config.max_context or info.context_length, info.context_length, arena_slots(config.kv, spec) * spec.block_tokens)


def quota_slots(kv: KVConfig, spec: KVSpec) -> dict[str, int]:
    """The slots of each tenant with a quota, `*` being every other. Raises ConfigError when one may not hold a single block."""
    quotas = {tenant: num_bytes // spec.bytes_per_slot for tenant, num_bytes in kv.tenant_quotas.items()}
    for tenant, slots in quotas.items():
        if slots < 1:
            raise ConfigError(
                f"kv.tenant_quotas: {kv.tenant_quotas[tenant]} bytes for {tenant!r} have no room for a block; one of "
                f"{spec.block_tokens} tokens takes {spec.bytes_per_slot} bytes with this model"
            )
    return quotas


def quota_tokens(config: ClusterConfig, info: ModelInfo) -> dict[str, int]:
    """The most tokens of one prompt and its output together that a tenant's quota holds; as `quota_slots`."""
    spec = info.kv_spec(config.dtype, config.kv.block_tokens)
    return {tenant: slots * spec.block_tokens for tenant, slots in quota_slots(config.kv, spec).items()}


def check_memory(kv: KVConfig, num_nodes: int, machine_bytes: int, hugepages: Path = _HUGEPAGES) -> None:
    """Raises ConfigError when a machine does not have the memory for so many nodes' arenas, or not the pages that they are to be of."""
    each = f"{num_nodes} nodes with {kv.arena_size} bytes each take" if num_nodes > 1 else f"{kv.arena_size} bytes is"
    if kv.hugepages and num_nodes > 0:
        if num_nodes * kv.arena_size > (free_bytes := _free_hugepage_bytes(kv.hugepages, hugepages)):
            raise ConfigError(
                f"kv.hugepages: {each} more than this machine has free in pages of {kv.hugepages} bytes, {free_bytes} bytes; reserve more "
                "of them (vm.nr_hugepages), or make kv.arena_size smaller"
            )
    elif num_nodes * kv.arena_size > machine_bytes:
        raise ConfigError(
            f"kv.arena_size: {each} more than this machine's memory, {machine_bytes} bytes, of which the model needs its part too"
        )


def _free_hugepage_bytes(page_bytes: int, root: Path) -> int:
    """What is reserved of such pages and promised to nobody, or may be had beyond that. Raises ConfigError."""
    pages = root / f"hugepages-{page_bytes >> 10}kB"
    if not pages.is_dir():
        there = ", ".join(sorted(path.name for path in root.glob("hugepages-*"))) or "none"
        raise ConfigError(f"kv.hugepages: this machine has no pages of {page_bytes} bytes; in {root} there are {there}")
    free, promised, beyond, beyond_used = (
        int((pages / name).read_text()) for name in ("free_hugepages", "resv_hugepages", "nr_overcommit_hugepages", "surplus_hugepages")
    )
    return (free - promised + max(0, beyond - beyond_used)) * page_bytes


def memory_bytes(cgroups: Path = _CGROUPS, root: Path = _CGROUP_ROOT) -> int:
    """The memory of the machine, or of the control group of this process, or of one around it, where that has less."""
    limits = [int(text) for path in _limits(cgroups, root) if path.is_file() and (text := path.read_text().strip()).isdigit()]
    return min([psutil.virtual_memory().total, *limits])


def _limits(cgroups: Path, root: Path) -> list[Path]:
    """Where the limits of memory may be written, in cgroups of version 1 and 2."""
    files = []
    for line in cgroups.read_text().splitlines() if cgroups.exists() else ():
        _, controllers, group = line.split(":", 2)
        if controllers in ("", "memory"):
            name, top = ("memory.limit_in_bytes", root / "memory") if controllers else ("memory.max", root)
            own = top / group.lstrip("/")
            files += [directory / name for directory in (own, *own.parents) if directory.is_relative_to(top)]
    return files
