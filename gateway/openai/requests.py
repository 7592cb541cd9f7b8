"""The bodies of OpenAI's requests, and what they ask for (`api_request`). A field that cannot be honoured is refused by name; nothing is
ignored silently.

Fields that exist in OpenAI's API but have no meaning here are accepted at the values that ask for nothing (`Neutral`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    FailFast,
    Field,
    WithJsonSchema,
    model_validator,
)

from gateway.api_request import ApiRequest, CacheUse, Conversation, Prompt, Texts
from gateway.conversation import MAX_TOOLS
from gateway.fields import (
    Body,
    JsonObject,
    MinP,
    Neutral,
    NeutralFalse,
    NeutralList,
    NeutralObject,
    OnlyNeutral,
    Penalty,
    RepetitionPenalty,
    Temperature,
    TopP,
    default_when_null,
    unicode_text,
)
from gateway.kimi.use import CACHE_ROLE, use_of_message
from gateway.openai.formats import GuidedFields
from gateway.openai.messages import (
    ChatMessage,
    ChatTool,
    PromptCacheOptions,
    WantedTool,
    cache_use,
    conversation,
    tool_choice,
    with_lifetimes,
)
from gateway.prepare import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SAMPLING_FIELDS,
)
from springtide.errors import InvalidRequest
from springtide.protocol.sampling import LogitBias, TokenIds
from springtide.protocol.scheduling import MAX_DEADLINE_MS, Terms

_TERMS = tuple(field.name for field in fields(Terms))
MAX_SALT_LENGTH = 1024
INT32 = (-(1 << 31), (1 << 31) - 1)


def _stop_strings(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, (list, tuple)) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise ValueError(f"may hold at most {MAX_STOP_STRINGS} strings, not {len(stops)}")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise ValueError(f"strings must have 1 to {MAX_STOP_LENGTH} characters, not {len(stop)}")
    return tuple(map(unicode_text, stops))


def _logit_bias(value: Any) -> LogitBias | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("must map token ids to numbers")
    if len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"may name at most {MAX_BIASED_TOKENS} tokens, not {len(value)}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not str(key).isdecimal() or len(str(key)) > 10 or int(key) > INT32[1]:
            raise ValueError(f"keys must be token ids, not {str(key)[:20]!r}")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise ValueError(f"values must be between -{MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}, not {bias!r:.20}")
        biases[int(key)] = float(bias)
    return LogitBias.of(biases)


def _token_ids(value: Any) -> TokenIds | None:
    if value is None:
        return None
    if not isinstance(value, list) or not _is_token_ids(value):
        raise ValueError("must be a list of token ids")
    if not 1 <= len(value) <= MAX_ALLOWED_TOKENS:
        raise ValueError(f"must hold 1 to {MAX_ALLOWED_TOKENS} token ids, not {len(value)}")
    if not (min(value) >= 0 and max(value) <= INT32[1]):
        raise ValueError(f"must hold token ids, not {next(token for token in value if not 0 <= token <= INT32[1])}")
    return TokenIds.of(value)


def _bad_words(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(word, str) for word in value):
        raise ValueError("must be a list of strings")
    if len(value) > MAX_BAD_WORDS or not all(1 <= len(word) <= MAX_BAD_WORD_LENGTH for word in value):
        raise ValueError(f"may hold at most {MAX_BAD_WORDS} strings of 1 to {MAX_BAD_WORD_LENGTH} characters")
    return tuple(map(unicode_text, value))


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """One prompt or several, each as text or as token ids."""
    if isinstance(value, str):
        return (unicode_text(value),)
    if isinstance(value, (list, tuple)) and value:
        if all(isinstance(entry, str) for entry in value):
            return tuple(map(unicode_text, value))
        if _is_token_ids(value):
            return (tuple(value),)
        if all(isinstance(entry, list) and entry and _is_token_ids(entry) for entry in value):
            return tuple(tuple(entry) for entry in value)
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists, and not empty")


def _is_token_ids(value: Any) -> bool:
    return all(isinstance(token, int) and not isinstance(token, bool) for token in value)


def _finite_int(value: int) -> int:
    if not -(1 << 63) <= value < 1 << 64:
        raise ValueError("must be a 64-bit integer")
    return value


_TEXT: dict[str, Any] = {"type": "string"}
_TOKEN_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Stop = Annotated[
    tuple[str, ...],
    BeforeValidator(_stop_strings),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH},
                {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}, "maxItems": MAX_STOP_STRINGS},
                {"type": "null"},
            ]
        }
    ),
]
Bias = Annotated[
    Any,
    BeforeValidator(_logit_bias),
    WithJsonSchema(
        {
            "type": ["object", "null"],
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "maxProperties": MAX_BIASED_TOKENS,
            "additionalProperties": {"type": "number", "minimum": -MAX_LOGIT_BIAS, "maximum": MAX_LOGIT_BIAS},
        }
    ),
]
"""After validation a LogitBias, or None."""
AllowedTokens = Annotated[
    Any, BeforeValidator(_token_ids), WithJsonSchema({"anyOf": [{**_TOKEN_IDS, "maxItems": MAX_ALLOWED_TOKENS}, {"type": "null"}]})
]
"""After validation TokenIds, or None."""
_WORD: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_LENGTH}
BadWords = Annotated[
    tuple[str, ...],
    BeforeValidator(_bad_words),
    WithJsonSchema({"anyOf": [{"type": "array", "items": _WORD, "maxItems": MAX_BAD_WORDS}, {"type": "null"}]}),
]
Prompts = Annotated[
    Any,
    BeforeValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
            ]
        }
    ),
]
"""After validation `tuple[Prompt, ...]`."""
Seed = Annotated[int, AfterValidator(_finite_int), WithJsonSchema({"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 64) - 1})]


class StreamOptions(Body):
    include_usage: Annotated[bool, default_when_null(False)] = False
    continuous_usage_stats: Annotated[bool, default_when_null(False)] = False
    """With `include_usage`: every chunk says what the answer has taken so far."""
    include_obfuscation: NeutralFalse = None


class OpenAIRequest(GuidedFields):
    """What chat and plain completions have in common, vLLM's extras included."""

    model: str
    stream: Annotated[bool, default_when_null(False)] = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, default_when_null(1), Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Stop = ()
    seed: Seed | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    temperature: Temperature = None
    top_p: TopP = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    logit_bias: Bias = None
    user: str | None = None
    """Says who the end user is; there is nothing to be done with it."""
    include_stop_str_in_output: Annotated[bool, default_when_null(False)] = False
    skip_special_tokens: Annotated[bool, default_when_null(True)] = True
    spaces_between_special_tokens: bool | None = None
    """Tokenizers of today put none there in any case."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32[1])] | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_LENGTH), AfterValidator(unicode_text)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=MAX_SALT_LENGTH), AfterValidator(unicode_text)] | None = None
    """Changes nothing: requests with beginnings in common meet without it."""
    use_beam_search: NeutralFalse = None
    length_penalty: Annotated[Any, OnlyNeutral(1.0, 1)] = None
    early_stopping: NeutralFalse = None
    detokenize: Annotated[Any, OnlyNeutral(True)] = None
    return_token_ids: NeutralFalse = None
    return_tokens_as_token_ids: NeutralFalse = None
    logits_processors: NeutralList = None
    kv_transfer_params: NeutralObject = None
    ec_transfer_params: NeutralObject = None
    vllm_xargs: NeutralObject = None
    request_id: Neutral = None
    session_id: Neutral = None
    truncation_side: Annotated[Any, OnlyNeutral("left")] = None
    logprob_token_ids: NeutralList = None
    thinking_token_budget: Neutral = None
    watermarking: NeutralFalse = None
    repetition_detection: Neutral = None
    stream_interval: Annotated[Any, OnlyNeutral(1)] = None
    return_token_offsets: NeutralFalse = None
    routed_experts_prompt_start: Annotated[Any, OnlyNeutral(0)] = None
    mm_payload: Annotated[Any, OnlyNeutral("tensors", "none")] = None
    return_mm_kwargs: NeutralFalse = None

    ignore_eos: bool | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 32)] | None = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32[1])] | None = None
    allowed_token_ids: AllowedTokens = None
    bad_words: BadWords = ()
    priority: Annotated[int, default_when_null(0), Field(ge=-INT32[1], le=INT32[1])] = 0
    """vLLM's: the lower, the more important."""
    deadline_ms: Annotated[float, Field(gt=0, le=MAX_DEADLINE_MS)] | None = None
    """Ours: until when the whole output is wanted, from the request's arrival."""
    idle: Annotated[bool, default_when_null(False)] = False
    """Ours: only in capacity that nobody else wants."""

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> OpenAIRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options may only be set when stream is true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs may only be set when stream is false")
        return self

    @property
    def has_time(self) -> bool:
        """Whether idle capacity is all that is asked for."""
        return self.idle

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    @abstractmethod
    def num_top_logprobs(self) -> int | None:
        """How many log-probabilities are wanted beside a token's own; None when not even that is."""

    @abstractmethod
    def api_request(self) -> ApiRequest:
        """What it asks for."""

    def _api_request(self, prompt: Conversation | Texts, max_tokens: int | None) -> ApiRequest:
        # Its fields are the body's of the same names; what that leaves out has the default.
        terms = Terms(**{name: value for name in _TERMS if (value := getattr(self, name)) is not None})
        wanted = self.output_format()
        return ApiRequest(
            self.model,
            prompt,
            max_tokens,
            self._sampling(),
            n=self.n,
            stop=self.stop,
            include_stop=self.include_stop_str_in_output,
            bad_words=self.bad_words,
            skip_special_tokens=self.skip_special_tokens,
            format=None if wanted is None else wanted.format,
            prompt_logprobs=self.prompt_logprobs,
            truncate_prompt_tokens=self.truncate_prompt_tokens or 0,
            terms=replace(terms, priority=-self.priority, idle=self.has_time),
            cache=CacheUse(salt=self.cache_salt or ""),
            names={} if wanted is None else {"format": wanted.field},
        )

    def _sampling(self) -> dict[str, Any]:
        values = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if self.top_k is not None:
            values["top_k"] = max(self.top_k, 0)
        if self.stop_token_ids is not None:
            values["stop_token_ids"] = tuple(self.stop_token_ids)
        if self.allowed_token_ids is not None:
            values["allowed_token_ids"] = self.allowed_token_ids
        return {**values, "logprobs": self.num_top_logprobs}


