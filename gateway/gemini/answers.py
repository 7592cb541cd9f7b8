"""What Gemini's API answers: whole and in pieces, errors, and models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from engine.tokenizer.tokenizer import Tokenizer
from gateway.answer import message_for_client
from gateway.exchange import Json, dump, server_sent
from gateway.fields import json_object
from gateway.gemini.requests import MODELS
from gateway.output import Answer, CallArguments, CallBegun, Choice, Content, Delta, Ending, Part, PlacedToken, Reasoning
from springtide.errors import Overloaded, SpringtideError
from springtide.protocol.outputs import Finish
from springtide.protocol.usage import Usage

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""
_TOKENS_A_PIECE = 16
_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    413: "INVALID_ARGUMENT",
    415: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


@dataclass(slots=True)
class _Candidate:
    """What a candidate's stream is at."""

    call: CallBegun | None = None
    """Whose arguments are coming: a call goes out as a whole."""
    arguments: list[str] = field(default_factory=list)
    malformed: bool = False
    """Some call's arguments were no object."""

    def parts(self, part: Part, shows_thoughts: bool) -> Iterator[Json]:
        match part:
            case Content(text):
                yield {"text": text}
            case Reasoning(text):
                if shows_thoughts:
                    yield {"text": text, "thought": True}
            case CallBegun():
                yield from self.complete()
                self.call = part
            case CallArguments(_, text):
                self.arguments.append(text)

    def complete(self) -> Iterator[Json]:
        """The call that is in the making, if there is one and it is whole."""
        if self.call is None:
            return
        arguments = json_object("".join(self.arguments) or "{}")
        if arguments is None:
            self.malformed = True
        else:
            yield {"functionCall": {"id": self.call.call_id, "name": self.call.name, "args": arguments}}
        self.call = None
        self.arguments.clear()

    def finish(self, ending: Ending) -> str:
        if ending.finish is Finish.LENGTH:
            return "MAX_TOKENS"
        return "MALFORMED_FUNCTION_CALL" if self.malformed else "STOP"


class ContentFormat:
    """A GenerateContentResponse, or several, in server-sent events or in a JSON list. Made for one request."""

    pings = False
    """Google's clients take a comment for a piece of the answer, and fail."""

    def __init__(
        self, response_id: str, model: str, tokenizer: Tokenizer, *, events: bool, shows_thoughts: bool, wants_logprobs: bool
    ) -> None:
        self.media_type = "text/event-stream" if events else "application/json"
        self._head: Json = {"modelVersion": model, "responseId": response_id}
        self._tokenizer = tokenizer
        self._events = events
        self._shows_thoughts = shows_thoughts
        self._wants_logprobs = wants_logprobs
        self._candidates: dict[int, _Candidate] = {}
        self._listed = False
        """The list has an entry."""

    def begin(self) -> Iterable[bytes]:
        if not self._events:
            yield b"["

    def delta(self, delta: Delta, usage: Usage) -> Iterable[bytes]:
        state = self._candidates.setdefault(delta.index, _Candidate())
        parts = [json_part for part in delta.parts for json_part in state.parts(part, self._shows_thoughts)]
        if delta.ending is not None:
            parts += state.complete()
        tokens = delta.tokens if self._wants_logprobs else ()
        if not (parts or tokens or delta.ending):
            return
        candidate: Json = {"content": _content(parts), "index": delta.index}
        if delta.ending is not None:
            candidate["finishReason"] = state.finish(delta.ending)
        if tokens:
            candidate["logprobsResult"] = {name: [entry(token) for token in tokens] for name, entry in self._columns().items()}
        yield self._piece({"candidates": [candidate], "usageMetadata": usage_json(usage), **self._head})

    def end(self, usage: Usage) -> Iterable[bytes]:
        # The last delta of each candidate has told what there is to tell.
        if not self._events:
            yield b"]"

    def failed(self, error: SpringtideError) -> Iterable[bytes]:
        yield self._piece(error_json(error, str(self._head["responseId"])))
        yield from () if self._events else (b"]",)

    def whole(self, answer: Answer) -> Iterator[str]:
        yield dump({**self._head, "usageMetadata": usage_json(answer.usage)})[:-1] + ',"candidates":['
        for number, choice in enumerate(answer.choices):
            yield "," if number else ""
            yield from self._candidate(choice)
        yield "]}"

    def _candidate(self, choice: Choice) -> Iterator[str]:
        state = _Candidate()
        parts = [json_part for part in choice.parts for json_part in state.parts(part, self._shows_thoughts)]
        parts += state.complete()
        candidate: Json = {
            "content": _content(parts),
            "index": choice.index,
            "finishReason": state.finish(choice.ending),
            "tokenCount": len(choice.tokens),
        }
        if not self._wants_logprobs:
            yield dump(candidate)
            return
        total = math.fsum(_finite(token.token.logprob) for token in choice.tokens)
        yield dump({**candidate, "avgLogprobs": total / max(1, len(choice.tokens))})[:-1] + ',"logprobsResult":'
        for number, (name, entry) in enumerate(self._columns().items()):
            yield f'{"," if number else "{"}"{name}":['
            for begin in range(0, len(choice.tokens), _TOKENS_A_PIECE):
                entries = [entry(token) for token in choice.tokens[begin : begin + _TOKENS_A_PIECE]]
                yield ("," if begin else "") + dump(entries)[1:-1]
            yield "]"
        yield "}}"

    def _columns(self) -> dict[str, Callable[[PlacedToken], Json]]:
        return {
            "chosenCandidates": lambda placed: self._entry(placed.token.token_id, placed.token.logprob),
            "topCandidates": lambda placed: {"candidates": [self._entry(token_id, logprob) for token_id, logprob in placed.token.top]},
        }

    def _entry(self, token_id: int, logprob: float | None) -> Json:
        return {"token": self._tokenizer.token_text(token_id), "tokenId": token_id, "logProbability": _finite(logprob)}

    def _piece(self, data: Json) -> bytes:
        if self._events:
            return server_sent(data)
        before = ",\n" if self._listed else ""
        self._listed = True
        return (before + dump(data)).encode()


