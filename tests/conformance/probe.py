"""Asking an endpoint this and that, and what its answer says, whichever API it is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from gateway.fields import json_object
from tests.conformance.surfaces import MODEL, Surface, Trial

Json = dict[str, Any]


class NoEffect(Exception):
    """A field has not had the effect that it should have; the message says what was seen."""


def require(condition: object, seen: object) -> None:
    """Raises NoEffect unless the condition holds."""
    if not condition:
        raise NoEffect(str(seen)[:300])


@dataclass(frozen=True, slots=True)
class Answer:
    body: Json
    texts: tuple[str, ...]
    """Of the choices."""
    finish: str
    """Of the first choice, in the API's own word."""
    calls: tuple[tuple[str, Json], ...]
    """The first choice's, as names and arguments."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    kept_tokens: int = 0

    @property
    def text(self) -> str:
        return self.texts[0]


@dataclass(frozen=True, slots=True)
class Server:
    """A running cluster, of a model whose chat template has a place for whatever can be told to one."""

    http: httpx.Client
    names: Mapping[str, str]
    """Of the model and of other things that are there, by what stands for them."""

    @property
    def model(self) -> str:
        return self.names[MODEL]

    def post(self, surface: Surface, fields: Mapping[str, Any]) -> httpx.Response:
        """A request of the surface with these fields beside those that every request there has."""
        body = dict(surface.base)
        if surface.section:
            body[surface.section] = {**body[surface.section], **fields}
        else:
            body |= fields
        path, body, headers = self.named(surface.path), self.named(body), dict(surface.headers)
        if not surface.form:
            return self.http.request(surface.method, path, json=body, headers=headers)
        file = ("lines.jsonl", body.pop("file").encode())
        return self.http.request(surface.method, path, data=body, files={"file": file}, headers=headers)

    def named(self, value: Any) -> Any:
        """With names in the place of what stands for them."""
        return json.loads(_PLACES.sub(lambda match: self.names[match[0]], json.dumps(value)))


_PLACES = re.compile(rf"\b(?:{MODEL}|FILE|CACHE|KEPT)\b")


@dataclass(frozen=True, slots=True)
class Probe:
    """One field of a surface under trial."""

    server: Server
    surface: Surface
    trial: Trial

    def post(self, **fields: Any) -> httpx.Response:
        return self.server.post(self.surface, fields)

    def sent(self) -> httpx.Response:
        """The answer to the field at the trial's value, and whatever it needs beside it."""
        return self.post(**{**self.trial.with_, self.trial.field: self.trial.value})

    def ask(self, **fields: Any) -> Answer:
        """Raises NoEffect when that is refused."""
        response = self.post(**fields)
        require(response.is_success, f"{fields}: {response.text}")
        return _READERS.get(self.surface.path, _object)(response.json())

    def tried(self, **fields: Any) -> Answer:
        """With the field at the trial's value, and whatever it needs beside it."""
        return self.ask(**{**self.trial.with_, self.trial.field: self.trial.value, **fields})

    def without(self, **fields: Any) -> Answer:
        """The same without it."""
        return self.ask(**{**{name: value for name, value in self.trial.with_.items() if value is not None}, **fields})

    def greedy(self, length: int = 16, **fields: Any) -> Answer:
        return self.ask(**{"temperature": 0, self.surface.length: length, **fields})

    def events(self, **fields: Any) -> list[Json]:
        """What a stream tells, but for OpenAI's [DONE]."""
        response = self.post(**fields)
        require(response.headers["content-type"].startswith("text/event-stream"), response.headers["content-type"])
        lines = (line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: "))
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def said(self, text: str) -> Json:
        """The field that has this text as the prompt."""
        message = {"role": "user", "content": text}
        return {"/v1/completions": {"prompt": text}, "/v1/responses": {"input": text}}.get(self.surface.path, {"messages": [message]})

    def token(self, text: str) -> int:
        """The one that it is."""
        answer = self.server.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
        (token,) = answer["tokens"]
        return int(token)


def _openai(body: Json) -> Answer:
    """Chat and completions."""
    first = body["choices"][0]
    message = first.get("message", {})
    calls = tuple((call["function"]["name"], json_object(call["function"]["arguments"]) or {}) for call in message.get("tool_calls") or ())
    texts = tuple((choice.get("text") if "text" in choice else choice["message"]["content"]) or "" for choice in body["choices"])
    usage = body["usage"]
    details = usage["prompt_tokens_details"]
    counts = usage["prompt_tokens"], usage["completion_tokens"], details["cached_tokens"], details["cache_write_tokens"]
    return Answer(body, texts, first["finish_reason"], calls, *counts)


def _response(body: Json) -> Answer:
    text = "".join(part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"])
    calls = tuple((item["name"], json_object(item["arguments"]) or {}) for item in body["output"] if item["type"] == "function_call")
    usage = body["usage"] or {"input_tokens": 0, "output_tokens": 0, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}
    details = usage["input_tokens_details"]
    counts = usage["input_tokens"], usage["output_tokens"], details["cached_tokens"], details["cache_write_tokens"]
    return Answer(body, (text,), body["status"], calls, *counts)


def _message(body: Json) -> Answer:
    text = "".join(block["text"] for block in body["content"] if block["type"] == "text")
    calls = tuple((block["name"], block["input"]) for block in body["content"] if block["type"] == "tool_use")
    usage = body["usage"]
    cached, kept = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
    return Answer(body, (text,), body["stop_reason"], calls, usage["input_tokens"] + cached + kept, usage["output_tokens"], cached, kept)


def _object(body: Json) -> Answer:
    """What is no answer of the model; in one way or another it may say how many tokens it has."""
    counts = {**body, **(body.get("usageMetadata") or {}), **(body["data"] if isinstance(body.get("data"), dict) else {})}
    tokens = (counts.get(name) for name in ("input_tokens", "count", "totalTokens", "totalTokenCount", "total_tokens", "tokens"))
    return Answer(body, (), "", (), next((number for number in tokens if isinstance(number, int)), 0), 0)


def _content(body: Json) -> Answer:
    first, usage = body["candidates"][0], body["usageMetadata"]
    calls = [part["functionCall"] for part in first["content"]["parts"] if "functionCall" in part]
    texts = tuple("".join(part.get("text", "") for part in candidate["content"]["parts"]) for candidate in body["candidates"])
    made = tuple((call["name"], call["args"]) for call in calls)
    counts = usage["promptTokenCount"], usage["candidatesTokenCount"], usage["cachedContentTokenCount"]
    return Answer(body, texts, first["finishReason"], made, *counts)


_READERS: dict[str, Callable[[Json], Answer]] = {
    "/v1/chat/completions": _openai,
    "/v1/completions": _openai,
    "/v1/responses": _response,
    "/v1/messages": _message,
    f"/v1beta/models/{MODEL}:generateContent": _content,
}
