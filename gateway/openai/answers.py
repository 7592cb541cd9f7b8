"""What OpenAI's APIs answer: whole and in chunks, for chat and for plain completions, and errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any, TypeVar

from engine.tokenizer.tokenizer import Tokenizer
from gateway.answer import message_for_client
from gateway.exchange import Json, dump, server_sent
from gateway.output import (
    Answer,
    CallArguments,
    CallBegun,
    Choice,
    Content,
    Delta,
    Ending,
    Part,
    PlacedToken,
    PromptOutput,
    Reasoning,
)
from springtide.errors import SpringtideError
from springtide.protocol.outputs import Finish, SampledToken
from springtide.protocol.usage import Usage

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have. OpenAI's choice."""
_TOKENS_A_PIECE = 16


def usage_json(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.num_kept,
            # Ours: why the context cache that the request names was not found.
            **({"cache_miss_reason": usage.cache_miss} if usage.cache_miss else {}),
        },
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def model_json(name: str, created: int, context_length: int) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "springtide",
        "root": name,
        "parent": None,
        "max_model_len": context_length,
        "permission": [],
    }


def error_body(error: SpringtideError, request_id: str = "") -> Json:
    return error_json(message_for_client(error, request_id), error.openai_type, error.code, error.param)


def error_json(message: str, kind: str, code: str | None, param: str | None = None) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _Envelope:
    """What both kinds of answers have in common."""

    CHUNK: str
    media_type = "text/event-stream"
    pings = True

    def __init__(
        self,
        request_id: str,
        model: str,
        logprobs: int | None,
        wants_usage: bool,
        tokenizer: Tokenizer,
        prompt_logprobs: int | None = None,
        continuous_usage: bool = False,
        with_reasoning: bool = True,
    ) -> None:
        """`logprobs`: how many are wanted beside a token's own; `prompt_logprobs`: the same of the prompt's tokens, in vLLM's shape. None:
        not even that."""
        self._continuous_usage = continuous_usage
        self._with_reasoning = with_reasoning
        self._request_id = request_id
        self._head: Json = {"id": request_id, "created": int(time.time()), "model": model}
        self._num_logprobs = logprobs
        self._num_prompt_logprobs = prompt_logprobs
        self._wants_usage = wants_usage
        self._tokenizer = tokenizer

    @property
    def _wants_logprobs(self) -> bool:
        return self._num_logprobs is not None

    def begin(self) -> Iterable[bytes]:
        return ()

    def end(self, usage: Usage) -> Iterable[bytes]:
        if self._wants_usage:
            yield self._chunk([], usage)
        yield b"data: [DONE]\n\n"

    def failed(self, error: SpringtideError) -> Iterable[bytes]:
        yield server_sent(error_body(error, self._request_id))

    def _whole(self, kind: str, choices: Iterable[Iterator[str]], usage: Usage) -> Iterator[str]:
        yield dump({**self._head, "object": kind, "usage": usage_json(usage)})[:-1] + ',"choices":['
        for number, pieces in enumerate(choices):
            yield "," if number else ""
            yield from pieces
        yield "]"

    def _prompt_logprobs(self, choice: Choice) -> Iterator[str]:
        """A field of JSON, in pieces, where it is asked for."""
        count, prompt = self._num_prompt_logprobs, choice.prompt
        if count is None or prompt is None:
            return
        yield ',"prompt_logprobs":'
        yield from _listed(prompt.scored(count), self._scored)

    def _scored(self, scored: tuple[int, SampledToken]) -> Json | None:
        """As vLLM has it: the prompt's token itself, and those that would have been the likeliest."""
        rank, token = scored
        if token.logprob is None:
            return None
        entries = {str(token_id): self._ranked(token_id, logprob, place) for place, (token_id, logprob) in enumerate(token.top, 1)}
        return {str(token.token_id): self._ranked(token.token_id, token.logprob, rank), **entries}

    def _ranked(self, token_id: int, logprob: float, rank: int) -> Json:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._tokenizer.token_text(token_id)}

    def _chunk(self, choices: list[Json], usage: Usage | None = None) -> bytes:
        event = {**self._head, "object": self.CHUNK, "choices": choices}
        if self._wants_usage:
            event["usage"] = None if usage is None else usage_json(usage)
        return server_sent(event)

    def _so_far(self, usage: Usage) -> Usage | None:
        return usage if self._continuous_usage else None


