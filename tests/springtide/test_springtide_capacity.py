from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from springtide.capacity import check_memory, context_tokens, memory_bytes
from springtide.config import ClusterConfig, load_config
from springtide.errors import ConfigError
from springtide.modelinfo import ModelInfo

MODEL = ModelInfo("/model", "tiny", "llama", "fingerprint-1", 8192, 2, 1, 8, 100, (0,))
BLOCK_TOKENS = 16
SLOT_BYTES = MODEL.kv_spec("bfloat16", BLOCK_TOKENS).bytes_per_slot


def config(**overrides: object) -> ClusterConfig:
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_config(overrides={"kv.block_tokens": BLOCK_TOKENS, **dotted}, environ={})


@pytest.mark.parametrize(
    ("slots", "max_context", "expected"),
    [(1024, None, 8192), (512, None, 8192), (511, None, 511 * BLOCK_TOKENS), (2, None, 2 * BLOCK_TOKENS), (511, 100, 100), (2, 100, 32)],
)
def test_a_sequence_has_at_most_the_models_context_and_at_most_an_arena(slots: int, max_context: int | None, expected: int) -> None:
    assert context_tokens(config(kv__arena_size=slots * SLOT_BYTES + 1, max_context=max_context), MODEL) == expected


def test_an_arena_without_room_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"kv\.arena_size: .* has room for 1 blocks"):
        context_tokens(config(kv__arena_size=2 * SLOT_BYTES - 1), MODEL)


def test_all_nodes_arenas_together_must_fit_into_the_machine() -> None:
    kv = config(kv__arena_size="4GiB").kv
    check_memory(kv, 2, 8 << 30)
    with pytest.raises(ConfigError, match=r"kv\.arena_size: 2 nodes with 4294967296 bytes each take more than this machine's memory"):
        check_memory(kv, 2, (8 << 30) - 1)


def test_arenas_of_huge_pages_must_fit_into_those_that_are_free(tmp_path: Path) -> None:
    kv = config(kv__arena_size="4MiB", kv__hugepages="2MiB").kv
    numbers = {"free_hugepages": 4, "resv_hugepages": 1, "nr_overcommit_hugepages": 2, "surplus_hugepages": 1}
    (tmp_path / "hugepages-2048kB").mkdir()
    for name, number in numbers.items():
        (tmp_path / "hugepages-2048kB" / name).write_text(f"{number}\n")
    check_memory(kv, 2, 0, tmp_path)
    with pytest.raises(ConfigError, match=r"kv\.hugepages: 3 nodes with 4194304 bytes each .* 8388608 bytes; reserve more"):
        check_memory(kv, 3, 1 << 40, tmp_path)
    with pytest.raises(ConfigError, match=r"kv\.hugepages: this machine has no pages of 1073741824 bytes; .* hugepages-2048kB"):
        check_memory(config(kv__hugepages="1GiB").kv, 1, 1 << 40, tmp_path)
    with pytest.raises(ConfigError, match=r"kv\.hugepages .*power of two"):
        config(kv__hugepages="3MiB")


@pytest.mark.parametrize(
    ("cgroups", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "1048576"}, 1 << 20),
        ("0::/a\n", {"a/memory.max": "2097152", "memory.max": "4194304"}, 2 << 20),
        ("4:memory:/a/b\n0::/\n", {"memory/a/memory.limit_in_bytes": "1048576"}, 1 << 20),
        ("4:memory:/gone\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, psutil.virtual_memory().total),
        ("3:cpu:/a\n", {"a/memory.max": "1"}, psutil.virtual_memory().total),
    ],
)
def test_a_control_group_may_have_less_than_the_machine(tmp_path: Path, cgroups: str, files: dict[str, str], expected: int) -> None:
    (tmp_path / "cgroup").write_text(cgroups)
    root = tmp_path / "fs"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    assert memory_bytes(tmp_path / "cgroup", root) == expected
