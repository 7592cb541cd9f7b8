"""What gRPC's requests ask for: tools, formats, several outputs, caches; by our own stubs, and by a stranger's who has only proto/."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from gateway_cluster import MODEL, Cluster, Start
from grpc_tools import protoc

from engine.tokenizer.tokenizer import Tokenizer
from gateway.api_request import CacheUse, Conversation, FormatKind, OutputFormat, Speaker, Tool, ToolCall, ToolChoice, ToolMode
from gateway.app import GatewayServer
from gateway.grpc_requests import api_request
from springtide.errors import InvalidRequest
from springtide.rpc import common_pb2 as pb
from springtide.rpc import inference_pb2 as api
from springtide.rpc import inference_pb2_grpc
from springtide.rpc.channels import connect

REPOSITORY = Path(__file__).parents[2]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = api.Tool(name="weather", description="of a city", parameters=json.dumps(PARAMETERS), strict=True)
DEEP = '{"a": ' * 129 + "1" + "}" * 129
ASKED = [api.ChatMessage(role="user", content="Is it raining in Oslo?")]


@pytest.fixture
async def stub(gateway: GatewayServer) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    async with connect(gateway.grpc_address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def test_a_chat_with_tools_is_a_conversation() -> None:
    messages = [
        api.ChatMessage(role="developer", content="Be brief."),
        *ASKED,
        api.ChatMessage(
            role="assistant", reasoning="Hm.", tool_calls=[api.ToolCall(call_id="c1", name="weather", arguments='{"city":"Oslo"}')]
        ),
        api.ChatMessage(role="tool", content="rain", tool_call_id="c1", name="weather"),
    ]
    choice = api.ToolChoice(mode=api.TOOL_MODE_REQUIRED, name="weather", single_call=True)
    chat = api.ChatPrompt(messages=messages, tools=[WEATHER], tool_choice=choice, template_options='{"enable_thinking": false}')
    asked = api_request(
        api.GenerateRequest(
            model=MODEL,
            chat=chat,
            n=2,
            bad_words=["zebra"],
            allowed_token_ids=[5, 6],
            include_stop=True,
            keep_special_tokens=True,
            truncate_prompt_tokens=-1,
            format=api.OutputFormat(kind=api.FORMAT_KIND_REGEX, source="a+"),
            cache=api.CacheUse(cache_id="cache-1", salt="pepper", keep_s=60),
            terms=pb.Terms(priority=3, idle=True),
        )
    )
    assert isinstance(asked.prompt, Conversation)
    system, _, assistant, tool = asked.prompt.messages
    assert system.speaker is Speaker.SYSTEM and tool.tool_call_id == "c1" and tool.name == "weather"
    assert assistant.reasoning == "Hm." and assistant.tool_calls == (ToolCall("c1", "weather", '{"city":"Oslo"}'),)
    assert asked.prompt.tools == (Tool("weather", "of a city", PARAMETERS, strict=True),)
    assert asked.prompt.template_options == {"enable_thinking": False}
    assert asked.prompt.tool_choice == ToolChoice(ToolMode.REQUIRED, "weather", parallel=False)
    assert asked.format == OutputFormat(FormatKind.REGEX, "a+") and asked.n == 2 and asked.include_stop
    assert asked.bad_words == ("zebra",) and asked.sampling["allowed_token_ids"].column().tolist() == [5, 6]
    assert not asked.skip_special_tokens and asked.truncate_prompt_tokens == -1
    assert asked.cache == CacheUse("cache-1", salt="pepper", keep_all_s=60) and asked.terms.idle and asked.terms.priority == 3


def test_a_chat_goes_on_with_its_last_message() -> None:
    said = [*ASKED, api.ChatMessage(role="assistant", content="It is")]
    prompt = api_request(api.GenerateRequest(model=MODEL, chat=api.ChatPrompt(messages=said, continue_final_message=True))).prompt
    assert isinstance(prompt, Conversation) and prompt.continue_final_message and not prompt.add_generation_prompt


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "bad_words", "grammar"])
def test_what_is_between_nodes_is_refused_by_name(name: str) -> None:
    field = pb.SamplingParams.DESCRIPTOR.fields_by_name[name]
    value: Any = field.message_type._concrete_class()
    sampling = pb.SamplingParams(**{name: [value] if field.is_repeated else value})
    with pytest.raises(InvalidRequest, match=rf"sampling\.{name} is between nodes") as caught:
        api_request(api.GenerateRequest(model=MODEL, text="x", sampling=sampling))
    assert caught.value.param == f"sampling.{name}"


async def test_every_field_of_sampling_reaches_the_nodes(stub: inference_pb2_grpc.InferenceStub, cluster: Cluster) -> None:
    wanted: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "min_p": 0.125,
        "seed": 11,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.75,
        "frequency_penalty": -0.5,
        "stop_token_ids": [5, 6],
        "max_tokens": 9,
        "ignore_eos": True,
        "logprobs": 2,
        "prompt_logprobs": 3,
        "min_tokens": 4,
    }
    between_nodes = {"logit_bias", "allowed_token_ids", "bad_words", "grammar"}
    assert wanted.keys() == set(pb.SamplingParams.DESCRIPTOR.fields_by_name) - between_nodes
    request = api.GenerateRequest(model=MODEL, text="Say it.", sampling=pb.SamplingParams(**wanted))
    [_ async for _ in stub.Generate(request)]
    params = cluster.started[0][1].request.params
    assert {name: list(value) if isinstance(value := getattr(params, name), Sequence) else value for name in wanted} == wanted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"text": "x", "n": 1000}, "n"),
        ({"text": "x", "stop": ["a"] * 100}, "stop"),
        ({"text": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"text": "x", "format": api.OutputFormat(source="a")}, "format"),
        ({"text": "x", "cache": api.CacheUse(keep_s=-1)}, "cache.keep_s"),
        ({"text": "x", "sampling": pb.SamplingParams(logprobs=100)}, "sampling.logprobs"),
        ({"text": "x", "sampling": pb.SamplingParams(grammar=pb.Grammar(source="{}"))}, "sampling.grammar"),
        ({"text": "x", "sampling": pb.SamplingParams(bad_words=[pb.TokenIds()])}, "sampling.bad_words"),
        ({"text": "x", "bad_words": ["x"] * 10_000}, "bad_words"),
        ({"text": "x", "allowed_token_ids": [1 << 31]}, "allowed_token_ids"),
        ({"chat": api.ChatPrompt(messages=[api.ChatMessage(role="narrator")])}, "messages[0].role"),
        ({"chat": api.ChatPrompt(messages=[api.ChatMessage(role="user", tool_calls=[api.ToolCall()])])}, "messages[0].tool_calls"),
        ({"chat": api.ChatPrompt(messages=ASKED, tools=[api.Tool(name="a b")])}, "tools[0].name"),
        ({"chat": api.ChatPrompt(messages=ASKED, tools=[api.Tool(name="a", parameters="[")])}, "tools[0].parameters"),
        ({"chat": api.ChatPrompt(messages=ASKED, tools=[api.Tool(name="a", parameters="[]")])}, "tools[0].parameters"),
        ({"chat": api.ChatPrompt(messages=ASKED, tools=[api.Tool(name="a", parameters=DEEP)])}, "tools[0].parameters"),
        ({"chat": api.ChatPrompt(messages=ASKED, template_options="1")}, "template_options"),
        ({"chat": api.ChatPrompt(messages=ASKED, tool_choice=api.ToolChoice(mode=api.TOOL_MODE_REQUIRED))}, "tool_choice"),
        ({"chat": api.ChatPrompt(messages=ASKED, tools=[WEATHER], tool_choice=api.ToolChoice(name="x"))}, "tool_choice"),
        ({"chat": api.ChatPrompt(messages=ASKED, tools=[WEATHER], tool_choice=api.ToolChoice(name="weather"))}, "tool_choice"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        api_request(api.GenerateRequest(model=MODEL, **fields))
    assert caught.value.param == param and param.partition("[")[0].partition(".")[0] in caught.value.message


async def test_a_format_that_cannot_be_is_refused_by_its_name(stub: inference_pb2_grpc.InferenceStub) -> None:
    format = api.OutputFormat(kind=api.FORMAT_KIND_REGEX, source="(")
    with pytest.raises(grpc.aio.AioRpcError, match="format cannot be") as caught:
        await anext(aiter(stub.Generate(api.GenerateRequest(model=MODEL, text="x", format=format))))
    assert "response_format" not in str(caught.value.details())


async def test_a_call_of_a_tool_comes_in_pieces(stub: inference_pb2_grpc.InferenceStub, cluster: Cluster, tokenizer: Tokenizer) -> None:
    said = tokenizer.encode('I look. <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>')
    cluster.script = lambda start: said
    request = api.GenerateRequest(model=MODEL, chat=api.ChatPrompt(messages=ASKED, tools=[WEATHER]))
    chunks = [chunk async for chunk in stub.Generate(request)]
    pieces = [piece for chunk in chunks for piece in chunk.tool_calls]
    assert pieces[0].name == "weather" and pieces[0].call_id
    assert json.loads("".join(piece.arguments for piece in pieces)) == {"city": "Oslo"}
    assert chunks[-1].called and chunks[-1].finish_reason == pb.FINISH_REASON_STOP
    assert "".join(chunk.text for chunk in chunks).strip() == "I look."


async def test_several_outputs_come_apart_and_each_has_its_end(
    stub: inference_pb2_grpc.InferenceStub, cluster: Cluster, tokenizer: Tokenizer
) -> None:
    request = api.GenerateRequest(model=MODEL, chat=api.ChatPrompt(messages=ASKED), n=3, stop=["One"])
    texts: dict[int, str] = {0: "", 1: "", 2: ""}
    ends = {}
    async for chunk in stub.Generate(request):
        texts[chunk.index] += chunk.text
        if chunk.finish_reason:
            ends[chunk.index] = chunk.stop_string
    assert set(texts.values()) == {"Hello, wörld! "} and ends == {0: "One", 1: "One", 2: "One"}


async def test_a_prompt_alone_has_no_output(stub: inference_pb2_grpc.InferenceStub, cluster: Cluster) -> None:
    request = api.GenerateRequest(model=MODEL, chat=api.ChatPrompt(messages=ASKED), prompt_only=True)
    (chunk,) = [chunk async for chunk in stub.Generate(request)]
    assert not chunk.token_ids and not chunk.text and chunk.usage.prompt_tokens > 0 and chunk.usage.completion_tokens == 0


STRANGER = """
    import json, sys, grpc
    from springtide.v1 import caches_pb2, caches_pb2_grpc, inference_pb2 as api, inference_pb2_grpc

    assert "gateway" not in sys.modules and not any("site-packages/springtide" in path for path in sys.path)
    with grpc.insecure_channel(sys.argv[1]) as channel:
        stub, caches = inference_pb2_grpc.InferenceStub(channel), caches_pb2_grpc.ContextCachesStub(channel)
        (model,) = stub.ListModels(api.ListModelsRequest()).models

        def answer(*messages, **fields):
            chat = api.ChatPrompt(messages=messages, tools=fields.pop("tools", ()))
            return list(stub.Generate(api.GenerateRequest(model=model.id, chat=chat, tenant="stranger", **fields)))

        def text(chunks):
            return "".join(chunk.text for chunk in chunks).strip()

        asked = api.ChatMessage(role="user", content="Say it.")
        print(text(answer(asked)))
        parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
        called = answer(asked, tools=[api.Tool(name="weather", parameters=json.dumps(parameters))])
        (name,) = {piece.name for chunk in called for piece in chunk.tool_calls if piece.name}
        print(name, "".join(piece.arguments for chunk in called for piece in chunk.tool_calls), called[-1].called)
        schema = {"type": "object", "properties": {"city": {"const": "Oslo"}}, "required": ["city"]}
        print(text(answer(asked, format=api.OutputFormat(kind=api.FORMAT_KIND_JSON_SCHEMA, source=json.dumps(schema)))))

        long = api.ChatMessage(role="system", content="The sea is wide, and the tide comes in. " * 20)
        cache = caches.CreateCache(
            caches_pb2.CreateCacheRequest(model=model.id, chat=api.ChatPrompt(messages=[long]), tenant="stranger", ttl_s=60)
        )
        whole, begun = answer(long, asked), answer(asked, cache=api.CacheUse(cache_id=cache.cache_id))
        print(caches_pb2.CacheStatus.Name(cache.status), whole[-1].usage.prompt_tokens == begun[-1].usage.prompt_tokens > cache.tokens)
        caches.DeleteCache(caches_pb2.CacheName(cache_id=cache.cache_id, tenant="stranger"))
        try:
            answer(asked, cache=api.CacheUse(cache_id=cache.cache_id))
        except grpc.RpcError as error:
            print(error.code().name)