class ChatFormat(_Envelope):
    CHUNK, WHOLE = "chat.completion.chunk", "chat.completion"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._introduced: set[int] = set()

    def delta(self, delta: Delta, usage: Usage) -> Iterable[bytes]:
        if delta.index not in self._introduced:
            self._introduced.add(delta.index)
            yield self._said(delta.index, {"role": "assistant", "content": ""}, usage)
        tokens = delta.tokens
        for part in delta.parts:
            if (said := self._part(part)) is not None:
                yield self._said(delta.index, said, usage, tokens)
                tokens = ()
        if tokens and self._wants_logprobs:
            yield self._said(delta.index, {"content": ""}, usage, tokens)
        if delta.ending is not None:
            yield self._said(delta.index, {}, usage, ending=delta.ending)

    def _part(self, part: Part) -> Json | None:
        match part:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text} if self._with_reasoning else None
            case CallBegun(number, call_id, name):
                return {"tool_calls": [{"index": number, **_call_json(call_id, name, "")}]}
            case CallArguments(number, text):
                return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}

    def _said(self, index: int, said: Json, usage: Usage, tokens: Sequence[PlacedToken] = (), ending: Ending | None = None) -> bytes:
        logprobs = self._logprobs(tokens) if tokens else None
        choice = {"index": index, "delta": said, "logprobs": logprobs, "finish_reason": None if ending is None else _finish(ending)}
        if ending is not None:
            choice["stop_reason"] = ending.stop
        return self._chunk([choice], self._so_far(usage))

    def whole(self, answer: Answer) -> Iterator[str]:
        yield from self._whole(self.WHOLE, map(self._choice, answer.choices), answer.usage)
        if answer.choices:
            yield from self._prompt_logprobs(answer.choices[0])
        yield "}"

    def _choice(self, choice: Choice) -> Iterator[str]:
        message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
        if self._with_reasoning and choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if calls := choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [_call_json(call.call_id, call.name, arguments) for call, arguments in calls]
        ending = {"finish_reason": _finish(choice.ending), "stop_reason": choice.ending.stop}
        yield dump({"index": choice.index, "message": message, **ending})[:-1] + ',"logprobs":'
        if not self._wants_logprobs:
            yield "null}"
            return
        yield '{"content":'
        yield from _listed(choice.tokens, self._content)
        yield ',"refusal":null}}'

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> Json | None:
        if not self._wants_logprobs:
            return None
        return {"content": [self._content(placed) for placed in tokens], "refusal": None}

    def _content(self, placed: PlacedToken) -> Json:
        return token_json(placed, self._tokenizer)


