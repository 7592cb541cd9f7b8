"""The body of `POST /v1/responses`, and what it asks for. What cannot be honoured is refused by name; nothing is ignored silently."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, ValidationError, model_validator

from gateway.api_request import (
    ApiRequest,
    Conversation,
    FormatKind,
    Message,
    OutputFormat,
    Speaker,
    Tool,
    ToolChoice,
    ToolMode,
)
from gateway.bodies import explained
from gateway.conversation import MAX_TOOLS
from gateway.fields import (
    Body,
    Flag,
    JsonObject,
    MinP,
    Neutral,
    NeutralFalse,
    NeutralList,
    OnlyNeutral,
    Penalty,
    RepetitionPenalty,
    Temperature,
    Text,
    TopP,
    check_own_names,
    default_when_null,
)
from gateway.openai.messages import PromptCacheOptions, cache_use, with_lifetimes
from gateway.openai.requests import INT32, Seed
from gateway.openai.responses_items import Given, Item, conversation_of, input_items
from gateway.prepare import MAX_LOGPROBS
from springtide.errors import InvalidRequest
from springtide.protocol.scheduling import MAX_DEADLINE_MS, Terms

Json = dict[str, Any]

MAX_TOOL_NAME = 64
LOGPROBS = "message.output_text.logprobs"
_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512
"""Of metadata: OpenAI's."""
_MAX_IDENTIFIER = 512
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "format": "text.format"}

_INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""OpenAI's. But for the first they are about what is refused, or, in reasoning, is in the item in plain text."""
Includable = Annotated[str, Field(json_schema_extra={"enum": [*_INCLUDABLE]})]
Identifier = Annotated[Text, Field(max_length=_MAX_IDENTIFIER)]
ToolName = Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME, pattern=r"^[a-zA-Z0-9_-]+$")]


def _metadata(value: Any) -> Any:
    if not isinstance(value, dict) or len(value) > _MAX_PAIRS:
        raise ValueError(f"must be an object of at most {_MAX_PAIRS} texts")
    for key, text in value.items():
        if not isinstance(text, str) or len(key) > _MAX_KEY or len(text) > _MAX_VALUE:
            raise ValueError(
                f"must map keys of at most {_MAX_KEY} characters to texts of at most {_MAX_VALUE}, which {key[:100]!r} does not"
            )
    return value


Metadata = Annotated[dict[Text, Text], BeforeValidator(lambda value: {} if value is None else _metadata(value))]


class FunctionTool(Body):
    type: Literal["function"]
    name: ToolName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    output_schema: Neutral = None
    defer_loading: NeutralFalse = None
    allowed_callers: Annotated[Any, OnlyNeutral(["direct"])] = None
    async_: NeutralFalse = Field(None, alias="async")

    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.parameters or {}, bool(self.strict))

    def shown(self) -> Json:
        description = {} if self.description is None else {"description": self.description}
        return {"type": "function", "name": self.name, **description, "parameters": self.parameters, "strict": bool(self.strict)}


class NamedFunction(Body):
    type: Literal["function"]
    name: ToolName


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS)]


_CHOICES: dict[str, type[NamedFunction | AllowedTools]] = {"function": NamedFunction, "allowed_tools": AllowedTools}


class TextFormat(Body):
    type: Literal["text"]

    def format(self) -> OutputFormat | None:
        return None


class JsonObjectFormat(Body):
    type: Literal["json_object"]

    def format(self) -> OutputFormat | None:
        return OutputFormat(FormatKind.JSON_OBJECT)


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    name: ToolName
    schema_: JsonObject = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None

    def format(self) -> OutputFormat | None:
        return OutputFormat(FormatKind.JSON_SCHEMA, json.dumps(self.schema_, separators=(",", ":"), ensure_ascii=False))


_FORMATS: dict[str, type[TextFormat | JsonObjectFormat | JsonSchemaFormat]] = {
    "text": TextFormat,
    "json_object": JsonObjectFormat,
    "json_schema": JsonSchemaFormat,
}


def _by_type(value: Any, name: str, kinds: Mapping[str, type[Body]]) -> Any:
    """`value` as what its `type` says. Raises InvalidRequest, naming the type where it is not served."""
    kind = value.get("type") if isinstance(value, dict) else None
    model = kinds.get(kind) if isinstance(kind, str) else None
    if model is None:
        message = f"{name}: type {str(kind)[:100]!r} is not served; these are: {', '.join(kinds)}"
        raise InvalidRequest(message, param=f"{name}.type" if isinstance(value, dict) else name, code="unsupported_type")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        invalid = explained(error.errors(include_url=False)[0], name)
    raise invalid


