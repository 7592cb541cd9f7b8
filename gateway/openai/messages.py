"""The messages and tools of a chat in OpenAI's words, and the conversation that they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, ModelWrapValidatorHandler, PrivateAttr, Tag, WithJsonSchema, model_validator

from gateway.api_request import CacheMark, CacheUse, Conversation, Message, Speaker, Tool, ToolCall, ToolChoice, ToolMode
from gateway.fields import MAX_NAME_LENGTH, TOOL_NAME, Body, CacheControl, JsonObject, Neutral, Text, default_when_null, unicode_text
from springtide.errors import InvalidRequest

MAX_CALLS = 512
# What OpenAI calls a developer's message now is what chat templates know as the system's.
_SPEAKERS = {"developer": Speaker.SYSTEM, **{speaker.value: speaker for speaker in Speaker}}
_TEXT: dict[str, Any] = {"type": "string"}
_CACHE_TTL_S = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 12 * 3600.0}
OPTIONS_TTL_S = 0.0
"""In the place of a breakpoint's lifetime: that of the request's options."""
_CACHE_MARKS = ("prompt_cache_breakpoint", "cache_control")
"""Of a part: OpenAI's, and Anthropic's, which clients of both write into chats."""


def _content(value: Any) -> Any:
    """The text of a message: a string, or a list of text parts, which are joined by line breaks."""
    if value is None:
        return None
    if isinstance(value, str):
        return unicode_text(value)
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of text parts")
    texts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        # What the assistant refused with comes back as a part of a kind of its own.
        if kind not in ("text", "refusal"):
            raise ValueError(f"part {number} is of type {kind!r:.100}; this model reads only 'text'")
        if unknown := part.keys() - {"type", kind, *_CACHE_MARKS}:
            raise ValueError(f"part {number} has {min(unknown)!r:.100}, which this server does not support")
        if not isinstance(part.get(kind), str):
            raise ValueError(f"part {number} must have {kind!r}, a string")
        texts.append(part[kind])
    return unicode_text("\n".join(texts))


Content = Annotated[
    str | None,
    BeforeValidator(_content),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "type": {"const": "text"},
                            "text": _TEXT,
                            "prompt_cache_breakpoint": {
                                "type": ["object", "null"],
                                "properties": {"mode": {"enum": ["explicit", None]}, "ttl": {"enum": [*_CACHE_TTL_S, None]}},
                                "additionalProperties": False,
                            },
                            "cache_control": {
                                "type": ["object", "null"],
                                "properties": {"type": {"const": "ephemeral"}, "ttl": {"enum": ["5m", "1h", None]}},
                                "required": ["type"],
                                "additionalProperties": False,
                            },
                        },
                        "required": ["type", "text"],
                        "additionalProperties": False,
                    },
                    "minItems": 1,
                },
                {"type": "null"},
            ]
        }
    ),
]
Name = Annotated[Text, Field(max_length=MAX_NAME_LENGTH)]
FunctionName = Annotated[Text, Field(min_length=1, max_length=MAX_NAME_LENGTH, pattern=TOOL_NAME)]


class PromptCacheOptions(Body):
    mode: Annotated[Literal["implicit", "explicit"], default_when_null("implicit")] = "implicit"
    """Implicit: the whole prompt is kept; explicit: what `prompt_cache_breakpoint` says."""
    ttl: Annotated[Literal["5m", "30m", "1h", "12h"], default_when_null("30m")] = "30m"

    @property
    def ttl_s(self) -> float:
        return _CACHE_TTL_S[self.ttl]


class PromptCacheBreakpoint(Body):
    mode: Annotated[Literal["explicit"], default_when_null("explicit")] = "explicit"
    ttl: Literal["5m", "30m", "1h", "12h"] | None = None
    """None: that of the request's options."""


def _ttl_s(part: Mapping[str, Any]) -> float | None:
    """How long what comes before the part's end is to be kept, in whichever words it says so."""
    if (said := part.get("prompt_cache_breakpoint")) is not None:
        return breakpoint_ttl_s(PromptCacheBreakpoint.model_validate(said).ttl)
    if (said := part.get("cache_control")) is not None:
        return CacheControl.model_validate(said).mark.ttl_s
    return None


def breakpoint_ttl_s(ttl: str | None) -> float:
    return OPTIONS_TTL_S if ttl is None else _CACHE_TTL_S[ttl]


def breakpoint_marks(parts: Iterable[tuple[str, float | None]]) -> tuple[CacheMark, ...]:
    """Those of a message whose lines are these texts, each with how long what ends with it is to be kept, if it says so."""
    marks, length = [], -1
    for text, ttl_s in parts:
        length += 1 + len(text)
        if ttl_s is not None:
            marks.append(CacheMark(ttl_s, length))
    return tuple(marks)


