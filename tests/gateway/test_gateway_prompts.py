"""What an answer tells of its prompt, and the choice of the likeliest outputs: by the official client, HTTP and gRPC."""

from __future__ import annotations

import json
from typing import Any

import grpc.aio
import httpx
import numpy as np
import openai
import pytest
from gateway_cluster import MODEL, Cluster, Start

from engine.tokenizer.tokenizer import Tokenizer
from gateway import prepare
from gateway.app import GatewayServer
from springtide.protocol import wire
from springtide.protocol.sampling import SamplingParams
from springtide.rpc import common_pb2, inference_pb2, inference_pb2_grpc
from tests.support.waiting import until

PLAIN, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "Say wörld 🙂 twice."
TEXT = "Hello, wörld! One two three four."


def plain(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, **fields}


def asked(cluster: Cluster) -> list[SamplingParams]:
    """Of each attempt that reached a prefill group."""
    starts = [start for name, start in cluster.started if name.startswith("prefill")]
    return [wire.SAMPLING_PARAMS.decode(start.request.params) for start in starts]


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 40])
async def test_an_echo_with_log_probabilities_has_those_of_prompt_and_output(
    client: openai.AsyncOpenAI, cluster: Cluster, tokenizer: Tokenizer, as_tokens: bool, max_tokens: int
) -> None:
    ids = tokenizer.encode(PROMPT)
    output = tokenizer.encode(TEXT)[:max_tokens]
    answer = await client.completions.create(
        model=MODEL, prompt=ids if as_tokens else PROMPT, echo=True, logprobs=2, max_tokens=max_tokens, temperature=0
    )
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert choice.text == PROMPT + {0: "", 1: "Hello", 40: TEXT}[max_tokens] and logprobs is not None
    assert logprobs.tokens == [tokenizer.token_text(token) for token in (*ids, *output)]
    assert logprobs.token_logprobs == [None, *(-i / 8 for i in range(1, len(ids))), *[-0.5] * len(output)]
    assert logprobs.top_logprobs is not None and logprobs.top_logprobs[0] is None
    assert logprobs.top_logprobs[1] == {tokenizer.token_text(ids[1] + i): value for i, value in ((1, 0.0), (2, -1 / 16), (0, -1 / 8))}
    assert len(logprobs.top_logprobs) == len(logprobs.text_offset or ()) == len(logprobs.tokens)
    for token, offset in zip(logprobs.tokens, logprobs.text_offset or (), strict=True):
        assert "\ufffd" in token or choice.text[offset:].startswith(token)
    assert answer.usage is not None and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), len(output))
    assert cluster.conductor.requests[0].whole_prompt and [params.prompt_logprobs for params in asked(cluster)] == [2]


async def test_a_text_that_is_scored_has_one_token_of_output_even_where_the_model_ends(http: httpx.AsyncClient, cluster: Cluster) -> None:
    """Who scores texts leaves the last entry of the lists out, as that of the output."""
    cluster.script = lambda start: ()
    (choice,) = (await http.post(PLAIN, json=plain(echo=True, logprobs=1, max_tokens=1))).json()["choices"]
    assert choice["text"] == PROMPT and choice["logprobs"]["tokens"][-1] == "<|im_end|>"
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["top_logprobs"]) == len(choice["logprobs"]["text_offset"])
    (choice,) = (await http.post(PLAIN, json=plain(echo=True, logprobs=1, max_tokens=2))).json()["choices"]
    assert choice["logprobs"]["tokens"][-1] != "<|im_end|>" and choice["finish_reason"] == "stop"


async def test_a_stream_echoes_what_the_whole_answer_does(client: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT * 20, "echo": True, "logprobs": 1, "n": 2, "temperature": 0}
    whole = await client.completions.create(**options)
    chunks = [chunk async for chunk in await client.completions.create(**options, stream=True)]
    assert len(tokenizer.encode(PROMPT * 20)) > 100
    for choice in whole.choices:
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(piece.text for piece in own) == choice.text == PROMPT * 20 + TEXT
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            pieces = [entry for piece in own if piece.logprobs is not None for entry in getattr(piece.logprobs, name)]
            assert pieces == getattr(choice.logprobs, name), name