def _tools(value: Any) -> Any:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise ValueError(f"must be a list of at most {MAX_TOOLS} tools")
    tools = tuple(_by_type(tool, f"tools[{number}]", {"function": FunctionTool}) for number, tool in enumerate(value))
    check_own_names([tool.name for tool in tools])
    return tools


def _tool_choice(value: Any) -> Any:
    if value is None or value in ("auto", "none", "required"):
        return value or "auto"
    if isinstance(value, str):
        raise ValueError("must be 'auto', 'none', 'required', or an object that names a function")
    return _by_type(value, "tool_choice", _CHOICES)


def _format(value: Any) -> Any:
    return TextFormat(type="text") if value is None else _by_type(value, "text.format", _FORMATS)


Input = Annotated[Any, BeforeValidator(input_items, json_schema_input_type=Given)]
"""After validation `tuple[Item, ...]`."""
Tools = Annotated[Any, BeforeValidator(_tools, json_schema_input_type=list[FunctionTool] | None)]
"""After validation `tuple[FunctionTool, ...]`."""
Choice = Annotated[
    Any,
    BeforeValidator(_tool_choice, json_schema_input_type=Literal["auto", "none", "required"] | NamedFunction | AllowedTools | None),
]
"""After validation `auto`, `none`, `required`, a NamedFunction or AllowedTools."""
Format = Annotated[Any, BeforeValidator(_format, json_schema_input_type=TextFormat | JsonObjectFormat | JsonSchemaFormat | None)]
"""After validation one of the three."""


class TextConfig(Body):
    format: Format = TextFormat(type="text")
    verbosity: Annotated[Any, OnlyNeutral("medium")] = None

    def shown(self) -> Json:
        return {"format": self.format.model_dump(by_alias=True, exclude_none=True), "verbosity": "medium"}


