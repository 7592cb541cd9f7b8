"""The official OpenAI client against the gateway."""

from __future__ import annotations

import json

import openai
import pytest
from gateway_cluster import MODEL, Cluster

from engine.tokenizer.tokenizer import Tokenizer
from gateway.exchange import server_sent
from gateway.openai.answers import ChatFormat, CompletionFormat
from gateway.output import Content, Delta, Ending, PlacedToken, gathered
from springtide.protocol import wire
from springtide.protocol.outputs import Finish, SampledToken
from springtide.protocol.sampling import LogitBias
from springtide.protocol.usage import Usage
from springtide.rpc import conductor_pb2
from tests.support.waiting import until

TEXT = "Hello, wörld! One two three four."
QUESTION = [{"role": "user", "content": "Say it."}]


async def test_a_chat_answer_has_text_usage_and_a_reason(client: openai.AsyncOpenAI, cluster: Cluster, tokenizer: Tokenizer) -> None:
    cluster.cached_tokens = 7
    answer = await client.chat.completions.create(model=MODEL, messages=QUESTION)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens == len(tokenizer.apply_chat_template(QUESTION))
    assert answer.usage.completion_tokens == len(tokenizer.encode(TEXT))
    assert answer.usage.prompt_tokens_details is not None and answer.usage.prompt_tokens_details.cached_tokens == 7
    assert cluster.idle


def test_an_event_is_one_line_also_to_clients_that_split_at_unicodes_ends_of_lines() -> None:
    text = "a\x85b\u2028c\u2029d ä"
    event = server_sent({"text": text}).decode()
    data, end = event.splitlines()
    assert (json.loads(data.removeprefix("data: ")), end) == ({"text": text}, "")
    assert "ä" in event


