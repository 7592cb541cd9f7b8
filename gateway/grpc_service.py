"""The public gRPC API: `springtide.v1.Inference`, over the same path as the HTTP one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from gateway import metrics
from gateway.accounts.accounts import Charge
from gateway.accounts.allowance import Caller
from gateway.answer import ApiBackend, Traced
from gateway.api_request import ApiRequest
from gateway.grpc_caches import CachesService
from gateway.grpc_messages import Context, Messages, abort, authorization_of, metadata_of, no_message, parse_request, status_of
from gateway.grpc_requests import api_request
from gateway.output import CallArguments, CallBegun, Delta, Part, Reasoning
from gateway.prepare import Origin, PreparedRequest
from springtide.ids import new_id
from springtide.protocol.outputs import Finish, SampledToken
from springtide.protocol.usage import Usage
from springtide.protocol.wire import PROMPT_LOGPROBS, TOKEN_LOGPROB, USAGE
from springtide.rpc import caches_pb2, inference_pb2
from springtide.rpc import common_pb2 as pb
from springtide.rpc.channels import new_public_server
from springtide.rpc.health import add_health_and_reflection
from springtide.trace_context import TRACE_HEADER

_ENDPOINT = "grpc/Generate"
_OPERATION = "generate_content"
"""By OpenTelemetry's name, of what takes a text as well as a conversation."""
_FINISHES = {Finish.STOP: pb.FINISH_REASON_STOP, Finish.LENGTH: pb.FINISH_REASON_LENGTH}


async def new_server(backend: ApiBackend, max_connections: int) -> grpc.aio.Server:
    """Inference and context caches, with health and reflection beside them."""
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
    caches, caches_name = CachesService(backend, messages), caches_pb2.DESCRIPTOR.services_by_name["ContextCaches"].full_name
    handlers = [grpc.method_handlers_generic_handler(name, methods), grpc.method_handlers_generic_handler(caches_name, caches.methods())]
    server.add_generic_rpc_handlers(handlers)
    await add_health_and_reflection(server, name, caches_name)
    return server


