"""A prefill group whose stages are on machines of their own, as far as addresses tell: each has one, and a store for its layers."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.ssd.format import Layout
from springtide.config import TlsConfig
from springtide.rpc import store_pb2, store_pb2_grpc
from tests.support.cluster import Cluster, cached_blocks, evict_all, metric_at
from tests.support.generate import Generated, generate
from tests.support.joined import JoinedNode
from tests.support.models import make_tiny_llama
from tests.support.reference import Reference, random_prompt

pytestmark = pytest.mark.hosts

STAGES = 2
LAYERS = 5
OUTPUT_TOKENS, BLOCK_TOKENS = 16, 16
SLAB_BYTES = 2 * BLOCK_TOKENS * 2 * 16 * 4
"""K and V of a block's tokens, of 2 heads of 16, in float32."""
CACHED, CHUNKS = "springtide_prefill_cached_tokens_total", "springtide_prefill_chunks_total"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def ssd_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ssd")


@pytest.fixture(scope="module")
def head(model: Path, ssd_dir: Path) -> Iterator[Cluster]:
    kv: dict[str, Any] = {"block_tokens": BLOCK_TOKENS, "arena_size": "16MiB", "transports": ["tcp"], "layer_group_size": 4096}
    kv |= {"ssd_dir": str(ssd_dir), "ssd_size": "64MiB", "demote_below": 1.0, "demote_until": 1.0}
    settings: dict[str, Any] = {"model": str(model), "served_model_name": "spread", "dtype": "float32", "device": "cpu"}
    settings["prefill_node"] = {"chunk_tokens": 128}
    with Cluster(**settings, kv=kv, prefill=0, decode=1, join_port=0, valkey_port=0, conductor={"admission": "baseline"}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def group(head: Cluster) -> Iterator[list[JoinedNode]]:
    with ExitStack() as stack:
        nodes = [JoinedNode(head, "prefill", f"127.0.0.{2 + i}", "--group", "spread", "--stage", f"{i}/{STAGES}") for i in range(STAGES)]
        for node in nodes:
            stack.enter_context(node)
        head.wait_until(lambda: is_ready(head), "the group")
        yield nodes


def is_ready(head: Cluster) -> bool:
    """As the Conductor sees the group."""
    return any(one.ready and one.instance.instance_id == "spread" for one in head.status().instances)


def metric(head: Cluster, name: str, labels: dict[str, str] | None = None) -> float:
    """Of the group's engine."""
    (member,) = [member for member in head.members() if (member.role, member.member_id) == ("prefill", "spread")]
    return metric_at(member.metrics_address, name, labels, TlsConfig.model_validate(head.record.tls))


def ask(head: Cluster, prompt: list[int], num_tokens: int = OUTPUT_TOKENS, **options: Any) -> Generated:
    return generate(head.grpc_address, head.model, prompt, num_tokens, **options)


def test_a_group_over_several_machines_answers_as_transformers_do(head: Cluster, group: list[JoinedNode], reference: Reference) -> None:
    """What its stores have lost, each of them reads for its own layers from the decode node's."""
    prompt = random_prompt(1, 700, 10, 250)
    cold, cached = ask(head, prompt), ask(head, prompt)
    evict_all(Path(group[0].record.run_dir, "spread.store.sock"))
    head.wait_until(lambda: cached_blocks(head.status(), "spread") == 0, "the Conductor to know what is gone")
    remote = ask(head, prompt)
    assert cold.token_ids == cached.token_ids == remote.token_ids == reference.greedy(prompt, OUTPUT_TOKENS)
    assert (cold.cached_tokens, cached.cached_tokens, remote.cached_tokens) == (0, 688, 688)
    assert metric(head, CACHED, {"source": "fetched"}) == 688


def test_what_a_group_loses_half_way_changes_no_token(head: Cluster, group: list[JoinedNode], reference: Reference) -> None:
    """The group's stores are one: when one of them is lost all begin anew, and the group forms again."""
    prompts = [random_prompt(seed, 2000, 10, 250) for seed in range(10, 14)]
    pid, chunks = group[1].record.processes["spread.stage-1-store"], metric(head, CHUNKS)
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = [threads.submit(ask, head, prompt, 6) for prompt in prompts]
        head.wait_until(lambda: metric(head, CHUNKS) >= chunks + 10, "the group to be half way")
        os.kill(pid, signal.SIGKILL)
        assert [answer.result().token_ids for answer in answers] == [reference.greedy(prompt, 6) for prompt in prompts]


def stat(group: list[JoinedNode]) -> store_pb2.StatReply:
    """Of the group's store."""
    with grpc.insecure_channel(f"unix:{Path(group[0].record.run_dir, 'spread.store.sock')}") as channel:
        return store_pb2_grpc.StoreStub(channel).Stat(store_pb2.StatRequest(), timeout=10)


def form_again(head: Cluster, group: list[JoinedNode], damage: Callable[[], None] = lambda: None) -> None:
    """The group loses a store, and so all that its arenas have."""
    before = stat(group).incarnation
    os.kill(group[1].record.processes["spread.stage-1-store"], signal.SIGKILL)
    damage()
    head.wait_until(lambda: is_ready(head) and stat(group).incarnation != before, "the group to be there again")


def test_what_is_on_the_ssds_of_a_group_outlives_its_stores_and_what_is_damaged_there_is_computed_anew(
    head: Cluster, group: list[JoinedNode], reference: Reference, ssd_dir: Path
) -> None:
    prompt = random_prompt(30, 700, 10, 250)
    wanted, whole = reference.greedy(prompt, OUTPUT_TOKENS), 700 // BLOCK_TOKENS
    evict_all(Path(group[0].record.run_dir, "spread.store.sock"))
    assert ask(head, prompt).token_ids == wanted
    head.wait_until(lambda: stat(group).ssd.blocks >= whole, "the prompt to be on the SSDs")
    form_again(head, group)
    assert stat(group).slots_cached == 0 and stat(group).ssd.blocks >= whole
    head.wait_until(lambda: cached_blocks(head.status(), "spread") >= whole, "the Conductor to know")
    found = ask(head, prompt)
    assert (found.token_ids, found.cached_tokens) == (wanted, whole * BLOCK_TOKENS)

    def damage() -> None:
        """A bit of every block, on one SSD."""
        (segment,) = (ssd_dir / "spread.stage-1").glob("*.kvsegment")
        layout = Layout(LAYERS // STAGES * SLAB_BYTES, "")
        with segment.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            for begin in range(layout.data_offset(layout.slots_in(len(data))), len(data), layout.stride):
                data[begin] ^= 1

    form_again(head, group, damage)
    assert ask(head, prompt).token_ids == wanted
    assert stat(group).ssd.dropped["corrupt"] >= 1


def test_a_machine_that_is_lost_is_replaced(head: Cluster, group: list[JoinedNode], reference: Reference) -> None:
    group[1].kill()
    head.wait_until(lambda: not is_ready(head), "the Conductor to know")
    with JoinedNode(head, "prefill", "127.0.0.9", "--group", "spread", "--stage", f"1/{STAGES}"):
        head.wait_until(lambda: is_ready(head), "the group to be whole again")
        prompt = random_prompt(20, 300, 10, 250)
        assert ask(head, prompt).token_ids == reference.greedy(prompt, OUTPUT_TOKENS)
