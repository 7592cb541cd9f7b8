"""The bodies of Gemini's API, and what they ask for. What cannot be honoured is refused by name."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, WithJsonSchema

from gateway.api_request import ApiRequest, CacheUse, FormatKind, OutputFormat
from gateway.fields import (
    Flag,
    JsonObject,
    Neutral,
    NeutralFalse,
    NeutralObject,
    OnlyNeutral,
    Penalty,
    Temperature,
    Text,
    TopP,
    default_when_null,
    json_value,
    unicode_text,
)
from gateway.gemini.conversation import Content, GeminiBody, ToolConfig, ToolParam, conversation, upper
from gateway.gemini.schema import json_schema
from gateway.prepare import MAX_CHOICES, MAX_LOGPROBS, MAX_STOP_LENGTH, MAX_STOP_STRINGS
from springtide.errors import InvalidRequest

CACHES = "cachedContents/"
"""Names of caches begin with it."""
MODELS = "models/"
"""And names of models with it."""
_IN_CONFIG = {
    "max_tokens": "maxOutputTokens",
    "stop": "stopSequences",
    "temperature": "temperature",
    "top_p": "topP",
    "top_k": "topK",
    "seed": "seed",
    "presence_penalty": "presencePenalty",
    "frequency_penalty": "frequencyPenalty",
    "logprobs": "logprobs",
    "n": "candidateCount",
    "format": "responseSchema",
    "chat_template_kwargs": "thinkingConfig",
}
NAMES = {
    "messages": "contents",
    "continue_final_message": "contents",
    "tool_choice": "toolConfig.functionCallingConfig",
    "cache_id": "cachedContent",
    **{name: f"generationConfig.{field}" for name, field in _IN_CONFIG.items()},
}
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH), AfterValidator(unicode_text)]


def _whole_number(value: Any) -> Any:
    """Some numbers that are whole are sent as 40.0, or as a text."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and value.removeprefix("-").isdecimal() and len(value) < 20:
        return int(value)
    return value


Whole = Annotated[int, BeforeValidator(_whole_number)]


def _response_schema(value: Any) -> Any:
    return None if value is None else json_schema(json_value(value), closed=True)


class ThinkingConfig(GeminiBody):
    include_thoughts: Flag = False
    thinking_budget: Annotated[Whole, Field(ge=-1)] | None = None
    """0: none; -1: as the model likes. Beyond that it is not enforced: thinking counts towards `maxOutputTokens`."""
    thinking_level: Annotated[
        Literal["THINKING_LEVEL_UNSPECIFIED", "MINIMAL", "LOW", "MEDIUM", "HIGH", "XHIGH"] | None, BeforeValidator(upper)
    ] = None

    @property
    def template_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.thinking_budget is not None:
            options["enable_thinking"] = self.thinking_budget != 0
        if self.thinking_level not in (None, "THINKING_LEVEL_UNSPECIFIED"):
            options["reasoning_effort"] = str(self.thinking_level).lower()
        return options


class GenerationConfig(GeminiBody):
    candidate_count: Annotated[Whole, default_when_null(1), Field(ge=1, le=MAX_CHOICES)] = 1
    stop_sequences: Annotated[list[Stop], default_when_null([]), Field(max_length=MAX_STOP_STRINGS)] = Field(default_factory=list)
    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: Annotated[Whole, Field(ge=0, lt=1 << 32)] | None = None
    seed: Annotated[Whole, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    response_mime_type: Literal["text/plain", "application/json", "text/x.enum"] | None = None
    response_schema: Annotated[dict[str, Any] | None, BeforeValidator(_response_schema), WithJsonSchema({"type": ["object", "null"]})] = (
        None
    )
    """After validation a JSON schema."""
    response_json_schema: JsonObject | None = None
    response_logprobs: Flag = False
    logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    thinking_config: ThinkingConfig | None = None
    response_modalities: Annotated[Any, OnlyNeutral([], ["TEXT"], ["text"])] = None
    media_resolution: Annotated[Any, OnlyNeutral("MEDIA_RESOLUTION_UNSPECIFIED")] = None
    speech_config: Neutral = None
    image_config: Neutral = None
    enable_enhanced_civic_answers: NeutralFalse = None

    def sampling(self) -> dict[str, Any]:
        names = ("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty")
        chosen = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.response_logprobs:
            chosen["logprobs"] = self.logprobs or 0
        elif self.logprobs is not None:
            field = "generationConfig.logprobs"
            raise InvalidRequest(f"{field} may only be set when responseLogprobs is true", param=field)
        return chosen

    def format(self) -> OutputFormat | None:
        schema = self.response_schema if self.response_schema is not None else self.response_json_schema
        if self.response_schema is not None and self.response_json_schema is not None:
            field = "generationConfig.responseSchema"
            raise InvalidRequest(f"{field} and responseJsonSchema are two words for one thing; send one of them", param=field)
        kind = self.response_mime_type or "text/plain"
        if schema is None and kind == "application/json":
            return OutputFormat(FormatKind.JSON_OBJECT)
        if schema is None:
            if kind == "text/x.enum":
                field = "generationConfig.responseSchema"
                raise InvalidRequest(f"{field} is required with responseMimeType 'text/x.enum'", param=field)
            return None
        if kind == "text/plain":
            field = "generationConfig.responseMimeType"
            raise InvalidRequest(f"{field} must be 'application/json', or 'text/x.enum', with a schema", param=field)
        if kind == "text/x.enum":
            return OutputFormat(FormatKind.CHOICE, json.dumps(_choices(schema), ensure_ascii=False))
        return OutputFormat(FormatKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))


