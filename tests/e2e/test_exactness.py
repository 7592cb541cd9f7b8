"""In float32, what the cluster answers greedily is what transformers answers, token for token, whatever way the KV took."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from springtide.rpc import common_pb2
from tests.support.cluster import Cluster
from tests.support.generate import Generated, generate
from tests.support.models import demo_gguf, make_tiny_llama
from tests.support.profiles import DEMO_PROFILE, TINY_PROFILE
from tests.support.reference import Reference, random_prompt

LENGTHS = (1, 2, 63, 64, 65, 200, 641, 1000, 3000)
OUTPUT_TOKENS = 8


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference.from_gguf(demo_gguf())


@pytest.fixture(scope="module")
def cluster():
    settings = {"prefill_node": {"chunk_tokens": 200}, "conductor": {"admission": "baseline"}}
    with Cluster(dtype="float32", profile=DEMO_PROFILE, **settings) as cluster:
        yield cluster


def ask(cluster: Cluster, prompt: list[int], num_tokens: int = OUTPUT_TOKENS, **options) -> Generated:
    return generate(cluster.grpc_address, cluster.model, prompt, num_tokens, **options)


@pytest.mark.parametrize("length", LENGTHS)
def test_cold_and_cached_answers_equal_transformers(cluster: Cluster, reference: Reference, length: int) -> None:
    prompt = random_prompt(seed=length, length=length)
    wanted = reference.greedy(prompt, OUTPUT_TOKENS)

    cold = ask(cluster, prompt)
    cached = ask(cluster, prompt)

    assert cold.token_ids == wanted and cold.cached_tokens == 0
    assert cached.token_ids == wanted and cached.cached_tokens == (length - 1) // 64 * 64


def test_what_is_guessed_of_a_text_that_repeats_itself_changes_nothing(cluster: Cluster, reference: Reference) -> None:
    """Nor does a stop string that comes among tokens that were guessed, and right."""
    accepted = "vllm:spec_decode_num_accepted_tokens_total"
    before, prompt = cluster.metric("decode-0", accepted), random_prompt(seed=3, length=30) * 4
    whole = ask(cluster, prompt, 80)
    assert whole.token_ids == reference.greedy(prompt, 80)
    # How many pay goes by what they take here, which others on the machine have a part in.
    assert cluster.metric("decode-0", accepted) > before
    stop = whole.text[len(whole.text) // 2 :][:12]
    at = whole.text.index(stop)
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": 80, "temperature": 0, "ignore_eos": True, "stop": stop}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (whole.text[:at], "stop")
    assert answer["usage"]["completion_tokens"] < 80


def test_a_prefix_that_lies_on_another_node_gives_the_same_answer(cluster: Cluster, reference: Reference) -> None:
    prompt = random_prompt(seed=77, length=900)
    wanted = reference.greedy(prompt, OUTPUT_TOKENS)
    assert ask(cluster, prompt).token_ids == wanted

    cluster.kill("prefill-0-store")  # its blocks are gone; the decode node's store still has them
    cluster.wait_ready(restarted="prefill-0")
    fetched_before = cluster.metric("prefill-0-store", "springtide_store_fetched_bytes_total")
    again = ask(cluster, prompt)

    assert again.token_ids == wanted
    assert again.cached_tokens == 896
    assert cluster.metric("prefill-0-store", "springtide_store_fetched_bytes_total") > fetched_before


@pytest.mark.parametrize("victim", ["decode-0", "decode-0-store", "prefill-0", "prefill-0-store"])
def test_a_node_killed_half_way_changes_no_token(cluster: Cluster, reference: Reference, victim: str) -> None:
    prompt = random_prompt(seed=sum(victim.encode()), length=300)
    killed: list[int] = []

    def kill_once(so_far: int) -> None:
        if so_far >= 10 and not killed:
            killed.append(cluster.kill(victim))

    answer = ask(cluster, prompt, 60, on_token=kill_once)

    assert killed, "the stream ended before the kill"
    assert answer.token_ids == reference.greedy(prompt, 60)
    cluster.wait_ready(restarted=victim)


def test_seeded_sampling_survives_a_reschedule(cluster: Cluster) -> None:
    prompt = random_prompt(seed=5, length=150)
    sampling = common_pb2.SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=1234, repetition_penalty=1.1, frequency_penalty=0.2)
    undisturbed = ask(cluster, prompt, 50, sampling=sampling)
    killed: list[int] = []

    def kill_once(so_far: int) -> None:
        if so_far >= 10 and not killed:
            killed.append(cluster.kill("decode-0"))

    disturbed = ask(cluster, prompt, 50, sampling=sampling, on_token=kill_once)

    assert killed and disturbed.token_ids == undisturbed.token_ids
    cluster.wait_ready(restarted="decode-0")


TINY_MODELS = {
    "grouped heads, tied embeddings": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "one KV head for each head, untied": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "llama3 rope": {
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
}


@pytest.mark.parametrize(("chunk_tokens", "kind"), list(zip((64, 200, 8192), TINY_MODELS, strict=True)))
def test_tiny_models_equal_transformers_whatever_the_chunk(tmp_path: Path, chunk_tokens: int, kind: str) -> None:
    model = make_tiny_llama(tmp_path / "tiny", **TINY_MODELS[kind])
    reference, prefill = Reference.from_directory(model), {"chunk_tokens": chunk_tokens}
    with Cluster(model=str(model), dtype="float32", profile=TINY_PROFILE, prefill_node=prefill) as cluster:
        for length in (1, 64, 199, 1000, 3000):
            prompt = random_prompt(seed=length, length=length, low=10, high=250)
            wanted = reference.greedy(prompt, 24)
            assert ask(cluster, prompt, 24).token_ids == wanted, f"cold, {length} tokens"
            assert ask(cluster, prompt, 24).token_ids == wanted, f"cached, {length} tokens"
