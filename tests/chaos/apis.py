"""How each API is spoken: where its requests go, and what its answers and their events tell. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.chaos.history import Piece, Token
from tests.chaos.workload import Api, Item

MODEL = "tiny"
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Told:
    """What one event tells, or an answer that comes as a whole."""

    pieces: tuple[Piece, ...] = ()
    completion_tokens: int | None = None
    end: bool = False
    """Nothing comes after it."""
    stored_as: str | None = None
    """The id under which it can be had again."""
    error: Json | None = None
    """Its `message` and its `code`, which are called so in OpenAI's words alone."""


@dataclass(frozen=True, slots=True)
class Dialect:
    path: str
    whole: Callable[[Json, float], Told]
    event: Callable[[Json, float], Told]
    """Of what came when."""
    error: Callable[[Json], Json]
    """Of what there is under `error`."""
    model_in_path: bool = False
    ends_by_closing: bool = False
    """A stream has no last event of its own."""

    def body(self, item: Item) -> Json:
        return item.body if self.model_in_path else {"model": MODEL, **item.body}


DONE = "[DONE]"
"""The last event of OpenAI's first two APIs."""


def _openai_error(error: Json) -> Json:
    return error


def _anthropic_error(error: Json) -> Json:
    return {**error, "code": (error.get("details") or {}).get("error_code")}


def _gemini_error(error: Json) -> Json:
    reasons = [detail["reason"].lower() for detail in error.get("details", ()) if "reason" in detail]
    return {**error, "code": next(iter(reasons), None)}


def _call(name: str, arguments: str) -> str:
    """A call as text, of which each part may come by itself."""
    return f"<{name}>{arguments}" if name else arguments


# ---- OpenAI's chat and completions ----


def _choices(event: Json, now: float) -> Told:
    """Of an event, or of a whole answer."""
    pieces = []
    for choice in event["choices"]:
        part = choice.get("delta") or choice.get("message") or choice
        text = part.get("text", part.get("content")) or ""
        functions = [call["function"] for call in part.get("tool_calls") or ()]
        text += "".join(_call(function.get("name", ""), function.get("arguments") or "") for function in functions)
        scores = choice.get("prompt_logprobs") or event.get("prompt_logprobs") or ()
        tokens = (*_prompt_tokens(scores), *_tokens(choice.get("logprobs")))
        pieces.append(Piece(now, choice["index"], text, tokens, choice["finish_reason"]))
    return Told(tuple(pieces), event["usage"]["completion_tokens"] if event.get("usage") else None)


def _whole_choices(body: Json, now: float) -> Told:
    told = _choices(body, now)
    return Told(told.pieces, told.completion_tokens, end=True)


def _tokens(logprobs: Json | None) -> Iterator[Token]:
    """Of either API's shape."""
    if not logprobs:
        return
    if "content" in logprobs:
        for entry in logprobs["content"] or ():
            yield entry["token"], entry["logprob"]
    else:
        yield from zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)


def _prompt_tokens(scores: Iterable[dict[str, Json] | None]) -> Iterator[Token]:
    """Each entry has the prompt's own token first; of the first token nothing is told."""
    for entries in scores:
        own = next(iter(entries.values())) if entries else {"decoded_token": "", "logprob": None}
        yield own["decoded_token"], own["logprob"]


# ---- OpenAI's responses ----


def _response_event(event: Json, now: float) -> Told:
    match event["type"]:
        case "response.output_item.added" if event["item"]["type"] == "function_call":
            return Told((Piece(now, 0, _call(event["item"]["name"], "")),))
        case "response.output_text.delta" | "response.function_call_arguments.delta":
            return Told((Piece(now, 0, event["delta"], tuple(_tokens({"content": event.get("logprobs")}))),))
        case "response.completed" | "response.incomplete":
            response = event["response"]
            finish = (Piece(now, 0, "", (), response["status"]),)
            return Told(finish, response["usage"]["output_tokens"], end=True, stored_as=_stored_as(response))
        case "response.failed":
            # The event `error`, which comes before it, says the same.
            return Told(error=event["response"]["error"])
    return Told()


def _whole_response(body: Json, now: float) -> Told:
    text, tokens = "", list[Token]()
    for item in body["output"]:
        if item["type"] == "function_call":
            text += _call(item["name"], item["arguments"])
        else:
            text += "".join(part["text"] for part in item["content"])
            tokens += (token for part in item["content"] for token in _tokens({"content": part.get("logprobs")}))
    pieces = (Piece(now, 0, text, tuple(tokens), body["status"]),)
    return Told(pieces, body["usage"]["output_tokens"], end=True, stored_as=_stored_as(body))


def _stored_as(response: Json) -> str | None:
    return response["id"] if response["store"] else None


# ---- Anthropic's messages ----


def _message_event(event: Json, now: float) -> Told:
    match event["type"]:
        case "content_block_start" if event["content_block"]["type"] == "tool_use":
            return Told((Piece(now, 0, _call(event["content_block"]["name"], "")),))
        case "content_block_delta":
            delta = event["delta"]
            return Told((Piece(now, 0, delta.get("text") or delta.get("partial_json") or ""),))
        case "message_delta":
            return Told((Piece(now, 0, "", (), event["delta"]["stop_reason"]),), event["usage"]["output_tokens"])
        case "message_stop":
            return Told(end=True)
    return Told()


def _whole_message(body: Json, now: float) -> Told:
    blocks = [
        _call(block["name"], json.dumps(block["input"])) if block["type"] == "tool_use" else block["text"] for block in body["content"]
    ]
    return Told((Piece(now, 0, "".join(blocks), (), body["stop_reason"]),), body["usage"]["output_tokens"], end=True)


# ---- Gemini's contents ----


def _content(event: Json, now: float) -> Told:
    """Of an event, or of a whole answer."""
    pieces = []
    for candidate in event["candidates"]:
        calls = [part["functionCall"] for part in candidate["content"]["parts"] if "functionCall" in part]
        text = "".join(part.get("text", "") for part in candidate["content"]["parts"])
        text += "".join(_call(call["name"], json.dumps(call["args"])) for call in calls)
        chosen = candidate.get("logprobsResult", {}).get("chosenCandidates", ())
        tokens = tuple((entry["token"], entry["logProbability"]) for entry in chosen)
        pieces.append(Piece(now, candidate["index"], text, tokens, candidate.get("finishReason")))
    return Told(tuple(pieces), event["usageMetadata"]["candidatesTokenCount"])


def _whole_content(body: Json, now: float) -> Told:
    told = _content(body, now)
    return Told(told.pieces, told.completion_tokens, end=True)


DIALECTS: dict[Api, Dialect] = {
    "completions": Dialect("/v1/completions", _whole_choices, _choices, _openai_error),
    "chat/completions": Dialect("/v1/chat/completions", _whole_choices, _choices, _openai_error),
    "responses": Dialect("/v1/responses", _whole_response, _response_event, _openai_error),
    "messages": Dialect("/v1/messages", _whole_message, _message_event, _anthropic_error),
    "generateContent": Dialect(f"/v1beta/models/{MODEL}:generateContent", _whole_content, _content, _gemini_error, model_in_path=True),
    "streamGenerateContent": Dialect(
        f"/v1beta/models/{MODEL}:streamGenerateContent?alt=sse",
        _whole_content,
        _content,
        _gemini_error,
        model_in_path=True,
        ends_by_closing=True,
    ),
}
