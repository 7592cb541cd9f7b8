"""The official client, unmodified, against a running cluster."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from tests.support.cluster import Cluster
from tests.support.reference import random_prompt

QUESTION = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_the_model_is_listed(cluster: Cluster, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [cluster.model]
    assert client.models.retrieve(cluster.model).id == cluster.model


def test_a_stream_says_what_the_whole_answer_says(cluster: Cluster, client: openai.OpenAI) -> None:
    options = {"model": cluster.model, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text and text == whole.choices[0].message.content
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    finish = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert finish == [whole.choices[0].finish_reason]


def test_a_second_identical_prompt_of_1000_tokens_reports_960_cached(cluster: Cluster, client: openai.OpenAI) -> None:
    prompt = random_prompt(seed=1, length=1000)
    first, second = (client.completions.create(model=cluster.model, prompt=prompt, max_tokens=4) for _ in range(2))
    assert first.usage.prompt_tokens == 1000 and first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == 960


def test_the_second_turn_of_a_chat_reuses_the_first_answer(cluster: Cluster, client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Tell me a long story about the sea and the moon. " * 4}]
    first = client.chat.completions.create(
        model=cluster.model, messages=messages, max_tokens=200, temperature=0, extra_body={"ignore_eos": True, "repetition_penalty": 1.2}
    )
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "And then?"}]
    second = client.chat.completions.create(model=cluster.model, messages=messages, max_tokens=8, temperature=0)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached > first.usage.prompt_tokens // 64 * 64, "only the prompt was reused, not the answer"


def test_n_stop_seed_and_logprobs(cluster: Cluster, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=cluster.model, messages=QUESTION, max_tokens=12, n=2, seed=7, temperature=1.0, logprobs=True, top_logprobs=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 3 and entry.logprob <= 0
    again = client.chat.completions.create(model=cluster.model, messages=QUESTION, max_tokens=12, n=2, seed=7, temperature=1.0)
    assert [c.message.content for c in again.choices] == [c.message.content for c in answer.choices]

    plain = client.completions.create(model=cluster.model, prompt="One, two, three, four,", max_tokens=24, temperature=0)
    marker = plain.choices[0].text.strip()[3:6]
    stopped = client.completions.create(model=cluster.model, prompt="One, two, three, four,", max_tokens=24, temperature=0, stop=[marker])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == plain.choices[0].text.split(marker)[0]


@pytest.mark.parametrize(
    ("change", "status", "error", "said"),
    [
        ({"model": "gpt-9"}, 404, openai.NotFoundError, "gpt-9"),
        ({"temperature": 9}, 400, openai.BadRequestError, "temperature"),
        ({"max_tokens": -1}, 400, openai.BadRequestError, "max_tokens"),
        ({"extra_body": {"colour": "red"}}, 400, openai.BadRequestError, "colour"),
        ({"response_format": {"type": "json_schema"}}, 400, openai.BadRequestError, "json_schema"),
        ({"messages": []}, 400, openai.BadRequestError, "messages"),
        ({"max_tokens": 9000}, 400, openai.BadRequestError, "8192"),
    ],
)
def test_a_bad_field_is_named(cluster: Cluster, client: openai.OpenAI, change: dict, status: int, error: type, said: str) -> None:
    with pytest.raises(error) as raised:
        client.chat.completions.create(**{"model": cluster.model, "messages": QUESTION, "max_tokens": 4, **change})
    assert raised.value.status_code == status
    assert said in raised.value.message
    body = raised.value.response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}


def test_a_prompt_over_the_context_is_refused_with_both_numbers(cluster: Cluster, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=cluster.model, prompt=random_prompt(seed=2, length=8300), max_tokens=4)
    assert "8192" in raised.value.message and "8300" in raised.value.message


def test_a_client_that_leaves_frees_its_slots(cluster: Cluster) -> None:
    request = {"model": cluster.model, "prompt": random_prompt(seed=3, length=500), "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=request, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        assert json.loads(next(lines).removeprefix("data: "))["choices"]
    for store in ("instance-0-store", "instance-1-store"):
        cluster.wait_metric(store, "springtide_store_slots", lambda slots: slots == 0, labels={"state": "in_use"})
