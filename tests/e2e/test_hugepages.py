"""Arenas of huge pages (kv.hugepages)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.generate import generate
from tests.support.hugepages import HUGEPAGE_BYTES, reserved
from tests.support.models import make_tiny_llama
from tests.support.profiles import TINY_PROFILE
from tests.support.reference import Reference, random_prompt

ARENA_BYTES = 64 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=4)


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Cluster]:
    settings = {
        "kv": {"arena_size": ARENA_BYTES, "hugepages": HUGEPAGE_BYTES},
        "profile": TINY_PROFILE,
        "prefill_node": {"threads": 1},
        "decode_node": {"threads": 1, "tensor_parallel": 2},
    }
    with reserved(2 * (ARENA_BYTES // HUGEPAGE_BYTES + 1)), Cluster(model=str(model), dtype="float32", **settings) as cluster:
        yield cluster


def page_sizes(cluster: Cluster, name: str) -> set[int]:
    """Of all arenas that the process has mapped, by the kernel's account."""
    mapped = Path(f"/proc/{cluster.pid_of(name)}/smaps").read_text()
    return {int(found) << 10 for found in re.findall(r"memfd:springtide-arena.*\n(?:\w+:.*\n)*?KernelPageSize: +(\d+) kB", mapped)}


def test_stores_and_engines_compute_on_them_and_no_token_is_another(cluster: Cluster, model: Path) -> None:
    prompt = random_prompt(1, 150, 10, 250)
    for _ in range(2):
        assert generate(cluster.grpc_address, cluster.model, prompt, 8).token_ids == Reference.from_directory(model).greedy(prompt, 8)
    for name in ("prefill-0-store", "decode-0-store", "prefill-0", "decode-0"):
        assert page_sizes(cluster, name) == {HUGEPAGE_BYTES}, name


def test_the_store_that_comes_in_place_of_another_has_its_pages(cluster: Cluster) -> None:
    cluster.kill("decode-0-store")
    cluster.wait_ready(restarted="decode-0-store")
    assert page_sizes(cluster, "decode-0-store") == {HUGEPAGE_BYTES}