class SafetySetting(GeminiBody):
    category: Text | None = None
    threshold: Annotated[Any, BeforeValidator(upper), OnlyNeutral("BLOCK_NONE", "OFF", "HARM_BLOCK_THRESHOLD_UNSPECIFIED")] = None
    """Nothing is filtered here."""


class GenerateContentRequest(GeminiBody):
    """The body of `:generateContent` and `:streamGenerateContent`."""

    model: Text | None = None
    """In the path; if it is here too, it is the same."""
    contents: Annotated[list[Content], FailFast(), Field(min_length=1)]
    system_instruction: Content | None = None
    tools: Annotated[list[ToolParam], FailFast(), default_when_null([])] = Field(default_factory=list)
    tool_config: ToolConfig | None = None
    generation_config: Annotated[GenerationConfig, default_when_null({})] = Field(default_factory=GenerationConfig)
    safety_settings: Annotated[list[SafetySetting], default_when_null([])] = Field(default_factory=list)
    cached_content: Text | None = None
    labels: NeutralObject = None
    service_tier: Annotated[Any, OnlyNeutral("unspecified", "standard")] = None
    store: NeutralFalse = None
    continuation_token: Neutral = None

    @property
    def shows_thoughts(self) -> bool:
        thinking = self.generation_config.thinking_config
        return thinking is not None and thinking.include_thoughts

    def request(self, model: str) -> ApiRequest:
        """What it asks of the model in the path. Raises InvalidRequest, naming the field."""
        model = model_name(model)
        if self.model is not None and model_name(self.model) != model:
            raise InvalidRequest(f"model is {self.model[:100]!r}, but {model[:100]!r} in the path", param="model")
        config = self.generation_config
        thinking = config.thinking_config.template_options if config.thinking_config is not None else {}
        return ApiRequest(
            model=model,
            prompt=conversation(self.contents, self.system_instruction, self.tools, self.tool_config, thinking),
            max_tokens=config.max_output_tokens,
            sampling=config.sampling(),
            n=config.candidate_count,
            stop=tuple(config.stop_sequences),
            format=config.format(),
            cache=CacheUse(cache_id=self._cache()),
            names=NAMES if config.response_json_schema is None else {**NAMES, "format": "generationConfig.responseJsonSchema"},
        )

    def _cache(self) -> str:
        if not self.cached_content:
            return ""
        for name in ("systemInstruction", "tools", "toolConfig"):
            if getattr(self, _SNAKE[name]):
                raise InvalidRequest(f"{name} is the cachedContent's, and may not be sent beside it", param=name)
        if not (cache_id := self.cached_content.removeprefix(CACHES)):
            raise InvalidRequest(f"cachedContent must be a name such as {CACHES}ID, not {self.cached_content!r}", param="cachedContent")
        return cache_id


_SNAKE = {"systemInstruction": "system_instruction", "tools": "tools", "toolConfig": "tool_config"}


class CountTokensRequest(GeminiBody):
    """The body of `:countTokens`: contents alone, or a whole request."""

    contents: Annotated[list[Content], FailFast(), default_when_null([])] = Field(default_factory=list)
    generate_content_request: GenerateContentRequest | None = None

    def request(self, model: str) -> ApiRequest:
        """What is to be counted. Raises InvalidRequest, naming the field."""
        if bool(self.contents) == (self.generate_content_request is not None):
            raise InvalidRequest("contents or generateContentRequest is required, and one of them alone", param="contents")
        if self.generate_content_request is not None:
            return self.generate_content_request.request(model)
        return ApiRequest(model=model_name(model), prompt=conversation(self.contents), names=NAMES)


def model_name(name: str) -> str:
    """Without what Gemini has before it."""
    return name.removeprefix(MODELS)


def _choices(schema: dict[str, Any]) -> list[str]:
    choices = schema.get("enum")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        field = "generationConfig.responseSchema"
        raise InvalidRequest(f"{field} must be an enum of texts with responseMimeType 'text/x.enum'", param=field)
    return choices