def with_lifetimes(messages: Sequence[Message], options: PromptCacheOptions | None) -> tuple[Message, ...]:
    """Where marks do not say how long they last, the request's options do."""
    keep_s = (options or PromptCacheOptions()).ttl_s

    def lasting(mark: CacheMark) -> CacheMark:
        return replace(mark, ttl_s=keep_s) if mark.ttl_s == OPTIONS_TTL_S else mark

    return tuple(
        replace(message, cache_marks=tuple(map(lasting, message.cache_marks))) if message.cache_marks else message for message in messages
    )


def cache_use(options: PromptCacheOptions | None, retention: str | None, salt: str | None) -> CacheUse:
    """What a request's fields say of the whole prompt: how long it is to be kept, and with whom it is shared."""
    keep_s = 0.0
    if options is not None and options.mode == "implicit":
        keep_s = options.ttl_s
    elif retention == "24h":
        keep_s = 24 * 3600.0
    return CacheUse(salt=salt or "", keep_all_s=keep_s)


class CalledFunction(Body):
    name: FunctionName
    arguments: Annotated[Text, default_when_null("")] = ""
    parsed_arguments: Any = None
    """As OpenAI's client adds them to what it has parsed; `arguments` says the same."""


class ChatToolCall(Body):
    id: Annotated[Name, default_when_null("")] = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """As it was in a stream."""


class ChatMessage(Body):
    """A message as clients write it, or give it back as they got it."""

    role: Literal["system", "developer", "user", "assistant", "tool", "cache"]
    """`cache` is Kimi's: the first message names a context cache, which is put in its place."""
    content: Content = None
    name: Name | None = None
    tool_calls: Annotated[list[ChatToolCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: Name | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    refusal: Text | None = None
    annotations: Any = None
    parsed: Any = None
    audio: Neutral = None
    function_call: Neutral = None
    cache_control: CacheControl | None = None
    _cache_marks: tuple[CacheMark, ...] = PrivateAttr(())
    """Its parts' and its own."""

    @model_validator(mode="wrap")
    @classmethod
    def _marked(cls, value: Any, handler: ModelWrapValidatorHandler[ChatMessage]) -> ChatMessage:
        message = handler(value)
        parts = value.get("content") if isinstance(value, dict) else None
        if isinstance(parts, list):
            message._cache_marks = breakpoint_marks((part[part["type"]], _ttl_s(part)) for part in parts)
        if message.cache_control is not None:
            ends = {"num_characters": len(message.content or ""), "num_calls": len(message.tool_calls or ())}
            message._cache_marks += (replace(message.cache_control.mark, **ends),)
        return message

    @model_validator(mode="after")
    def _of_its_role(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content is required of a message of role {self.role!r}")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls are the assistant's, not of a message of role {self.role!r}")
        return self

    def message(self) -> Message:
        return Message(
            _SPEAKERS[self.role],
            self.content if self.content is not None else self.refusal or "",
            reasoning=self.reasoning_content or self.reasoning or "",
            tool_calls=tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ()),
            tool_call_id=self.tool_call_id or "",
            name=self.name or "",
            cache_marks=self._cache_marks,
        )


class ToolFunction(Body):
    name: FunctionName
    description: Annotated[Text, default_when_null("")] = ""
    parameters: JsonObject | None = None
    strict: Annotated[bool, default_when_null(False)] = False


class ChatTool(Body):
    type: Literal["function"]
    function: ToolFunction
    cache_control: CacheControl | None = None

    def tool(self) -> Tool:
        function, control = self.function, self.cache_control
        mark = None if control is None else control.mark
        return Tool(function.name, function.description, function.parameters or {}, function.strict, mark)


def conversation(
    messages: Sequence[ChatMessage],
    tools: Sequence[ChatTool] | None,
    template_options: Mapping[str, Any],
    add_generation_prompt: bool | None,
    continue_final_message: bool,
) -> Conversation:
    """`add_generation_prompt` is None where the client leaves that to the server."""
    return Conversation(
        tuple(message.message() for message in messages),
        tuple(tool.tool() for tool in tools or ()),
        template_options=template_options,
        add_generation_prompt=not continue_final_message if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=continue_final_message,
    )


class NamedFunction(Body):
    name: FunctionName


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


WantedTool = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")] | Annotated[NamedTool, Tag("<tool>")],
    Discriminator(lambda value: "<tool>" if isinstance(value, dict) else "<mode>"),
]


def tool_choice(wanted: WantedTool | None, tools: Sequence[Tool], parallel: bool | None) -> ToolChoice:
    """Raises InvalidRequest."""
    if isinstance(wanted, NamedTool):
        name = wanted.function.name
        if all(tool.name != name for tool in tools):
            raise InvalidRequest(f"tool_choice names {name[:100]!r}, which is not among the tools", param="tool_choice")
        return ToolChoice(ToolMode.REQUIRED, name, parallel=False)
    if wanted == "required" and not tools:
        raise InvalidRequest("tool_choice may only be 'required' when there are tools", param="tool_choice")
    return ToolChoice(ToolMode(wanted or "auto"), parallel=parallel is not False)
