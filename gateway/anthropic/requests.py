"""The bodies of Anthropic's Messages API, and what they ask for. What cannot be honoured is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, FailFast, Field

from gateway.anthropic.conversation import (
    MOST_CACHE_MARKS,
    MessageParam,
    Texts,
    ToolChoiceParam,
    ToolParam,
    conversation,
    marks,
)
from gateway.api_request import ApiRequest, CacheUse, FormatKind, OutputFormat
from gateway.fields import (
    Body,
    CacheControl,
    Flag,
    JsonObject,
    Neutral,
    NeutralFalse,
    NeutralList,
    OnlyNeutral,
    Text,
    TopP,
    default_when_null,
    unicode_text,
)
from gateway.prepare import MAX_STOP_LENGTH, MAX_STOP_STRINGS
from springtide.errors import InvalidRequest

LEAST_THINKING_BUDGET = 1024
_NO_THREADS = "thread_unsupported_request"
_NAMES = {
    "stop": "stop_sequences",
    "format": "output_config.format",
    "chat_template_kwargs": "thinking",
    "continue_final_message": "messages",
}


class Metadata(Body):
    user_id: Text | None = None
    """Says who the end user is; there is nothing to be done with it."""


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=LEAST_THINKING_BUDGET)] | None = None
    """Not enforced: thinking counts towards `max_tokens`."""
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Diagnostics(Body):
    previous_message_id: Neutral = None


class _Prompt(Body):
    """What a request and the counting of its tokens have in common."""

    model: Text
    messages: Annotated[list[MessageParam], FailFast(), Field(min_length=1)]
    system: Annotated[Texts, default_when_null([])] = Field(default_factory=list)
    tools: Annotated[list[ToolParam], FailFast(), default_when_null([])] = Field(default_factory=list)
    tool_choice: ToolChoiceParam | None = None
    thinking: Thinking | None = None
    cache_control: CacheControl | None = None
    """On the last block that can be kept."""
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    """What `output_config.format` was called before."""
    speed: Annotated[Any, OnlyNeutral("standard")] = None
    context_management: Annotated[Any, OnlyNeutral({}, {"edits": []})] = None
    mcp_servers: NeutralList = None

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    def request(self) -> ApiRequest:
        """What it asks for. Raises InvalidRequest, naming the field."""
        self._check_marks()
        prompt = conversation(self.system, self.messages, self.tools, self.tool_choice, self._template_options())
        keep_all_s = self.cache_control.mark.ttl_s if self.cache_control is not None else 0.0
        names = _NAMES if self.output_format is None else {**_NAMES, "format": "output_format"}
        return ApiRequest(model=self.model, prompt=prompt, format=self._format(), cache=CacheUse(keep_all_s=keep_all_s), names=names)

    def _template_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.thinking is not None:
            options["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config is not None and self.output_config.effort is not None:
            options["reasoning_effort"] = self.output_config.effort
        return options

    def _format(self) -> OutputFormat | None:
        wanted = self.output_config.format if self.output_config is not None else None
        if wanted is not None and self.output_format is not None:
            raise InvalidRequest("output_format is what output_config.format was called before; send one of them", param="output_format")
        wanted = wanted or self.output_format
        return None if wanted is None else OutputFormat(FormatKind.JSON_SCHEMA, json.dumps(wanted.schema_, ensure_ascii=False))

    def _check_marks(self) -> None:
        found = marks(self.system, self.messages, self.tools)
        if self.cache_control is not None:
            found.append(self.cache_control)
        if len(found) > MOST_CACHE_MARKS:
            raise InvalidRequest(f"cache_control may be on at most {MOST_CACHE_MARKS} blocks, not {len(found)}", param="cache_control")
        ttls = [control.mark.ttl_s for control in found]
        if ttls != sorted(ttls, reverse=True):
            raise InvalidRequest("cache_control: what is kept for 1h must come before what is kept for 5m", param="cache_control")


Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH), AfterValidator(unicode_text)]


class MessagesRequest(_Prompt):
    """The body of `POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=0)]
    """0: the prompt is computed, and kept as it says, and nothing is answered."""
    stream: Flag = False
    stop_sequences: Annotated[list[Stop], default_when_null([]), Field(max_length=MAX_STOP_STRINGS)] = Field(default_factory=list)
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: TopP = None
    top_k: Annotated[int, Field(ge=0, lt=1 << 32)] | None = None
    metadata: Metadata | None = None
    diagnostics: Diagnostics | None = None
    service_tier: Annotated[Any, OnlyNeutral("auto", "standard_only")] = None
    inference_geo: Neutral = None
    container: Neutral = None
    fallbacks: NeutralList = None
    fallback_credit_token: Neutral = None
    billing_policy: Neutral = None
    compaction: Neutral = None
    user_profile_id: Neutral = None
    thread: JsonObject | None = None
    """Messages that the server keeps between turns, which it does not."""
    store: NeutralFalse = None

    def request(self) -> ApiRequest:
        if self.thread is not None:
            # By this code Anthropic's own client knows to send all messages with every turn.
            raise InvalidRequest("thread is not supported by this server; send all messages", param="thread", code=_NO_THREADS)
        asked = super().request()
        if self.thinking is not None and self.thinking.type == "enabled":
            budget = self.thinking.budget_tokens
            if budget is None:
                raise InvalidRequest("thinking.budget_tokens is required where thinking.type is 'enabled'", param="thinking.budget_tokens")
            if budget >= self.max_tokens:
                message = f"thinking.budget_tokens ({budget}) must be less than max_tokens ({self.max_tokens})"
                raise InvalidRequest(message, param="thinking.budget_tokens")
        chosen = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        sampling = {name: value for name, value in chosen.items() if value is not None}
        return replace(asked, max_tokens=self.max_tokens, sampling=sampling, stop=tuple(self.stop_sequences))


class CountMessageTokensRequest(_Prompt):
    """The body of `POST /v1/messages/count_tokens`."""
