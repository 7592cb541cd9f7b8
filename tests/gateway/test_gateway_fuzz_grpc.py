"""Whatever comes by gRPC, each field with any value and any bytes at all: an answer or a refusal that names the field, never a failure of
ours, and nothing of it stays."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from gateway_cluster import MODEL, Cluster
from gateway_fuzzing import SEED, TIMEOUT_S, Judge, assert_nothing_stays, sampled
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from gateway.app import GatewayServer
from springtide.rpc import caches_pb2, inference_pb2
from springtide.rpc import common_pb2 as pb
from springtide.rpc.channels import connect

TALK = [
    inference_pb2.ChatMessage(role="system", content="The tide comes in. " * 60),
    inference_pb2.ChatMessage(role="user", content="Why?"),
]
TOOL = inference_pb2.Tool(name="look", parameters='{"type": "object", "properties": {"at": {"type": "string"}}}')
CHAT = inference_pb2.ChatPrompt(messages=TALK, tools=[TOOL])
SAMPLING = pb.SamplingParams(max_tokens=4)
GENERATE, CREATE = "Inference/Generate", "ContextCaches/CreateCache"
BASES: list[tuple[str, Message]] = [
    (GENERATE, inference_pb2.GenerateRequest(model=MODEL, chat=CHAT, sampling=SAMPLING)),
    (GENERATE, inference_pb2.GenerateRequest(model=MODEL, text="Say it.", sampling=SAMPLING)),
    (GENERATE, inference_pb2.GenerateRequest(model=MODEL, tokens=inference_pb2.TokenPrompt(token_ids=[1, 2, 3]), sampling=SAMPLING)),
    (CREATE, caches_pb2.CreateCacheRequest(model=MODEL, chat=inference_pb2.ChatPrompt(messages=TALK), ttl_s=60)),
    ("ContextCaches/GetCache", caches_pb2.CacheName(cache_id="cache-x")),
    ("ContextCaches/DeleteCache", caches_pb2.CacheName(cache_id="cache-x")),
    ("ContextCaches/ExtendCache", caches_pb2.ExtendCacheRequest(cache_id="cache-x", ttl_s=60)),
    ("ContextCaches/ListCaches", caches_pb2.ListCachesRequest()),
]
TEXTS = [
    *("", "x", " ", "\x00", "é🙂", "../..", "tool", "assistant", "a" * 9000),
    *("null", "{}", "[]", '{"a": {"$ref": "#/a"}}', "[" * 2000, "(" * 500),
]
UNSIGNED = [0, 1, 2, 255, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
VALUES: dict[int, list[Any]] = {
    FieldDescriptor.TYPE_STRING: TEXTS,
    FieldDescriptor.TYPE_BYTES: [b"", b"\x00", b"abc", b"\xff" * 4, b"\x00" * 4000],
    FieldDescriptor.TYPE_BOOL: [False, True],
    FieldDescriptor.TYPE_UINT32: UNSIGNED,
    FieldDescriptor.TYPE_UINT64: [*UNSIGNED, (1 << 63) - 1, (1 << 64) - 1],
    FieldDescriptor.TYPE_INT32: [0, 1, -1, -2, (1 << 31) - 1, -(1 << 31)],
    FieldDescriptor.TYPE_FLOAT: [0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 3e38, -3e38, math.inf, -math.inf, math.nan],
    FieldDescriptor.TYPE_DOUBLE: [0.0, 1.0, -1.0, 1e-300, 1e300, math.inf, -math.inf, math.nan],
    FieldDescriptor.TYPE_ENUM: [0, 1, 2, 5, 77, -1],
}
REFUSALS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED}
DEADLINE = "terms.deadline_ms"


@dataclass(frozen=True)
class Case:
    method: str
    raw: bytes
    what: str
    field: str = ""
    """With its path, when it alone is not as it should be."""


def with_any_value(method: str, base: Message) -> Iterator[Case]:
    """For each field of the message, in whatever depth, and each value of its kind."""
    prompt = base.WhichOneof("prompt") if method == GENERATE else ""
    others = {field.name for oneof in base.DESCRIPTOR.oneofs for field in oneof.fields} - {prompt}
    for path in paths([field for field in base.DESCRIPTOR.fields if field.name not in others], ()):
        field, name = path[-1], ".".join(step.name for step in path)
        for value in VALUES.get(field.type, [None]):
            message = type(base)()
            message.CopyFrom(base)
            place(message, path, value)
            yield Case(method, message.SerializeToString(), f"{method} {prompt} {name}: {str(value)[:60]!r}", name)


def paths(fields: Any, above: tuple[FieldDescriptor, ...]) -> Iterator[tuple[FieldDescriptor, ...]]:
    for field in fields:
        yield (*above, field)
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from paths(field.message_type.fields, (*above, field))


def place(message: Any, path: tuple[FieldDescriptor, ...], value: Any) -> None:
    """Sets it; of a list's elements the first, or a new one; of a map's a new entry. None: an empty message is there."""
    field, *rest = path
    there = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        fill_map(there, field.message_type)
    elif rest:
        below = (there[0] if there else there.add()) if field.is_repeated else there
        below.SetInParent()
        place(below, tuple(rest), value)
    elif field.message_type is not None:
        (there.add() if field.is_repeated else there).SetInParent()
    elif field.is_repeated:
        there.append(value)
    else:
        setattr(message, field.name, value)


def fill_map(entries: Any, entry: Any) -> None:
    keys, values = (VALUES[entry.fields_by_name[name].type] for name in ("key", "value"))
    for number, value in enumerate(values):
        entries[keys[number % len(keys)]] = value


def with_any_bytes(method: str, base: Message) -> Iterator[Case]:
    """The message cut, with a bit that has changed, with a piece twice, and of what is no message."""
    dice, whole = random.Random(f"{SEED} {method}"), base.SerializeToString()
    for number in range(200):
        raw, at = bytearray(whole), dice.randrange(len(whole) + 1)
        match number % 4:
            case 0:
                del raw[at:]
            case 1 if raw:
                raw[at % len(raw)] ^= 1 << dice.randrange(8)
            case 2:
                raw[at:at] = raw[: dice.randrange(len(raw) + 1)]
            case _:
                raw = bytearray(dice.randbytes(dice.randrange(1, 60)))
        yield Case(method, bytes(raw), f"{method} {bytes(raw)[:300]!r}")


async def judged(channel: grpc.aio.Channel, case: Case) -> tuple[grpc.StatusCode, str]:
    """How the call went, and what is wrong with that, if anything."""
    path = f"/springtide.v1.{case.method}"
    try:
        if case.method == GENERATE:
            *_, last = [chunk async for chunk in channel.unary_stream(path, None, None)(case.raw, timeout=TIMEOUT_S)]
            done = inference_pb2.GenerateChunk.FromString(last)
            return grpc.StatusCode.OK, "" if done.finish_reason else f"{case.what}: the last message has no reason"
        await channel.unary_unary(path, None, None)(case.raw, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        code, details = error.code(), error.details() or ""
        if code not in REFUSALS and not (code is grpc.StatusCode.DEADLINE_EXCEEDED and "deadline" in details):
            return code, f"{case.what}: {code.name} {details[:300]}"
        names = [name.removesuffix("_s") for name in case.field.split(".")]
        about_all = "context length" in details or "a message of this method may have" in details
        if case.field and code is grpc.StatusCode.INVALID_ARGUMENT and not about_all and not any(name in details for name in names):
            return code, f"{case.what}: {details[:300]!r} does not name {case.field}"
        return code, ""
    return grpc.StatusCode.OK, ""


@pytest.mark.parametrize(("method", "base"), BASES, ids=lambda value: value if isinstance(value, str) else type(value).__name__)
@pytest.mark.parametrize("cases", [with_any_value, with_any_bytes])
async def test_any_message(gateway: GatewayServer, cluster: Cluster, cases: Any, method: str, base: Message) -> None:
    judge = Judge()
    async with connect(gateway.grpc_address) as channel:
        for case in sampled(list(cases(method, base)), f"{cases.__name__} {method}"):
            code, wrong = await judged(channel, case)
            judge.statuses[code.name] += 1
            judge.failures += [wrong] * bool(wrong)
    judge.done()
    await assert_nothing_stays(gateway, cluster)
