"""In bfloat16, the dtype that is served by default, the cluster answers what one engine by itself does, token for token, whatever the
chunks, the company and the way of the KV: where the native kernels compute it, each process in one thread (docs/packages/engine.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier, Event

import pytest
import torch

from engine.backends import choice as backends
from engine.formats.files import describe, read_config
from engine.loader import load_model
from tests.engine.sequences import Harness
from tests.support.cluster import Cluster
from tests.support.generate import Generated, generate
from tests.support.models import demo_gguf
from tests.support.profiles import DEMO_PROFILE
from tests.support.reference import random_prompt

pytestmark = pytest.mark.skipif(not backends.native_can_run(read_config(demo_gguf())), reason="this machine has no AVX2")

OUTPUT_TOKENS, STREAMS = 24, 6
MOVED_TOKENS = 1000
"""Enough that no stream has ended when a node is killed, though of texts that repeat themselves many a token is guessed."""
RESCHEDULES = "springtide_gateway_reschedules_total"
Engine = Callable[[list[int], int], list[int]]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """What one engine says by itself: all of the prompt in one chunk, no company."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    info = describe("demo")
    harness = Harness(load_model(info, "bfloat16"), info.kv_spec("bfloat16", 64), num_slots=24)

    @cache
    def greedy(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        harness.foul()
        return harness.greedy(prompt, num_tokens)

    yield lambda prompt, num_tokens: greedy(tuple(prompt), num_tokens)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(
        dtype="bfloat16",
        device="cpu",
        decode=2,
        profile=DEMO_PROFILE,
        kv={"arena_size": "512MiB"},
        prefill_node={"chunk_tokens": 200, "threads": 1},
        decode_node={"threads": 1},
        conductor={"admission": "baseline"},
    ) as cluster:
        yield cluster


def ask(cluster: Cluster, prompt: list[int], num_tokens: int = OUTPUT_TOKENS, **options) -> Generated:
    return generate(cluster.grpc_address, cluster.model, prompt, num_tokens, **options)


@pytest.mark.parametrize("length", [1, 64, 65, 641, 1000])
def test_cold_and_cached_answers_are_those_of_one_engine(cluster: Cluster, engine: Engine, length: int) -> None:
    prompt = random_prompt(seed=length, length=length)
    wanted = engine(prompt, OUTPUT_TOKENS)
    cold, cached = ask(cluster, prompt), ask(cluster, prompt)
    assert cold.token_ids == wanted and cold.cached_tokens == 0
    assert cached.token_ids == wanted and cached.cached_tokens == (length - 1) // 64 * 64


def test_answers_are_the_same_in_a_batch(cluster: Cluster, engine: Engine) -> None:
    prompts = [random_prompt(seed=100 + number, length=100 + 77 * number) for number in range(STREAMS)]
    begin = Barrier(STREAMS)

    def one(prompt: list[int]) -> list[int]:
        begin.wait()
        return ask(cluster, prompt, 60).token_ids

    with ThreadPoolExecutor(STREAMS) as threads:
        answers = list(threads.map(one, prompts))
    assert answers == [engine(prompt, 60) for prompt in prompts]


def test_what_is_guessed_of_texts_that_repeat_themselves_changes_nothing(cluster: Cluster, engine: Engine) -> None:
    def accepted() -> float:
        return sum(cluster.metric(name, "vllm:spec_decode_num_accepted_tokens_total") for name in ("decode-0", "decode-1"))

    before, prompts = accepted(), [random_prompt(seed=200 + number, length=40) * 5 for number in range(3)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: ask(cluster, prompt, 60).token_ids, prompts))
    assert answers == [engine(prompt, 60) for prompt in prompts]
    assert accepted() > before + 30


@pytest.mark.parametrize("part", ["engine", "store"])
@pytest.mark.timeout(400)  # an oracle with one thread
def test_answers_are_the_same_after_a_move_to_another_node(cluster: Cluster, engine: Engine, part: str) -> None:
    prompts = [random_prompt(seed=1000 * (1 + number), length=150 + 50 * number) for number in range(2)]
    begun = [Event() for _ in prompts]
    before = cluster.metric("conductor-0", RESCHEDULES)

    def one(number: int) -> list[int]:
        return ask(cluster, prompts[number], MOVED_TOKENS, on_token=lambda count: begun[number].set()).token_ids

    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = [threads.submit(one, number) for number in range(len(prompts))]
        assert all(event.wait(60) for event in begun)
        node = max(("decode-0", "decode-1"), key=lambda name: cluster.metric(name, "springtide_decode_attempts_running"))
        victim = node if part == "engine" else f"{node}-store"
        cluster.kill(victim)
        tokens = [answer.result() for answer in answers]
    assert cluster.metric("conductor-0", RESCHEDULES) > before, "nobody was at the node that died"
    assert tokens == [engine(prompt, MOVED_TOKENS) for prompt in prompts]
    cluster.wait_ready(restarted=victim)


def test_a_prefix_that_lies_on_another_node_gives_the_same_answer(cluster: Cluster, engine: Engine) -> None:
    prompt = random_prompt(seed=77, length=900)
    wanted = engine(prompt, OUTPUT_TOKENS)
    assert ask(cluster, prompt).token_ids == wanted
    cluster.kill("prefill-0-store")
    cluster.wait_ready(restarted="prefill-0")
    again = ask(cluster, prompt)
    assert (again.token_ids, again.cached_tokens) == (wanted, 896)
