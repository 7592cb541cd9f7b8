"""What models there are, in the words of the API that asks: several have the same path for it."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request

from gateway.accounts.allowance import Caller
from gateway.answer import ApiBackend
from gateway.anthropic import answers as anthropic
from gateway.anthropic.routes import MODEL as ANTHROPIC_MODEL
from gateway.anthropic.routes import speaks as speaks_anthropic
from gateway.described import TEXT, array, nullable, one_of, operation, record
from gateway.exchange import Json
from gateway.gemini import answers as gemini
from gateway.gemini.described import MODEL as GOOGLE_MODEL
from gateway.gemini.requests import model_name
from gateway.gemini.routes import speaks as speaks_gemini
from gateway.openai import answers as openai
from gateway.openai.described import MODEL as OPENAI_MODEL


def routes(backend: ApiBackend) -> APIRouter:
    router = APIRouter()
    created = int(time.time())
    name, context_length = backend.preparer.model_name, backend.preparer.context_length

    of_google = record({"models": array(GOOGLE_MODEL)})
    of_anthropic = record(
        {"data": array(ANTHROPIC_MODEL), "has_more": one_of(False), "first_id": nullable(TEXT), "last_id": nullable(TEXT)}
    )
    of_openai = record({"object": one_of("list"), "data": array(OPENAI_MODEL)})

    @router.get("/v1/models", openapi_extra=operation({"anyOf": [of_openai, of_anthropic, of_google]}))
    @router.get("/v1beta/models", openapi_extra=operation(of_google))
    async def models(request: Request) -> Json:
        """Those that the caller may use."""
        caller: Caller = request.state.caller
        names = [name] if caller.may_use(name) else []
        cards = [_card(request, each, created, context_length) for each in names]
        if speaks_gemini(request.url.path, request.headers):
            return {"models": cards}
        if speaks_anthropic(request.url.path, request.headers):
            ends = {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": None, "last_id": None}
            return {"data": cards, "has_more": False, **ends}
        return {"object": "list", "data": cards}

    @router.get("/v1/models/{model_id:path}", openapi_extra=operation({"anyOf": [OPENAI_MODEL, ANTHROPIC_MODEL, GOOGLE_MODEL]}))
    @router.get("/v1beta/models/{model_id:path}", openapi_extra=operation(GOOGLE_MODEL))
    async def model(model_id: str, request: Request) -> Json:
        caller: Caller = request.state.caller
        backend.preparer.check_model(model_id if model_id == name else model_name(model_id))
        caller.check_model(name)
        return _card(request, name, created, context_length)

    return router


def _card(request: Request, name: str, created: int, context_length: int) -> Json:
    if speaks_gemini(request.url.path, request.headers):
        return gemini.model_json(name, context_length)
    if speaks_anthropic(request.url.path, request.headers):
        return anthropic.model_json(name, created, context_length)
    return openai.model_json(name, created, context_length)
