"""What a client asks for, whichever API it speaks: each façade makes an `ApiRequest` of its bodies, and nothing below knows which one did.

`Preparer.prepared` makes of it what runs: tokens, sampling parameters, how the output is to be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from springtide.protocol.scheduling import NO_TERMS, Terms

Prompt = str | tuple[int, ...]
"""Text, or token ids."""
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Speaker(StrEnum):
    """Who says a message of a conversation, in the words of chat templates."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant has made."""

    call_id: str
    name: str
    arguments: str
    """JSON text of an object, as the model wrote it."""


@dataclass(frozen=True, slots=True)
class CacheMark:
    """A wish that the prompt up to and with what carries the mark is kept: Anthropic's `cache_control`, OpenAI's breakpoints."""

    ttl_s: float
    num_characters: int = 0
    """Of its message's content, those before the mark's end."""
    num_calls: int = 0
    """Of its message's calls of tools, the same."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation. Texts alone: what else a client sends is refused by its façade."""

    speaker: Speaker
    content: str
    reasoning: str = ""
    """The assistant's, before `content`."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The assistant's, after `content`."""
    tool_call_id: str = ""
    """Of a tool's message: the call that it answers."""
    name: str = ""
    """Of the participant, or of a tool's message the tool; templates may write it."""
    cache_marks: tuple[CacheMark, ...] = ()


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the assistant may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    """JSON schema of the arguments, an object's."""
    strict: bool = False
    """Arguments are held to the schema."""
    cache_mark: CacheMark | None = None


class ToolMode(StrEnum):
    """Whether tools are called."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    """At least one."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools are called, and how many at once."""

    mode: ToolMode = ToolMode.AUTO
    name: str = ""
    """With REQUIRED: this one. Empty: any."""
    parallel: bool = True
    """More than one call in an answer is allowed."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt that the model's chat template renders."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    template_options: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    """Names for the template beside its own: `enable_thinking`."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The last message is the assistant's, and the answer goes on with it."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Prompts as they are, each of which has answers of its own."""

    prompts: tuple[Prompt, ...]
    add_special_tokens: bool = True
    """The model's own around a text (BOS)."""


class FormatKind(StrEnum):
    """What an output's text is held to."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    """`source` is a JSON list of texts."""
    GRAMMAR = "grammar"
    """Lark, or GBNF/EBNF as vLLM has it."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What the answer's text, which comes after the reasoning, is held to."""

    kind: FormatKind
    source: str = ""
    """The schema as JSON text, the regular expression, the choices, or the grammar. JSON_OBJECT has none."""


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What a request says of contexts that are kept."""

    cache_id: str = ""
    """The prompt begins with this context, which is put before it. No longer held, it is computed as any other."""
    tag: str = ""
    """The context is the one that has this name now."""
    in_prompt: bool = False
    """The prompt has the context's messages and tools itself; where they are others, or there is no such context, it is as without one."""
    extend_s: float | None = None
    """The context is to be kept for so long from now."""
    dry_run: bool = False
    """Nothing is to be computed: whether the context is there is all that is asked."""
    salt: str = ""
    """Only requests with the same salt share blocks: vLLM's `cache_salt`."""
    keep_all_s: float = 0.0
    """The whole prompt is to be kept for so long."""

    @property
    def named(self) -> bool:
        """A context is named."""
        return bool(self.cache_id or self.tag)


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """What a client asks for."""

    model: str
    prompt: Conversation | Texts
    max_tokens: int | None = None
    """None: the rest of the context for a Conversation, `COMPLETION_MAX_TOKENS` for Texts. 0: the prompt alone is computed."""
    sampling: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    """SamplingParams' fields by name, but for `max_tokens`: those that the client has set. The others are the model's defaults."""
    n: int = 1
    best_of: int = 0
    """So many are made, and the `n` likeliest are the answer. 0: `n`."""
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    """Texts that are not in the output, as far as that can be said of tokens: neither as they are nor after a space."""
    include_stop: bool = False
    """A stop string is part of the text that it ends."""
    skip_special_tokens: bool = True
    format: OutputFormat | None = None
    echo: bool = False
    """The answer's text begins with the prompt's."""
    prompt_logprobs: int | None = None
    """How many log-probabilities are wanted of each prompt token, beside its own."""
    truncate_prompt_tokens: int = 0
    """Only so many tokens of the prompt, its last, are taken. 0: all; -1: as many as the context holds."""
    terms: Terms = NO_TERMS
    cache: CacheUse = CacheUse()
    names: Mapping[str, str] = field(default_factory=dict)
    """What the client calls a field, where its API has another name for it, for errors: `{"messages": "contents"}`."""