class ChatCompletionRequest(OpenAIRequest):
    messages: Annotated[list[ChatMessage], FailFast(), Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[bool, default_when_null(False)] = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: WantedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[bool, default_when_null(False)] = False
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """For the template, where it knows such a thing."""
    include_reasoning: Annotated[bool, default_when_null(True)] = True

    safety_identifier: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    """For the client's own books, as `user` is."""
    functions: NeutralList = None
    function_call: Annotated[Any, OnlyNeutral("none", "auto")] = None
    service_tier: Annotated[Any, OnlyNeutral("auto", "default", "flex")] = None
    modalities: Annotated[Any, OnlyNeutral(["text"])] = None
    store: NeutralFalse = None
    audio: Neutral = None
    prediction: Neutral = None
    verbosity: Annotated[Any, OnlyNeutral("medium")] = None
    web_search_options: Neutral = None
    echo: NeutralFalse = None
    best_of: Annotated[Any, OnlyNeutral(1)] = None
    add_special_tokens: NeutralFalse = None
    documents: NeutralList = None
    chat_template: Neutral = None
    mm_processor_kwargs: NeutralObject = None
    media_io_kwargs: NeutralObject = None
    return_prompt_text: NeutralFalse = None
    moderation: Neutral = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs may only be set when logprobs is true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt cannot both be true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError(
                f"max_tokens ({self.max_tokens}) and max_completion_tokens ({self.max_completion_tokens}) contradict each other"
            )
        return self

    @property
    def has_time(self) -> bool:
        return self.idle or self.service_tier == "flex"

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def api_request(self) -> ApiRequest:
        max_tokens = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        cache, said = cache_use(self.prompt_cache_options, self.prompt_cache_retention, self.cache_salt), self.messages
        if said[0].role == CACHE_ROLE:
            named, said = use_of_message(said[0].content or "", "messages[0].content"), said[1:]
            cache = replace(named, salt=cache.salt, keep_all_s=cache.keep_all_s)
        for number, message in enumerate(said):
            if message.role == CACHE_ROLE:
                raise InvalidRequest("messages: only the first one may be of the role cache", param=f"messages[{number}].role")
        asked = self._api_request(self._conversation(said), max_tokens)
        names = {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        return replace(asked, cache=cache, names={**asked.names, **names})

    def _conversation(self, messages: Sequence[ChatMessage]) -> Conversation:
        effort: dict[str, Any] = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        if self.reasoning_effort == "none":
            effort["enable_thinking"] = False
        options = {**effort, **(self.chat_template_kwargs or {})}
        said = conversation(messages, self.tools, options, self.add_generation_prompt, self.continue_final_message)
        return replace(
            said,
            messages=with_lifetimes(said.messages, self.prompt_cache_options),
            tool_choice=tool_choice(self.tool_choice, said.tools, self.parallel_tool_calls),
        )


class CompletionRequest(OpenAIRequest):
    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: Annotated[bool, default_when_null(False)] = False
    suffix: Annotated[Any, OnlyNeutral("")] = None
    add_special_tokens: Annotated[bool, default_when_null(True)] = True
    prompt_embeds: Neutral = None

    @model_validator(mode="after")
    def _best_of_more(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of must be at least n ({self.n}), not {self.best_of}")
        if self.best_of not in (None, self.n) and self.stream:
            raise ValueError(f"best_of must equal n ({self.n}) where stream is true: outputs are chosen from when all have ended")
        return self

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    def api_request(self) -> ApiRequest:
        asked = replace(
            self._api_request(Texts(self.prompt, self.add_special_tokens), self.max_tokens), best_of=self.best_of or 0, echo=self.echo
        )
        if not self.echo or self.logprobs is None:
            return asked
        if self.max_tokens == 1 and self.ignore_eos is None:
            # Who scores a text takes the last entry of the lists for the output's: there has to be one, though the model would end here.
            asked = replace(asked, sampling={**asked.sampling, "ignore_eos": True})
        if self.prompt_logprobs is not None and self.logprobs <= self.prompt_logprobs:
            return asked
        # Those of the prompt's tokens are in the same lists as those of the output's.
        return replace(asked, prompt_logprobs=self.logprobs, names={**asked.names, "prompt_logprobs": "logprobs"})
