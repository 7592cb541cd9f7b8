"""What the Responses API answers: a response, whole or as the stream of events in which it comes about."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.answer import message_for_client
from gateway.exchange import dump, server_sent
from gateway.openai.responses_items import Item, ItemIds
from gateway.output import Answer, CallArguments, CallBegun, Content, Delta, Ending, Part, PlacedToken, Reasoning
from springtide.errors import InvalidRequest, Overloaded, SpringtideError
from springtide.protocol.outputs import Finish
from springtide.protocol.usage import Usage

Json = dict[str, Any]
Entry = Callable[[PlacedToken], Json]
"""A token's log-probabilities as the API shows them."""

TERMINAL = ("completed", "incomplete", "failed", "cancelled")
"""States in which a response stays."""
_ENTRIES_A_PIECE = 16


def usage_json(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.num_kept},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def failure_json(error: SpringtideError, request_id: str = "") -> Json:
    """A failed response's `error`, whose codes are OpenAI's."""
    code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
    return {"code": "invalid_prompt" if isinstance(error, InvalidRequest) else code, "message": message_for_client(error, request_id)}


@dataclass(slots=True)
class _Open:
    """The output item that is being written, the last one."""

    item: Item
    number: int
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class ResponseFormat:
    """The response to one request in the making, and its events."""

    media_type = "text/event-stream"
    pings = True

    def __init__(self, request_id: str, response_id: str, shown: Json, num_input_items: int, entry: Entry | None = None) -> None:
        """`shown`: the request's fields that the response has. `entry`: None where log-probabilities are not asked for."""
        self._request_id = request_id
        self._ids = ItemIds(response_id)
        self._first_number = num_input_items
        self._entry = entry
        self._shown = dict(shown)
        self._created_at = int(time.time())
        self._output: list[Item] = []
        self._open: _Open | None = None
        self._sequence_number = 0
        self._entries: list[str] = []
        """Log-probabilities of the message's tokens so far, as JSON texts."""
        self._mark = secrets.token_hex(16)
        """Stands in JSON for log-probabilities that have been written already, or will be in pieces."""
        self._state: Json = {"status": "in_progress", "completed_at": None, "error": None, "incomplete_details": None, "usage": None}

    @property
    def response_id(self) -> str:
        return self._ids.response_id

    @property
    def status(self) -> str:
        return str(self._state["status"])

    @property
    def response(self) -> Json:
        """It as it is now, without log-probabilities."""
        head = {"id": self.response_id, "object": "response", "created_at": self._created_at}
        return {**head, **self._state, **self._shown, "output": list(self._output)}

    def not_stored(self) -> None:
        """It could not be stored, and says so."""
        self._shown["store"] = False

    # ---- as a stream ----

    def begin(self) -> Iterable[bytes]:
        yield self._event("response.created", {"response": self.response})
        yield self._event("response.in_progress", {"response": self.response})

    def delta(self, delta: Delta, usage: Usage) -> Iterable[bytes]:
        entries = self._listed(delta.tokens)
        for part in delta.parts:
            yield from self._part(part, entries)
            if isinstance(part, Content):
                entries = []
        if entries and not delta.parts and (self._open is None or self._open.item["type"] == "message"):
            # Of tokens without a text of their own, or whose text came before.
            yield from self._part(Content(""), entries)
        if delta.ending is not None:
            yield from self._ended(delta.ending)

    def end(self, usage: Usage) -> Iterable[bytes]:
        self._state["usage"] = usage_json(usage)
        kind = f"response.{self.status}"
        data = "".join(self._with_entries(self._numbered(kind, {"response": self.response}), iter([",".join(self._entries)])))
        yield f"event: {kind}\ndata: {data}\n\n".encode()

    def failed(self, error: SpringtideError) -> Iterable[bytes]:
        failure = failure_json(error, self._request_id)
        yield from self._close("incomplete")
        self._state |= {"status": "failed", "error": failure}
        yield self._event("error", {"code": error.code, "message": failure["message"], "param": error.param})
        yield self._event("response.failed", {"response": self.response})

    def cancelled(self, usage: Usage) -> Iterable[bytes]:
        """The end of the stream of one that was cancelled. No event of OpenAI's is about that alone."""
        yield from self._close("incomplete")
        self._state |= {"status": "cancelled", "usage": usage_json(usage)}
        yield self._event("response.incomplete", {"response": self.response})

    def _part(self, part: Part, entries: Sequence[str]) -> Iterator[bytes]:
        match part:
            case Content(text):
                if self._open is None or self._open.item["type"] != "message":
                    yield from self._begin_item({"type": "message", "role": "assistant", "content": []}, self._text_part(""))
                yield self._delta_event("response.output_text.delta", text, {"content_index": 0, "logprobs": []}, entries)
            case Reasoning(text):
                if self._open is None or self._open.item["type"] != "reasoning":
                    yield from self._begin_item({"type": "reasoning", "summary": [], "content": []}, {"type": "reasoning_text", "text": ""})
                yield self._delta_event("response.reasoning_text.delta", text, {"content_index": 0})
            case CallBegun(_, call_id, name):
                yield from self._begin_item({"type": "function_call", "call_id": call_id, "name": name, "arguments": ""})
            case CallArguments(_, text):
                yield self._delta_event("response.function_call_arguments.delta", text, {})

    def _begin_item(self, fields: Item, part: Json | None = None) -> Iterator[bytes]:
        yield from self._close("completed")
        number = len(self._output)
        item = {"id": self._ids.of(fields["type"], self._first_number + number), "status": "in_progress", **fields}
        self._output.append(item)
        self._open = _Open(item, number)
        yield self._event("response.output_item.added", {"output_index": number, "item": item})
        if part is not None:
            yield self._event("response.content_part.added", {**self._place_of(self._open), "content_index": 0, "part": part})

    def _delta_event(self, kind: str, text: str, fields: Json, entries: Sequence[str] = ()) -> bytes:
        assert self._open is not None, f"{kind} is of an item that has begun"
        self._open.pieces.append(text)
        event = self._numbered(kind, {**self._place_of(self._open), **fields, "delta": text})
        if not entries:
            return server_sent(event, kind)
        before, _, after = dump({**event, "logprobs": [self._mark]}).partition(f'"{self._mark}"')
        return f"event: {kind}\ndata: {before}{','.join(entries)}{after}\n\n".encode()

    def _ended(self, ending: Ending) -> Iterator[bytes]:
        if not self._output:
            yield from self._begin_item({"type": "message", "role": "assistant", "content": []}, self._text_part(""))
        cut = ending.finish is Finish.LENGTH
        yield from self._close("incomplete" if cut else "completed")
        self._state["status"] = "incomplete" if cut else "completed"
        if cut:
            self._state["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._state["completed_at"] = int(time.time())

    def _close(self, status: str) -> list[bytes]:
        """Ends the item that is open."""
        if self._open is None:
            return []
        opened, self._open = self._open, None
        item, place, text = opened.item, self._place_of(opened), opened.text
        item["status"] = status
        events = []
        if item["type"] == "function_call":
            item["arguments"] = text
            events.append(self._event("response.function_call_arguments.done", {**place, "name": item["name"], "arguments": text}))
        else:
            place |= {"content_index": 0}
            if item["type"] == "message":
                part = self._text_part(text)
                events.append(self._event("response.output_text.done", {**place, "text": text, "logprobs": []}))
            else:
                part = {"type": "reasoning_text", "text": text}
                events.append(self._event("response.reasoning_text.done", {**place, "text": text}))
            item["content"] = [part]
            events.append(self._event("response.content_part.done", {**place, "part": part}))
        events.append(self._event("response.output_item.done", {"output_index": opened.number, "item": item}))
        return events

    # ---- as a whole ----

    def completed(self, answer: Answer) -> Json:
        """The response with this answer, without log-probabilities."""
        (choice,) = answer.choices
        if self.status == "in_progress":
            for part in choice.parts:
                list(self._part(part, ()))
            list(self._ended(choice.ending))
        self._state["usage"] = usage_json(answer.usage)
        return self.response

    def whole(self, answer: Answer) -> Iterator[str]:
        yield from self._with_entries(self.completed(answer), self._pieces(answer.choices[0].tokens))

    def _pieces(self, tokens: Sequence[PlacedToken]) -> Iterator[str]:
        if self._entry is not None:
            for begin in range(0, len(tokens), _ENTRIES_A_PIECE):
                yield ("," if begin else "") + dump([self._entry(token) for token in tokens[begin : begin + _ENTRIES_A_PIECE]])[1:-1]

    # ---- pieces ----

    def _with_entries(self, shown: Json, entries: Iterator[str]) -> Iterator[str]:
        """The JSON text of a response, or of an event that has one, with these log-probabilities in its first message."""
        response = shown.get("response", shown)
        output = list(response["output"])
        number = next((number for number, item in enumerate(output) if item["type"] == "message"), None)
        if number is None:
            yield dump(shown)
            return
        (part,) = output[number]["content"]
        output[number] = {**output[number], "content": [{**part, "logprobs": [self._mark]}]}
        response = {**response, "output": output}
        before, _, after = dump({**shown, "response": response} if "response" in shown else response).partition(f'"{self._mark}"')
        yield before
        yield from entries
        yield after

    def _text_part(self, text: str) -> Json:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _place_of(self, opened: _Open) -> Json:
        return {"item_id": opened.item["id"], "output_index": opened.number}

    def _listed(self, tokens: Sequence[PlacedToken]) -> list[str]:
        if self._entry is None:
            return []
        entries = [dump(self._entry(token)) for token in tokens]
        self._entries += entries
        return entries

    def _numbered(self, kind: str, fields: Json) -> Json:
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _event(self, kind: str, fields: Json) -> bytes:
        return server_sent(self._numbered(kind, fields), kind)