class Reasoning(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Annotated[Any, OnlyNeutral("auto")] = None
    generate_summary: Annotated[Any, OnlyNeutral("auto")] = None
    context: Annotated[Any, OnlyNeutral("auto", "current_turn")] = None
    mode: Annotated[Any, OnlyNeutral("standard")] = None


class CacheOptions(PromptCacheOptions):
    prewarm: NeutralFalse = None
    comparison_response_id: Neutral = None

    def shown(self) -> Json:
        return {"mode": self.mode, "ttl": self.ttl}


class BackgroundOptions(Body):
    completion_window: Annotated[Any, OnlyNeutral("soonest")] = None
    continuation_id: Neutral = None


class StreamOptions(Body):
    include_obfuscation: NeutralFalse = None


class PromptRequest(Body):
    """What a prompt is made of. `conversation` asks for what is not served, and is taken at the value that asks for nothing."""

    model: str
    input: Input = ()
    instructions: Text | None = None
    previous_response_id: Identifier | None = None
    tools: Tools = ()
    tool_choice: Choice = "auto"
    parallel_tool_calls: Annotated[bool, default_when_null(True)] = True
    text: Annotated[TextConfig, default_when_null(TextConfig())] = TextConfig()
    reasoning: Annotated[Reasoning, default_when_null(Reasoning())] = Reasoning()
    truncation: Annotated[Literal["auto", "disabled"], default_when_null("disabled")] = "disabled"
    conversation: Neutral = None

    @model_validator(mode="after")
    def _whole(self) -> PromptRequest:
        if not self.input and self.previous_response_id is None and self.instructions is None:
            raise ValueError("input must have at least one item")
        if isinstance(self.tool_choice, NamedFunction | AllowedTools):
            known = {tool.name for tool in self.tools}
            wanted = [self.tool_choice] if isinstance(self.tool_choice, NamedFunction) else self.tool_choice.tools
            missing = [tool.name for tool in wanted if tool.name not in known]
            if missing:
                raise ValueError(f"tool_choice names {missing[0]!r}, which is not among the tools")
        elif self.tool_choice == "required" and not self.tools:
            raise ValueError("tool_choice is 'required', but there are no tools")
        return self

    def api_request(self, history: Sequence[Item]) -> ApiRequest:
        """What is asked for; `history` has the items of the conversation so far, and then this one's. Raises InvalidRequest."""
        messages = conversation_of(history)
        if self.instructions is not None:
            messages.insert(0, Message(Speaker.SYSTEM, self.instructions))
        if not messages:
            raise InvalidRequest("input must have at least one item", param="input")
        prompt = Conversation(tuple(messages), self._offered_tools(), self._choice(), self._template_options())
        return ApiRequest(self.model, prompt, format=self.text.format.format(), names=_NAMES)

    def _offered_tools(self) -> tuple[Tool, ...]:
        allowed = None
        if isinstance(self.tool_choice, AllowedTools):
            allowed = {tool.name for tool in self.tool_choice.tools}
        return tuple(tool.tool() for tool in self.tools if allowed is None or tool.name in allowed)

    def _choice(self) -> ToolChoice:
        match self.tool_choice:
            case NamedFunction(name=name):
                return ToolChoice(ToolMode.REQUIRED, name, parallel=False)
            case AllowedTools(mode=mode):
                return ToolChoice(ToolMode(mode), parallel=self.parallel_tool_calls)
        return ToolChoice(ToolMode(self.tool_choice), parallel=self.parallel_tool_calls)

    def _template_options(self) -> Json:
        """What templates of reasoning models know."""
        effort = self.reasoning.effort
        if effort is None:
            return {}
        return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


class InputTokensRequest(PromptRequest):
    """The body of `POST /v1/responses/input_tokens`."""

    personality: Neutral = None


class ResponseRequest(PromptRequest):
    """OpenAI's fields; vLLM's and ours of the same meaning as in chat, from `seed` on; at last those that ask for what is not served, which
    are taken at the values that ask for nothing."""

    stream: Flag = False
    stream_options: StreamOptions | None = None
    background: Flag = False
    store: Annotated[bool, default_when_null(True)] = True
    metadata: Metadata = Field(default_factory=dict)
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    """Of built-in tools, of which there are none."""
    temperature: Temperature = None
    top_p: TopP = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Annotated[list[Includable], FailFast(), Field(max_length=64), default_when_null([])] = Field(default_factory=list)
    prompt_cache_key: Identifier | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    service_tier: Annotated[Any, OnlyNeutral("auto", "default", "flex")] = None
    safety_identifier: Identifier | None = None
    user: Identifier | None = None

    seed: Seed | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 32)] | None = None
    min_p: MinP = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    repetition_penalty: RepetitionPenalty = None
    ignore_eos: bool | None = None
    cache_salt: Identifier | None = None
    priority: Annotated[int, Field(ge=-INT32[1], le=INT32[1])] | None = None
    deadline_ms: Annotated[float, Field(gt=0, le=MAX_DEADLINE_MS)] | None = None
    idle: Flag = False

    prompt: Neutral = None
    moderation: Neutral = None
    image: Neutral = None
    access_programs: Neutral = None
    context_management: NeutralList = None
    background_options: BackgroundOptions | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ResponseRequest:
        if self.background and not self.store:
            raise ValueError("background needs store: the answer is fetched later")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options may only be set when stream is true")
        unknown = [name for name in self.include if name not in _INCLUDABLE]
        if unknown:
            raise ValueError(f"include may hold {', '.join(_INCLUDABLE)}, not {unknown[0][:100]!r}")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in self.include or bool(self.top_logprobs)

    def api_request(self, history: Sequence[Item]) -> ApiRequest:
        asked = super().api_request(history)
        assert isinstance(asked.prompt, Conversation), "a response answers a conversation"
        return replace(
            asked,
            prompt=replace(asked.prompt, messages=with_lifetimes(asked.prompt.messages, self.prompt_cache_options)),
            max_tokens=self.max_output_tokens,
            sampling=self._sampling(),
            # Of vLLM's priorities the lower are the more important.
            terms=Terms(priority=-(self.priority or 0), deadline_ms=self.deadline_ms or 0.0, idle=self.idle or self.service_tier == "flex"),
            cache=cache_use(self.prompt_cache_options, self.prompt_cache_retention, self.cache_salt),
        )

    def _sampling(self) -> Json:
        values: Json = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.top_k is not None:
            values["top_k"] = max(self.top_k, 0)
        return {**values, "logprobs": self.top_logprobs or 0} if self.wants_logprobs else values

    def shown(self) -> Json:
        """The fields that a response shows of its request."""
        choice = self.tool_choice
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata,
            "model": self.model,
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": self.reasoning.effort, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "flex" if self.service_tier == "flex" else "default",
            "store": self.store,
            "background": self.background,
            "temperature": self.temperature,
            "text": self.text.shown(),
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.shown() for tool in self.tools],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": self.top_p,
            "truncation": self.truncation,
            "user": self.user,
            "prompt_cache_retention": self.prompt_cache_retention,
            **({} if (options := self.prompt_cache_options) is None else {"prompt_cache_options": options.shown()}),
        }