def usage_json(usage: Usage) -> Json:
    return {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.completion_tokens - usage.reasoning_tokens,
        "thoughtsTokenCount": usage.reasoning_tokens,
        "totalTokenCount": usage.prompt_tokens + usage.completion_tokens,
        "cachedContentTokenCount": usage.cached_tokens,
        # Ours: why the cachedContent was not found.
        **({"cacheMissReason": usage.cache_miss} if usage.cache_miss else {}),
        "promptTokensDetails": _text_tokens(usage.prompt_tokens),
    }


def count_json(num_tokens: int, cached_tokens: int = 0) -> Json:
    """`cached_tokens` are those of the context that is named."""
    return {"totalTokens": num_tokens, "cachedContentTokenCount": cached_tokens, "promptTokensDetails": _text_tokens(num_tokens)}


def model_json(name: str, context_length: int) -> Json:
    return {
        "name": MODELS + name,
        "version": "1",
        "displayName": name,
        "description": "",
        "inputTokenLimit": context_length,
        "outputTokenLimit": context_length,
        "supportedGenerationMethods": ["generateContent", "countTokens", "createCachedContent"],
        "maxTemperature": 2.0,
    }


def error_json(error: SpringtideError, request_id: str = "") -> Json:
    """A google.rpc.Status."""
    message = message_for_client(error, request_id)
    details: list[Json] = []
    if error.param is not None:
        violation = {"field": error.param, "description": message}
        details.append({"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [violation]})
    if isinstance(error, Overloaded):
        details.append({"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": f"{max(1, math.ceil(error.retry_after_s))}s"})
    if error.code is not None:
        details.append({"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": error.code.upper(), "domain": "springtide"})
    status = _STATUS.get(error.http_status, "UNKNOWN")
    return {"error": {"code": error.http_status, "message": message, "status": status, "details": details}}


def _content(parts: list[Json]) -> Json:
    """Google's client leaves out of a chat's history what has a content without parts, a stream's last one too."""
    return {"role": "model", "parts": parts or [{"text": ""}]}


def _text_tokens(num_tokens: int) -> list[Json]:
    return [{"modality": "TEXT", "tokenCount": num_tokens}]


def _finite(logprob: float | None) -> float:
    """What JSON can hold; a model whose numbers have overflowed may give anything."""
    if logprob is None or not logprob > LEAST_LOGPROB:
        return LEAST_LOGPROB
    return min(logprob, 0.0)