class InferenceService:
    """The methods of `springtide.v1.Inference`."""

    def __init__(self, backend: ApiBackend, messages: Messages) -> None:
        self._backend = backend
        self._messages = messages

    async def list_models(self, request: inference_pb2.ListModelsRequest, context: Context) -> inference_pb2.ListModelsReply:
        try:
            caller = self._backend.accounts.caller(authorization_of(context))
        except Exception as error:
            await abort(context, error)
        preparer = self._backend.preparer
        card = inference_pb2.ModelCard(id=preparer.model_name, context_length=preparer.context_length)
        return inference_pb2.ListModelsReply(models=[card] if caller.may_use(card.id) else [])

    async def generate(self, _: Any, context: Context) -> AsyncIterator[inference_pb2.GenerateChunk]:
        status, request_id = grpc.StatusCode.CANCELLED, new_id("gen")
        traced = Traced(self._backend, request_id, metadata_of(context, TRACE_HEADER), _ENDPOINT, _OPERATION)
        metrics.IN_FLIGHT.labels(_ENDPOINT).inc()
        try:
            async with contextlib.aclosing(self._generate(context, traced)) as chunks:
                async for chunk in chunks:
                    yield chunk
            status = grpc.StatusCode.OK
        except Exception as error:
            status = status_of(error)
            await abort(context, error, request_id)
        finally:
            traced.end(status.name)
            metrics.IN_FLIGHT.labels(_ENDPOINT).dec()
            metrics.REQUESTS.labels(_ENDPOINT, status.name).inc()
            if status is grpc.StatusCode.CANCELLED:
                metrics.DISCONNECTS.labels(_ENDPOINT).inc()

    async def _generate(self, context: Context, traced: Traced) -> AsyncGenerator[inference_pb2.GenerateChunk, None]:
        answer = self._backend.start(await self._ordered(context, traced))
        # A cancelled call may leave this generator suspended until it is collected; its slots must not wait for that.
        context.add_done_callback(lambda _: answer.close())  # type: ignore[arg-type]  # the stubs want a class
        try:
            async for batch in answer.batches():
                for delta in batch:
                    yield _chunk(answer.request_id, delta, answer.usage if delta.ending is not None else None)
        finally:
            answer.close()

    async def _ordered(self, context: Context, traced: Traced) -> PreparedRequest:
        accounts, authorization = self._backend.accounts, authorization_of(context)
        # Nothing of a stranger's message is read.
        caller = accounts.caller(authorization)
        charge = await self._charge(context, caller) if caller.key_id else None
        origin = replace(traced.origin, tenant=caller.tenant, key_id=caller.key_id)
        async with self._messages.received(context) as raw:
            if raw is None:
                raise no_message()
            asked, origin, found = await self._backend.side_thread.run(len(raw), self._parsed, raw, authorization, origin)
        prepared = await self._backend.begun_with_cache(asked, origin) if found is None else found
        traced.tell(prepared, stream=True)
        if charge is None:
            # Without keys it is the message that says whose it is.
            charge = await self._charge(context, accounts.caller(authorization, prepared.tenant))
        receipt = await charge.take_tokens(prepared.num_prompt_tokens)
        if headers := {**charge.headers, **traced.headers}:
            await context.send_initial_metadata(tuple(headers.items()))
        return replace(prepared, receipt=receipt)

    async def _charge(self, context: Context, caller: Caller) -> Charge:
        charge = self._backend.accounts.charge(caller)
        context.add_done_callback(lambda _: charge.end())  # type: ignore[arg-type]  # the stubs want a class
        await charge.begin(self._backend.preparer.model_name)
        return charge

    def _parsed(self, raw: bytes, authorization: str, origin: Origin) -> tuple[ApiRequest, Origin, PreparedRequest | None]:
        request = parse_request(raw, inference_pb2.GenerateRequest, self._backend.preparer.bounds.max_values)
        origin = replace(origin, tenant=self._backend.accounts.caller(authorization, request.tenant).tenant)
        asked, prepared = self._prepare(request, origin)
        return asked, origin, prepared

    def _prepare(self, request: inference_pb2.GenerateRequest, origin: Origin) -> tuple[ApiRequest, PreparedRequest | None]:
        """Without what is prepared, where a context cache comes before it."""
        preparer = self._backend.preparer
        preparer.check_model(request.model)
        # What is too long is found by its length: to look at an entry costs hundreds of times what it takes in the message.
        preparer.check_count(len(request.chat.messages), "messages")
        preparer.check_count(len(request.tokens.token_ids), "tokens")
        asked = api_request(request)
        return asked, None if asked.cache.named else preparer.prepared(asked, origin)


def _chunk(request_id: str, delta: Delta, usage: Usage | None) -> inference_pb2.GenerateChunk:
    chunk = inference_pb2.GenerateChunk(
        request_id=request_id,
        index=delta.index,
        text=delta.text,
        reasoning="".join(part.text for part in delta.parts if isinstance(part, Reasoning)),
        tool_calls=[piece for part in delta.parts if (piece := _tool_call_piece(part)) is not None],
        token_ids=[placed.token.token_id for placed in delta.tokens],
        logprobs=[logprobs for placed in delta.tokens if (logprobs := _logprobs(placed.token)) is not None],
        usage=None if usage is None else USAGE.encode(usage),
    )
    if delta.prompt is not None and delta.prompt.logprobs is not None:
        chunk.prompt_logprobs.CopyFrom(PROMPT_LOGPROBS.encode(delta.prompt.logprobs))
    if delta.ending is not None:
        chunk.finish_reason, chunk.called = _FINISHES[delta.ending.finish], delta.ending.called
        if isinstance(delta.ending.stop, str):
            chunk.stop_string = delta.ending.stop
    return chunk


def _tool_call_piece(part: Part) -> inference_pb2.ToolCallPiece | None:
    match part:
        case CallBegun(number, call_id, name):
            return inference_pb2.ToolCallPiece(number=number, call_id=call_id, name=name)
        case CallArguments(number, text):
            return inference_pb2.ToolCallPiece(number=number, arguments=text)
        case _:
            return None


def _logprobs(token: SampledToken) -> inference_pb2.TokenLogprobs | None:
    if token.logprob is None:
        return None
    return inference_pb2.TokenLogprobs(
        chosen=pb.TokenLogprob(token_id=token.token_id, logprob=token.logprob), top=map(TOKEN_LOGPROB.encode, token.top)
    )