async def test_an_echo_without_log_probabilities_costs_nothing(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    answer = await client.completions.create(model=MODEL, prompt=[PROMPT, "No."], echo=True)
    assert [choice.text for choice in answer.choices] == [PROMPT + TEXT, "No." + TEXT]
    chunks = [chunk async for chunk in await client.completions.create(model=MODEL, prompt=PROMPT, echo=True, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + TEXT and chunks[0].choices[0].text == PROMPT
    assert not any(request.whole_prompt for request in cluster.conductor.requests)


async def test_prompt_logprobs_are_written_as_vllm_does(http: httpx.AsyncClient, cluster: Cluster, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    answer = (await http.post(PLAIN, json=plain(prompt_logprobs=1, n=2, logprobs=2))).json()
    for choice in answer["choices"]:
        assert choice["text"] == TEXT and len(choice["logprobs"]["tokens"]) == len(tokenizer.encode(TEXT))
        entries = choice["prompt_logprobs"]
        assert entries[0] is None and len(entries) == len(ids)
        assert entries[2] == {
            str(ids[2]): {"logprob": -0.25, "rank": 3, "decoded_token": tokenizer.token_text(ids[2])},
            str(ids[2] + 1): {"logprob": 0.0, "rank": 1, "decoded_token": tokenizer.token_text(ids[2] + 1)},
        }
    assert [params.prompt_logprobs for params in asked(cluster)] == [1, None], "once for a prompt"
    assert [request.whole_prompt for request in cluster.conductor.requests] == [True, False]
    chat = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "prompt_logprobs": 0}
    answer = (await http.post(CHAT, json=chat)).json()
    rendered = tokenizer.apply_chat_template(chat["messages"])  # type: ignore[arg-type]
    assert [list(entry) for entry in answer["prompt_logprobs"][1:]] == [[str(token)] for token in rendered[1:]]
    assert "prompt_logprobs" not in (await http.post(PLAIN, json=plain())).json()["choices"][0]


async def test_both_are_served_at_once(http: httpx.AsyncClient, cluster: Cluster) -> None:
    for prompt_logprobs, logprobs in ((3, 1), (1, 3)):
        body = plain(prompt_logprobs=prompt_logprobs, echo=True, logprobs=logprobs, max_tokens=1)
        (choice,) = (await http.post(PLAIN, json=body)).json()["choices"]
        assert len(choice["prompt_logprobs"][1]) == prompt_logprobs + 1 and len(choice["logprobs"]["top_logprobs"][1]) == logprobs + 1
    assert [params.prompt_logprobs for params in asked(cluster)] == [3, 3]


async def test_more_than_an_answer_may_have_is_refused_by_the_name_of_the_field(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "MAX_PROMPT_LOGPROBS", 60)
    fits = plain(prompt=[[5] * 10, [6] * 10], echo=True, logprobs=2, max_tokens=1)
    assert (await http.post(PLAIN, json=fits)).status_code == 200
    for body, field in (({**fits, "logprobs": 3}, "logprobs"), ({**fits, "prompt_logprobs": 5}, "prompt_logprobs")):
        refused = await http.post(PLAIN, json=body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == field
        assert "tokens together, not 20" in refused.json()["error"]["message"]


async def test_a_prompt_whose_node_dies_before_it_is_scored_is_scored_once_elsewhere(http: httpx.AsyncClient, cluster: Cluster) -> None:
    cluster.nodes["prefill-0"].failure = common_pb2.Failure(code=common_pb2.FAILURE_CODE_PEER_LOST, message="gone")
    (choice,) = (await http.post(PLAIN, json=plain(echo=True, logprobs=0))).json()["choices"]
    assert choice["text"] == PROMPT + TEXT and choice["logprobs"]["token_logprobs"][:2] == [None, -1 / 8]
    assert len(asked(cluster)) == 2 and all(params.prompt_logprobs == 0 for params in asked(cluster))


@pytest.fixture
def chosen(cluster: Cluster) -> None:
    """A seed decides how likely an output is: that of 12 the likeliest, then 13, 10, 11."""

    def logprob(start: Start) -> float:
        return {10: -0.75, 11: -1.0, 12: -0.25, 13: -0.5}[start.request.params.seed]

    cluster.logprob = logprob


async def test_the_likeliest_of_several_outputs_are_the_answer(client: openai.AsyncOpenAI, cluster: Cluster, chosen: None) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": ["a", "b"], "n": 2, "best_of": 4, "seed": 10, "max_tokens": 3}
    answer = await client.completions.create(**options, logprobs=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.logprobs.token_logprobs[0] for choice in answer.choices if choice.logprobs] == [-0.25, -0.5, -0.25, -0.5]  # type: ignore[index]
    assert answer.usage is not None and answer.usage.completion_tokens == 24, "all of them were made"
    unranked = await client.completions.create(**options)
    assert [choice.logprobs for choice in unranked.choices] == [None] * 4 and len(asked(cluster)) == 16
    await until(lambda: cluster.idle)


async def test_prompt_logprobs_come_over_grpc_before_the_output(gateway: GatewayServer, tokenizer: Tokenizer) -> None:
    sampling = common_pb2.SamplingParams(prompt_logprobs=2)
    async with grpc.aio.insecure_channel(gateway.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(model=MODEL, text=PROMPT, sampling=sampling)
        first, *others = [chunk async for chunk in stub.Generate(request)]
        scores = wire.PROMPT_LOGPROBS.decode(first.prompt_logprobs)
        own, _, top_ids, _ = scores.columns()
        ids = np.array(tokenizer.encode(PROMPT))
        assert own.tolist() == [-i / 8 for i in range(1, len(ids))] and (top_ids[:, 1] == ids[1:] + 2).all()
        assert not any(chunk.HasField("prompt_logprobs") for chunk in others)
        sampling.prompt_logprobs = 21
        with pytest.raises(grpc.aio.AioRpcError, match=r"sampling\.prompt_logprobs must be between 0 and 20"):
            [_ async for _ in stub.Generate(inference_pb2.GenerateRequest(model=MODEL, text=PROMPT, sampling=sampling))]


async def test_what_json_is_made_of_does_not_depend_on_how_it_is_cut(http: httpx.AsyncClient) -> None:
    body = plain(prompt=[5] * 33, echo=True, logprobs=1, prompt_logprobs=1, max_tokens=0)
    text = (await http.post(PLAIN, json=body)).text
    (choice,) = json.loads(text)["choices"]
    assert {len(column) for column in choice["logprobs"].values()} == {len(choice["prompt_logprobs"])} == {33}
