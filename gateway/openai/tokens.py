"""From texts to tokens and back, as vLLM's server has it: `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import FailFast, Field, model_validator

from gateway.answer import ApiBackend
from gateway.api_request import ApiRequest, Conversation, Texts
from gateway.bodies import parse_body
from gateway.conversation import MAX_TOOLS
from gateway.described import operation
from gateway.exchange import Json, read_permitted
from gateway.fields import Body, Flag, JsonObject, NeutralFalse, NeutralObject, OnlyNeutral, Text, default_when_null
from gateway.openai.described import DETOKENIZED, TOKENIZED
from gateway.openai.messages import ChatMessage, ChatTool, conversation


class TokenizeRequest(Body):
    """Of a text, or of a chat."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], FailFast()] = Field(default_factory=list)
    add_special_tokens: bool | None = None
    """The default is true of a text and false of a chat, whose template writes them."""
    return_token_strs: Flag = False
    add_generation_prompt: bool | None = None
    continue_final_message: Flag = False
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: JsonObject | None = None
    chat_template: Annotated[Any, OnlyNeutral()] = None
    mm_processor_kwargs: NeutralObject = None

    @model_validator(mode="after")
    def _one_of_the_two(self) -> TokenizeRequest:
        if (self.prompt is None) != bool(self.messages):
            raise ValueError("prompt or messages is required, and not both")
        if self.messages and self.add_special_tokens:
            raise ValueError("add_special_tokens is not for a chat, whose template writes them")
        return self

    def asked(self) -> Conversation | Texts:
        if not self.messages:
            return Texts((self.prompt or "",), self.add_special_tokens is not False)
        options = self.chat_template_kwargs or {}
        return conversation(self.messages, self.tools, options, self.add_generation_prompt, self.continue_final_message)


class DetokenizeRequest(Body):
    model: Text | None = None
    tokens: list[Annotated[int, Field(ge=0)]]
    skip_special_tokens: Annotated[bool, default_when_null(False)] = False
    return_token_strs: NeutralFalse = None


BODIES = (TokenizeRequest, DetokenizeRequest)
"""For the API's own description."""


def routes(backend: ApiBackend) -> APIRouter:
    router = APIRouter()
    preparer, tokenizer = backend.preparer, backend.tokenizer

    def tokenized(raw: bytes) -> Json:
        body = parse_body(raw, TokenizeRequest, preparer.bounds.max_values)
        model = preparer.model_name if body.model is None else body.model
        preparer.check_model(model)
        (tokens,) = preparer.tokens(ApiRequest(model, body.asked()))
        strings = [tokenizer.token_text(token_id) for token_id in tokens] if body.return_token_strs else None
        return {"count": len(tokens), "max_model_len": preparer.context_length, "tokens": list(tokens), "token_strs": strings}

    def detokenized(raw: bytes) -> Json:
        body = parse_body(raw, DetokenizeRequest, preparer.bounds.max_values)
        if body.model is not None:
            preparer.check_model(body.model)
        preparer.check_ids(body.tokens, "tokens")
        return {"prompt": tokenizer.decode(body.tokens, body.skip_special_tokens)}

    @router.post("/tokenize", openapi_extra=operation(TOKENIZED, TokenizeRequest))
    async def tokenize(request: Request) -> Json:
        return await read_permitted(backend, request, tokenized)

    @router.post("/detokenize", openapi_extra=operation(DETOKENIZED, DetokenizeRequest))
    async def detokenize(request: Request) -> Json:
        return await read_permitted(backend, request, detokenized)

    return router