"""


async def test_a_stranger_needs_proto_alone(gateway: GatewayServer, cluster: Cluster, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """As a client in another language does: stubs made of the schemas, and nothing of ours."""
    proto, out = REPOSITORY / "proto", tmp_path / "stubs"
    out.mkdir()
    wanted = [str(proto / "springtide" / "v1" / name) for name in ("common.proto", "inference.proto", "caches.proto")]
    includes = [f"-I{proto}", f"-I{files('grpc_tools') / '_proto'}"]
    assert protoc.main(["protoc", *includes, f"--python_out={out}", f"--grpc_python_out={out}", *wanted]) == 0
    script = tmp_path / "stranger.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(out)!r})\n{textwrap.dedent(STRANGER)}")
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'

    def said(start: Start) -> Sequence[int]:
        if start.request.params.grammar.source:
            return tokenizer.encode('{"city":"Oslo"}')
        return tokenizer.encode(call if "weather" in tokenizer.decode(list(start.request.token_ids)) else "Hello.")

    cluster.script = said

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-I", str(script), gateway.grpc_address], capture_output=True, text=True, timeout=60)

    done = await asyncio.to_thread(run)
    lines = ["Hello.", 'weather {"city": "Oslo"} True', '{"city":"Oslo"}', "CACHE_STATUS_PENDING True", "NOT_FOUND"]
    assert done.stdout.splitlines() == lines, done.stderr
