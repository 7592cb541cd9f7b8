"""The public gRPC API: `springtide.v1.Inference`, over the same path as the HTTP one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from gateway import metrics
from gateway.answer import ApiBackend
from gateway.api_request import ApiRequest, Conversation, Message, Speaker, Texts
from gateway.grpc_messages import Context, Messages, abort, no_message, parse_request, status_of
from gateway.output import Delta
from gateway.prepare import (
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SAMPLING_FIELDS,
    Origin,
    PreparedRequest,
)
from springtide.errors import InvalidRequest, SpringtideError
from springtide.ids import new_id
from springtide.protocol.outputs import Finish, SampledToken
from springtide.protocol.sampling import LogitBias
from springtide.protocol.usage import Usage
from springtide.protocol.wire import GRAMMAR, TERMS, TOKEN_IDS, TOKEN_LOGPROB, USAGE
from springtide.rpc import common_pb2 as pb
from springtide.rpc import inference_pb2
from springtide.rpc.channels import new_public_server
from springtide.rpc.health import add_health_and_reflection

_OFF_AT_ZERO = ("top_p", "repetition_penalty")
"""Zero stands for the default, which is another value."""
_ENDPOINT = "grpc/Generate"
_SPEAKERS = {"developer": Speaker.SYSTEM, **{name: Speaker(name) for name in ("system", "user", "assistant")}}
_FINISHES = {Finish.STOP: pb.FINISH_REASON_STOP, Finish.LENGTH: pb.FINISH_REASON_LENGTH}


async def new_server(backend: ApiBackend, max_connections: int) -> grpc.aio.Server:
    """Inference, with health and reflection beside it."""
    max_bytes = backend.preparer.bounds.max_message_bytes
    messages = Messages(backend.bodies, max_bytes)
    server = new_public_server(max_bytes, max_connections, messages)
    service, name = InferenceService(backend, messages), inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Generate": grpc.stream_stream_rpc_method_handler(service.generate, None, inference_pb2.GenerateChunk.SerializeToString),
        "ListModels": grpc.unary_unary_rpc_method_handler(
            service.list_models, inference_pb2.ListModelsRequest.FromString, inference_pb2.ListModelsReply.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, methods),))
    await add_health_and_reflection(server, name)
    return server


class InferenceService:
    """The methods of `springtide.v1.Inference`."""

    def __init__(self, backend: ApiBackend, messages: Messages) -> None:
        self._backend = backend
        self._messages = messages

    async def list_models(self, request: inference_pb2.ListModelsRequest, context: Context) -> inference_pb2.ListModelsReply:
        try:
            self._backend.api_keys.of(_metadata(context, "authorization"), "")
        except SpringtideError as error:
            await abort(context, error)
        preparer = self._backend.preparer
        return inference_pb2.ListModelsReply(
            models=[inference_pb2.ModelCard(id=preparer.model_name, context_length=preparer.context_length)]
        )

    async def generate(self, _: Any, context: Context) -> AsyncIterator[inference_pb2.GenerateChunk]:
        status, request_id = grpc.StatusCode.CANCELLED, new_id("gen")
        metrics.IN_FLIGHT.labels(_ENDPOINT).inc()
        try:
            async with contextlib.aclosing(self._generate(context, request_id)) as chunks:
                async for chunk in chunks:
                    yield chunk
            status = grpc.StatusCode.OK
        except SpringtideError as error:
            status = status_of(error)
            await abort(context, error, request_id)
        finally:
            metrics.IN_FLIGHT.labels(_ENDPOINT).dec()
            metrics.REQUESTS.labels(_ENDPOINT, status.name).inc()
            if status is grpc.StatusCode.CANCELLED:
                metrics.DISCONNECTS.labels(_ENDPOINT).inc()

    async def _generate(self, context: Context, request_id: str) -> AsyncGenerator[inference_pb2.GenerateChunk, None]:
        answer = self._backend.start(await self._ordered(context, request_id))
        # A cancelled call may leave this generator suspended until it is collected; its slots must not wait for that.
        context.add_done_callback(lambda _: answer.close())  # type: ignore[arg-type]  # the stubs want a class
        try:
            async for batch in answer.batches():
                for delta in batch:
                    yield _chunk(answer.request_id, delta, answer.usage if delta.ending is not None else None)
        finally:
            answer.close()

    async def _ordered(self, context: Context, request_id: str) -> PreparedRequest:
        authorization = _metadata(context, "authorization")
        # Nothing of a stranger's message is read.
        tenant = self._backend.api_keys.of(authorization, "")
        origin = Origin(request_id, self._backend.clock.now(), tenant, _metadata(context, "traceparent"))
        async with self._messages.received(context) as raw:
            if raw is None:
                raise no_message()
            return await self._backend.side_thread.run(len(raw), self._parsed, raw, authorization, origin)

    def _parsed(self, raw: bytes, authorization: str, origin: Origin) -> PreparedRequest:
        request = parse_request(raw, self._backend.preparer.bounds.max_values)
        return self._prepare(request, replace(origin, tenant=self._backend.api_keys.of(authorization, request.tenant)))

    def _prepare(self, request: inference_pb2.GenerateRequest, origin: Origin) -> PreparedRequest:
        preparer = self._backend.preparer
        preparer.check_model(request.model)
        wanted = request.sampling
        if wanted.HasField("logprobs") and wanted.logprobs > MAX_LOGPROBS:
            raise InvalidRequest(f"sampling.logprobs must be at most {MAX_LOGPROBS}, not {wanted.logprobs}", param="sampling.logprobs")
        if wanted.HasField("logit_bias"):
            raise InvalidRequest(
                "sampling.logit_bias is between nodes; the request's own logit_bias is what you want", param="sampling.logit_bias"
            )
        # What is too long is found by its length: to look at an entry costs hundreds of times what it takes in the message.
        preparer.check_count(len(request.chat.messages), "messages")
        preparer.check_count(len(request.tokens.token_ids), "tokens")
        if len(wanted.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(f"stop_token_ids may hold at most {MAX_STOP_TOKEN_IDS} ids", param="stop_token_ids")
        if len(request.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop may hold at most {MAX_STOP_STRINGS} strings", param="stop")
        asked = ApiRequest(
            model=request.model,
            prompt=_prompt(request),
            max_tokens=wanted.max_tokens or None,
            sampling=_sampling_values(request),
            stop=tuple(request.stop),
            terms=TERMS.decode(request.terms),
            names={"prompt": request.WhichOneof("prompt") or "prompt"},
        )
        return preparer.prepared(asked, origin)


def _prompt(request: inference_pb2.GenerateRequest) -> Conversation | Texts:
    """Raises InvalidRequest."""
    match request.WhichOneof("prompt"):
        case "chat":
            return Conversation(tuple(map(_message, range(len(request.chat.messages)), request.chat.messages)))
        case "text":
            return Texts((request.text,))
        case "tokens":
            return Texts((tuple(request.tokens.token_ids),))
        case _:
            raise InvalidRequest("prompt is required: one of text, tokens and chat", param="prompt")


def _message(number: int, message: inference_pb2.ChatMessage) -> Message:
    speaker = _SPEAKERS.get(message.role)
    if speaker is None:
        field = f"messages[{number}].role"
        raise InvalidRequest(f"{field} must be one of {', '.join(_SPEAKERS)}, not {message.role[:100]!r}", param=field)
    return Message(speaker, message.content)


def _sampling_values(request: inference_pb2.GenerateRequest) -> dict[str, Any]:
    """Raises InvalidRequest."""
    wanted = request.sampling
    if len(request.logit_bias) > MAX_BIASED_TOKENS:
        raise InvalidRequest(f"logit_bias may name at most {MAX_BIASED_TOKENS} tokens, not {len(request.logit_bias)}", param="logit_bias")
    if any(token_id >= 1 << 31 for token_id in request.logit_bias):
        raise InvalidRequest("logit_bias: keys must be token ids", param="logit_bias")
    values = {name: getattr(wanted, name) for name in SAMPLING_FIELDS}
    for name in _OFF_AT_ZERO:
        if not values[name]:
            del values[name]
    if len(wanted.bad_words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"sampling.bad_words may hold at most {MAX_BAD_WORDS} entries", param="sampling.bad_words")
    try:
        constraints = {
            "allowed_token_ids": TOKEN_IDS.decode(wanted.allowed_token_ids),
            "bad_words": tuple(TOKEN_IDS.decode(one) for one in wanted.bad_words),
            "grammar": GRAMMAR.decode(wanted.grammar),
        }
    except ValueError as error:
        raise InvalidRequest(f"sampling: {error}", param="sampling") from None
    return {
        **values,
        **constraints,
        "seed": wanted.seed or None,
        "stop_token_ids": tuple(wanted.stop_token_ids),
        "logprobs": wanted.logprobs if wanted.HasField("logprobs") else None,
        "logit_bias": LogitBias.of(dict(request.logit_bias)),
    }


def _chunk(request_id: str, delta: Delta, usage: Usage | None) -> inference_pb2.GenerateChunk:
    chunk = inference_pb2.GenerateChunk(
        request_id=request_id,
        text=delta.text,
        token_ids=[placed.token.token_id for placed in delta.tokens],
        logprobs=[logprobs for placed in delta.tokens if (logprobs := _logprobs(placed.token)) is not None],
        usage=None if usage is None else USAGE.encode(usage),
    )
    if delta.ending is not None:
        chunk.finish_reason = _FINISHES[delta.ending.finish]
    return chunk


def _metadata(context: Context, name: str) -> str:
    """Empty where there is none of the name."""
    return str(dict(context.invocation_metadata() or ()).get(name, ""))


def _logprobs(token: SampledToken) -> inference_pb2.TokenLogprobs | None:
    if token.logprob is None:
        return None
    return inference_pb2.TokenLogprobs(
        chosen=pb.TokenLogprob(token_id=token.token_id, logprob=token.logprob), top=map(TOKEN_LOGPROB.encode, token.top)
    )
