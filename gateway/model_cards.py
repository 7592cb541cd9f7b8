"""What models there are, in the words of the API that asks: several have the same path for it."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request

from gateway.answer import ApiBackend
from gateway.anthropic import answers as anthropic
from gateway.anthropic.routes import speaks as speaks_anthropic
from gateway.exchange import Json
from gateway.gemini import answers as gemini
from gateway.gemini.requests import model_name
from gateway.gemini.routes import speaks as speaks_gemini
from gateway.openai import answers as openai


def routes(backend: ApiBackend) -> APIRouter:
    router = APIRouter()
    created = int(time.time())
    name, context_length = backend.preparer.model_name, backend.preparer.context_length

    @router.get("/v1/models")
    @router.get("/v1beta/models")
    async def models(request: Request) -> Json:
        card = _card(request, name, created, context_length)
        if speaks_gemini(request.url.path, request.headers):
            return {"models": [card]}
        if speaks_anthropic(request.url.path, request.headers):
            return {"data": [card], "has_more": False, "first_id": name, "last_id": name}
        return {"object": "list", "data": [card]}

    @router.get("/v1/models/{model_id:path}")
    @router.get("/v1beta/models/{model_id:path}")
    async def model(model_id: str, request: Request) -> Json:
        backend.preparer.check_model(model_id if model_id == name else model_name(model_id))
        return _card(request, name, created, context_length)

    return router


def _card(request: Request, name: str, created: int, context_length: int) -> Json:
    if speaks_gemini(request.url.path, request.headers):
        return gemini.model_json(name, context_length)
    if speaks_anthropic(request.url.path, request.headers):
        return anthropic.model_json(name, created, context_length)
    return openai.model_json(name, created, context_length)