def _call_json(call_id: str, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _finish(ending: Ending) -> str:
    # A stop string may have cut a call off: nobody is told to make it.
    whole = ending.called and ending.finish is Finish.STOP and not isinstance(ending.stop, str)
    return "tool_calls" if whole else ending.finish.value


class CompletionFormat(_Envelope):
    CHUNK = "text_completion"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._before: dict[int, int] = {}
        """How long the prompt is that a choice's text begins with, in characters."""

    def delta(self, delta: Delta, usage: Usage) -> Iterable[bytes]:
        if delta.prompt is not None:
            self._before[delta.index] = len(delta.prompt.text)
            yield from self._echoed(delta.index, delta.prompt, usage)
        if delta.text or delta.ending is not None or (delta.tokens and self._wants_logprobs):
            tokens = _shifted(delta.tokens, self._before.get(delta.index, 0))
            yield self._piece(delta.index, delta.text, tokens, usage, delta.ending)

    def _piece(self, index: int, text: str, tokens: Iterable[PlacedToken], usage: Usage, ending: Ending | None = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": self._logprobs(tokens), "finish_reason": None}
        if ending is not None:
            choice |= {"finish_reason": ending.finish, "stop_reason": ending.stop}
        return self._chunk([choice], self._so_far(usage))

    def _echoed(self, index: int, prompt: PromptOutput, usage: Usage) -> Iterator[bytes]:
        if self._num_logprobs is None:
            yield self._piece(index, prompt.text, (), usage)
            return
        tokens, begin = prompt.placed(self._num_logprobs), 0
        while some := list(islice(tokens, _TOKENS_A_PIECE)):
            shown = begin + len(some)
            end = prompt.offsets[shown] if shown < len(prompt.offsets) else len(prompt.text)
            yield self._piece(index, prompt.text[some[0].offset if begin else 0 : end], some, usage)
            begin = shown

    def whole(self, answer: Answer) -> Iterator[str]:
        yield from self._whole(self.CHUNK, map(self._choice, answer.choices), answer.usage)
        yield "}"

    def _choice(self, choice: Choice) -> Iterator[str]:
        prompt, text = choice.prompt, choice.text
        if prompt is not None:
            text = prompt.text + text
        ending = {"finish_reason": choice.ending.finish, "stop_reason": choice.ending.stop}
        yield dump({"index": choice.index, "text": text, **ending})[:-1] + ',"logprobs":'
        if self._num_logprobs is None:
            yield "null"
        else:
            for number, (name, column) in enumerate(self._columns().items()):
                yield f'{"," if number else "{"}"{name}":'
                yield from _listed(self._tokens(choice, self._num_logprobs), column)
            yield "}"
        yield from self._prompt_logprobs(choice)
        yield "}"

    def _tokens(self, choice: Choice, num_logprobs: int) -> Iterable[PlacedToken]:
        """Those of its text, which may begin with the prompt."""
        prompt = choice.prompt
        if prompt is None or not prompt.offsets:
            return choice.tokens
        return chain(prompt.placed(num_logprobs), _shifted(choice.tokens, len(prompt.text)))

    def _logprobs(self, tokens: Iterable[PlacedToken]) -> Json | None:
        if not self._wants_logprobs:
            return None
        tokens = list(tokens)
        return {name: [column(placed) for placed in tokens] for name, column in self._columns().items()}

    def _columns(self) -> dict[str, Callable[[PlacedToken], Any]]:
        text = self._tokenizer.token_text

        def top(placed: PlacedToken) -> Json | None:
            """None for a prompt's first token. Of several tokens that have the same text (parts of characters) it has the likeliest."""
            token = placed.token
            if token.logprob is None:
                return None
            likeliest: Json = {}
            for token_id, logprob in token.top:
                likeliest.setdefault(text(token_id), _finite(logprob))
            # The one that was drawn need not be among them.
            likeliest.setdefault(text(token.token_id), _finite(token.logprob))
            return likeliest

        return {
            "tokens": lambda placed: text(placed.token.token_id),
            "token_logprobs": lambda placed: _finite(placed.token.logprob),
            "top_logprobs": top,
            "text_offset": lambda placed: placed.offset,
        }


def token_json(placed: PlacedToken, tokenizer: Tokenizer) -> Json:
    """A token with its log-probabilities, as chat and responses have it."""

    def entry(token_id: int, logprob: float | None) -> Json:
        return {"token": tokenizer.token_text(token_id), "logprob": _finite(logprob), "bytes": list(tokenizer.token_bytes(token_id))}

    top = [entry(token_id, logprob) for token_id, logprob in placed.token.top]
    return {**entry(placed.token.token_id, placed.token.logprob), "top_logprobs": top}


def _shifted(tokens: Iterable[PlacedToken], before: int) -> Iterable[PlacedToken]:
    """In a text that has so many characters before theirs."""
    return tokens if not before else (replace(placed, offset=placed.offset + before) for placed in tokens)


_T = TypeVar("_T")


def _listed(values: Iterable[_T], entry: Callable[[_T], Any]) -> Iterator[str]:
    """A JSON list with an entry for each of them, in pieces."""
    rest, begun = iter(values), False
    yield "["
    while some := list(islice(rest, _TOKENS_A_PIECE)):
        yield ("," if begun else "") + dump([entry(value) for value in some])[1:-1]
        begun = True
    yield "]"


def _finite(logprob: float | None) -> float | None:
    """What JSON can hold; a model whose numbers have overflowed may give anything."""
    if logprob is None:
        return None
    return min(logprob, 0.0) if logprob > LEAST_LOGPROB else LEAST_LOGPROB
