"""The routes of OpenAI's APIs."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gateway.answer import ApiBackend
from gateway.api_request import Conversation
from gateway.bodies import parse_body
from gateway.described import operation
from gateway.exchange import Call, Endpoint, Order, exchange
from gateway.kimi.use import cache_headers, use_of_headers
from gateway.openai import tokens, unserved
from gateway.openai.answers import ChatFormat, CompletionFormat, error_body
from gateway.openai.described import CHAT_COMPLETION, TEXT_COMPLETION
from gateway.openai.requests import ChatCompletionRequest, CompletionRequest, OpenAIRequest


def routes(backend: ApiBackend) -> APIRouter:
    router = APIRouter()

    @router.post(CHAT.path, openapi_extra=operation(CHAT_COMPLETION, CHAT.body, events=True))
    async def chat_completions(request: Request) -> Response:
        return await exchange(backend, request, CHAT)

    @router.post(COMPLETION.path, openapi_extra=operation(TEXT_COMPLETION, COMPLETION.body, events=True))
    async def completions(request: Request) -> Response:
        return await exchange(backend, request, COMPLETION)

    router.include_router(tokens.routes(backend))
    router.include_router(unserved.routes())
    return router


def _chat(raw: bytes, call: Call, backend: ApiBackend) -> Order:
    body = parse_body(raw, ChatCompletionRequest, backend.preparer.bounds.max_values)
    return _order(body, ChatFormat, call, backend, with_reasoning=body.include_reasoning)


def _completion(raw: bytes, call: Call, backend: ApiBackend) -> Order:
    body = parse_body(raw, CompletionRequest, backend.preparer.bounds.max_values)
    return _order(body, CompletionFormat, call, backend)


def _order(body: OpenAIRequest, answers: type[ChatFormat | CompletionFormat], call: Call, backend: ApiBackend, **options: bool) -> Order:
    written = answers(
        call.origin.request_id,
        backend.preparer.model_name,
        body.num_top_logprobs,
        body.include_usage,
        backend.tokenizer,
        body.prompt_logprobs,
        body.continuous_usage,
        **options,
    )
    request = body.api_request()
    if isinstance(request.prompt, Conversation):
        request = replace(request, cache=use_of_headers(call.headers, request.cache))
    return Order(request, body.stream, written)


CHAT = Endpoint("/v1/chat/completions", "chatcmpl", ChatCompletionRequest, _chat, error_body, cache_headers=cache_headers)
COMPLETION = Endpoint("/v1/completions", "cmpl", CompletionRequest, _completion, error_body, operation="text_completion")
BODIES = (CHAT.body, COMPLETION.body, *tokens.BODIES)
"""For the API's own description."""