async def test_a_stream_says_the_same_with_usage_at_its_end(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 5
    assert len({chunk.id for chunk in chunks}) == 1


async def test_the_chat_is_rendered_with_the_models_template(client: openai.AsyncOpenAI, cluster: Cluster, tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": "it."}]
    await client.chat.completions.create(
        model=MODEL, messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    )
    expected = tokenizer.apply_chat_template([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say\nit."}])
    assert list(cluster.started[0][1].request.token_ids) == expected


async def test_max_tokens_ends_the_output_with_length(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=QUESTION, max_completion_tokens=2)
    assert answer.choices[0].message.content == "Hello,"
    assert answer.choices[0].finish_reason == "length"


async def test_a_chat_may_fill_the_context_and_a_completion_gets_16_tokens(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    await client.chat.completions.create(model=MODEL, messages=QUESTION)
    await client.completions.create(model=MODEL, prompt="Say it.")
    chat, completion = (start for name, start in cluster.started if name == "prefill-0")
    assert chat.request.params.max_tokens == 2000 - chat.request.num_prompt_tokens
    assert completion.request.params.max_tokens == 16


async def test_n_choices_differ_in_their_seed_and_follow_the_first(
    client: openai.AsyncOpenAI, cluster: Cluster, tokenizer: Tokenizer
) -> None:
    replies = {seed: tokenizer.encode(f"answer {seed}") for seed in (40, 41, 42)}
    cluster.script = lambda start: replies[start.request.params.seed]
    answer = await client.chat.completions.create(model=MODEL, messages=QUESTION, n=3, seed=40)
    assert [choice.message.content for choice in answer.choices] == ["answer 40", "answer 41", "answer 42"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [request.accepted for request in cluster.conductor.requests] == [False, True, True]
    assert answer.usage is not None and answer.usage.completion_tokens == sum(map(len, replies.values()))


@pytest.mark.parametrize("stop", [" One", "wörl", ["zzz", "! One t", "three"], "ld! O"])
async def test_a_stop_string_across_token_borders_cuts_the_text(
    client: openai.AsyncOpenAI, cluster: Cluster, stop: str | list[str]
) -> None:
    expected = TEXT.split(next(s for s in ([stop] if isinstance(stop, str) else stop) if s in TEXT))[0]
    cluster.nodes["decode-0"].pause_at = 12
    whole = await client.completions.create(model=MODEL, prompt="x", stop=stop)
    assert whole.choices[0].text == expected and whole.choices[0].finish_reason == "stop"
    stream = await client.completions.create(model=MODEL, prompt="x", stop=stop, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"
    await until(lambda: cluster.idle)
    assert cluster.aborted


async def test_text_that_might_become_a_stop_string_but_does_not_is_kept(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="x", stop=["four.!", "threefold", ". One"])
    assert answer.choices[0].text == TEXT


async def test_chat_logprobs_have_one_entry_a_token(client: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=QUESTION, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content
    assert entries is not None and len(entries) == len(tokenizer.encode(TEXT))
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == TEXT
    assert all(entry.logprob == -0.5 and [top.logprob for top in entry.top_logprobs] == [-0.5, -1.5] for entry in entries)
    stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, logprobs=True, stream=True)
    streamed = [entry for chunk in [c async for c in stream] if (lp := chunk.choices[0].logprobs) for entry in lp.content or []]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    assert all(entry.top_logprobs == [] for entry in streamed)


async def test_completion_logprobs_have_offsets_and_end_where_the_text_does(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="x", logprobs=1, stop=" two")
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None and logprobs.top_logprobs is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text == "Hello, wörld! One"
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:at])) for at in range(len(logprobs.tokens))]
    assert logprobs.token_logprobs == [-0.5] * len(logprobs.tokens)
    assert all(len(top) == 1 for top in logprobs.top_logprobs)


@pytest.mark.parametrize("prompt", [["a b", "c d e"], [[507, 508], [509, 510, 511]]])
async def test_several_prompts_are_answered_in_their_order(client: openai.AsyncOpenAI, cluster: Cluster, prompt: list[str]) -> None:
    cluster.script = lambda start: list(start.request.token_ids[: start.request.num_prompt_tokens])
    answer = await client.completions.create(model=MODEL, prompt=prompt, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text != answer.choices[2].text == answer.choices[3].text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * answer.usage.prompt_tokens


async def test_vllms_extras_reach_the_nodes(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    extras = {"ignore_eos": True, "top_k": 5, "min_p": 0.125, "repetition_penalty": 1.5, "stop_token_ids": [9], "priority": 3}
    await client.completions.create(
        model=MODEL, prompt=[5, 6], max_tokens=40, temperature=0.25, logit_bias={"12": -100}, seed=-1, extra_body=extras
    )
    start = cluster.started[0][1]
    sampling = start.request.params
    assert (sampling.ignore_eos, sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (True, 5, 0.125, 1.5)
    assert (list(sampling.stop_token_ids), sampling.temperature) == ([9], 0.25)
    assert wire.SAMPLING_PARAMS.decode(sampling).logit_bias == LogitBias.of({12: -100.0})
    assert sampling.seed == 2**64 - 1 and cluster.conductor.requests[0].terms.priority == -3 and sampling.max_tokens == 40


async def test_the_model_is_listed(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("another")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_rejection_is_a_429_with_retry_after_streaming_or_not(client: openai.AsyncOpenAI, cluster: Cluster, stream: bool) -> None:
    cluster.conductor.rejections.append(conductor_pb2.Rejection(reason=conductor_pb2.REASON_TTFT, message="too busy", retry_after_s=2.5))
    with pytest.raises(openai.RateLimitError) as caught:
        await client.chat.completions.create(model=MODEL, messages=QUESTION, stream=stream)
    assert caught.value.response.headers["retry-after"] == "3"
    assert caught.value.code == "ttft" and "too busy" in caught.value.message


@pytest.mark.parametrize(("logprob", "shown"), [(float("nan"), -9999.0), (float("-inf"), -9999.0), (float("inf"), 0.0), (-0.5, -0.5)])
@pytest.mark.parametrize("kind", [ChatFormat, CompletionFormat])
def test_an_answer_is_json_whatever_the_model_computed(
    tokenizer: Tokenizer, kind: type[ChatFormat] | type[CompletionFormat], logprob: float, shown: float
) -> None:
    tokens = tuple(PlacedToken(SampledToken(500 + at, logprob, ((7, logprob),)), at) for at in range(100))
    deltas = [
        Delta(1, (Content("b"),), tokens[:50]),
        Delta(0, (Content("a"),), tokens),
        Delta(1, (Content("c"),), tokens[50:], Ending(Finish.STOP)),
        Delta(0, (), (), Ending(Finish.LENGTH)),
    ]
    for wants_logprobs in (True, False):
        answer = json.loads(
            "".join(kind("r", "m", 0 if wants_logprobs else None, False, tokenizer).whole(gathered(deltas, Usage(1, 2, 3))))
        )
        first, second = answer["choices"]
        assert [(choice["index"], choice["finish_reason"]) for choice in (first, second)] == [(0, "length"), (1, "stop")]
        if wants_logprobs:
            logprobs = second["logprobs"]
            values = logprobs.get("token_logprobs") or [entry["logprob"] for entry in logprobs["content"]]
            assert values == [shown] * 100 and first["logprobs"] == logprobs
        else:
            assert first["logprobs"] is None
        assert answer["usage"]["total_tokens"] == 3
