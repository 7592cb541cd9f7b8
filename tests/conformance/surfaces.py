"""The surfaces that are tried: for each endpoint a request that is served, and for each field a value that asks for something."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anthropic.types import message_count_tokens_params, message_create_params
from google.genai import types as genai
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

UNKNOWN = {"some": "thing"}
"""Stands for a value of a field that this table has no better one for: an SDK may be newer than it."""
WEATHER = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}}, "required": ["city"]}
ANSWER = {"type": "object", "properties": {"answer": {"type": "boolean"}}, "required": ["answer"], "additionalProperties": False}
PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
MODEL = "MODEL"
"""Stands for the name of the model that is asked."""
NONE = "none"
"""The name of nothing that there is."""
QUESTION = "Tell me a story about the sea."
FURTHER = f"{QUESTION} Let there be a ship in it."


@dataclass(frozen=True, slots=True)
class Trial:
    """One field, tried at one value. `with_` are other fields that it needs."""

    name: str
    value: Any
    with_: Mapping[str, Any] = field(default_factory=dict)
    missing: bool = False
    """The value names what there is not: who serves the field says so."""

    @property
    def field(self) -> str:
        return self.name.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Surface:
    """An endpoint and what is tried there."""

    title: str
    path: str
    """With what stands for names in it: MODEL, and those of `tests/conformance/objects.py`."""
    base: Mapping[str, Any]
    """A request that is served, with the same in it."""
    trials: tuple[Trial, ...]
    headers: Mapping[str, str] = field(default_factory=dict)
    section: str = ""
    """Of the body, in which the fields are; empty: the body itself."""
    length: str = "max_tokens"
    """What the bound on an answer's tokens is called."""
    method: str = "POST"
    form: bool = False
    """The body is a form with a file."""


def trials(names: Iterable[str], values: Mapping[str, Any], extras: Iterable[Trial] = ()) -> tuple[Trial, ...]:
    """A trial of each name, and those of `values` that the SDK does not know: they are extensions of ours or vLLM's."""
    known = dict.fromkeys([*sorted(names), *values])
    trials = []
    for name in known:
        value = values.get(name, UNKNOWN)
        trials.append(value if isinstance(value, Trial) else Trial(name, value))
    return (*trials, *extras)


def hints(params: Any) -> list[str]:
    return list(typing.get_type_hints(params))


TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}}
NO_MODEL = Trial("model", NONE, missing=True)
COMMON = {
    "model": NO_MODEL,
    "frequency_penalty": 0.5,
    "logit_bias": {"100": 1.0},
    "n": 2,
    "presence_penalty": 0.5,
    "seed": 7,
    "stop": ["zebra"],
    "stream": True,
    "stream_options": Trial("stream_options", {"include_usage": True, "continuous_usage_stats": True}, {"stream": True}),
    "temperature": 0.5,
    "top_p": 0.5,
    "user": "somebody",
    # vLLM's
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "stop_token_ids": [5],
    "ignore_eos": True,
    "min_tokens": 2,
    "bad_words": ["zebra"],
    "allowed_token_ids": [100, 101, 102],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 8,
    "prompt_logprobs": 1,
    "cache_salt": "pepper",
    "priority": 1,
    "guided_json": ANSWER,
    "guided_regex": "[a-c]{2}",
    "guided_choice": ["yes", "no"],
    "guided_grammar": 'root ::= "yes" | "no"',
    "guided_json_object": True,
    "structured_outputs": {"choice": ["yes", "no"]},
    "logits_processors": ["x"],
    "use_beam_search": True,
    "length_penalty": 0.5,
    # ours
    "deadline_ms": 60_000,
    "idle": True,
}

CHAT = Surface(
    "OpenAI Chat Completions",
    "/v1/chat/completions",
    {"model": "MODEL", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 3},
    trials(
        hints(chat_create_params.CompletionCreateParamsBase),
        {
            **COMMON,
            "messages": [{"role": "user", "content": FURTHER}],
            "audio": {"format": "wav", "voice": "alloy"},
            "function_call": "none",
            "functions": [{"name": "weather", "parameters": WEATHER}],
            "logprobs": True,
            "max_completion_tokens": Trial("max_completion_tokens", 3, {"max_tokens": None}),
            "max_tokens": 3,
            "metadata": {"trace": "1"},
            "modalities": ["text"],
            "moderation": {"model": "omni-moderation-latest"},
            "parallel_tool_calls": Trial("parallel_tool_calls", False, {"tools": [TOOL]}),
            "prediction": {"type": "content", "content": "hello"},
            "prompt_cache_key": "family",
            "prompt_cache_options": {"mode": "implicit"},
            "prompt_cache_retention": "24h",
            "reasoning_effort": "low",
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER, "strict": True}},
            "safety_identifier": "somebody",
            "service_tier": "auto",
            "store": True,
            "tool_choice": Trial("tool_choice", "required", {"tools": [TOOL], "max_tokens": 400}),
            "tools": [TOOL],
            "top_logprobs": Trial("top_logprobs", 2, {"logprobs": True}),
            "verbosity": "low",
            "web_search_options": {},
            "add_generation_prompt": True,
            "continue_final_message": Trial(
                "continue_final_message",
                True,
                {
                    "add_generation_prompt": False,
                    "messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "Hello, my"}],
                },
            ),
            "chat_template_kwargs": {"enable_thinking": True},
            "chat_template": "{{ messages }}",
            "documents": [{"text": "x"}],
            "add_special_tokens": False,
            "include_reasoning": False,
        },
        extras=[
            Trial("messages: developer", [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": QUESTION}]),
            Trial("messages: text parts", [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]),
            Trial("messages: image part", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]}]),
            Trial(
                "messages: audio part",
                [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}],
            ),
            Trial("messages: file part", [{"role": "user", "content": [{"type": "file", "file": {"file_id": "file-1"}}]}]),
            Trial("messages: name", [{"role": "user", "name": "ann", "content": QUESTION}]),
            Trial(
                "messages: tool_calls and tool",
                [
                    {"role": "user", "content": QUESTION},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}],
                    },
                    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
                ],
                {"tools": [TOOL]},
            ),
            Trial("tool_choice: one by name", {"type": "function", "function": {"name": "weather"}}, {"tools": [TOOL], "max_tokens": 400}),
            Trial(
                "tool_choice: allowed_tools",
                {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}},
                {"tools": [TOOL]},
            ),
            Trial("tools: custom", [{"type": "custom", "custom": {"name": "x"}}]),
            Trial("response_format: json_object", {"type": "json_object"}),
            Trial("service_tier: flex", "flex"),
            Trial("service_tier: priority", "priority"),
        ],
    ),
)

COMPLETIONS = Surface(
    "OpenAI Completions",
    "/v1/completions",
    {"model": "MODEL", "prompt": "The sea is", "max_tokens": 3},
    trials(
        hints(completion_create_params.CompletionCreateParamsBase),
        {
            **COMMON,
            "prompt": FURTHER,
            "prompt_cache_key": "family",
            "best_of": Trial("best_of", 2, {"n": 1}),
            "echo": Trial("echo", True, {"logprobs": 1}),
            "logprobs": 2,
            "max_tokens": 3,
            "suffix": "the end",
            "add_special_tokens": False,
            "response_format": {"type": "json_object"},
        },
        extras=[
            Trial("prompt: several texts", ["The sea is", "The sky is"]),
            Trial("prompt: token ids", [10, 11, 12]),
            Trial("prompt: several lists of token ids", [[10, 11], [12]]),
            Trial("max_tokens: 0", 0, {"echo": True, "logprobs": 1}),
        ],
    ),
)

FUNCTION = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": False}
RESPONSES = Surface(
    "OpenAI Responses",
    "/v1/responses",
    {"model": "MODEL", "input": QUESTION, "max_output_tokens": 16},
    trials(
        hints(response_create_params.ResponseCreateParamsBase),
        {
            "model": NO_MODEL,
            "input": FURTHER,
            "background": True,
            "background_options": {"completion_window": "1h"},
            "conversation": "conv_1",
            "include": ["message.output_text.logprobs"],
            "instructions": "Be brief.",
            "max_output_tokens": 16,
            "max_tool_calls": 1,
            "metadata": {"trace": "1"},
            "parallel_tool_calls": False,
            "previous_response_id": Trial("previous_response_id", "resp_none", missing=True),
            "prompt": {"id": "pmpt_1"},
            "prompt_cache_key": "family",
            "prompt_cache_options": {"mode": "implicit"},
            "prompt_cache_retention": "24h",
            "reasoning": {"effort": "low"},
            "safety_identifier": "somebody",
            "service_tier": "auto",
            "store": False,
            "stream": True,
            "stream_options": Trial("stream_options", {"include_obfuscation": False}, {"stream": True}),
            "temperature": 0.5,
            "text": {"format": {"type": "json_schema", "name": "answer", "schema": ANSWER, "strict": True}},
            "tool_choice": Trial("tool_choice", "required", {"tools": [FUNCTION], "max_output_tokens": 400}),
            "tools": [FUNCTION],
            "top_logprobs": Trial("top_logprobs", 2, {"include": ["message.output_text.logprobs"]}),
            "top_p": 0.5,
            "truncation": "auto",
            "user": "somebody",
            # vLLM's and ours
            "seed": 7,
            "top_k": 5,
            "min_p": 0.1,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.1,
            "ignore_eos": True,
            "cache_salt": "pepper",
            "priority": 1,
            "deadline_ms": 60_000,
            "idle": True,
        },
        extras=[
            Trial("input: items", [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]),
            Trial("input: image", [{"role": "user", "content": [{"type": "input_image", "image_url": PIXEL, "detail": "auto"}]}]),
            Trial(
                "input: function_call_output",
                [
                    {"role": "user", "content": QUESTION},
                    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
                    {"type": "function_call_output", "call_id": "c1", "output": "rain"},
                ],
            ),
            Trial("tools: web_search", [{"type": "web_search"}]),
            Trial("tools: file_search", [{"type": "file_search", "vector_store_ids": ["vs_1"]}]),
            Trial("tools: mcp", [{"type": "mcp", "server_label": "x", "server_url": "https://example.com"}]),
            Trial("tools: code_interpreter", [{"type": "code_interpreter", "container": {"type": "auto"}}]),
        ],
    ),
    length="max_output_tokens",
)

VERSION = {"anthropic-version": "2023-06-01"}
CLAUDE_TOOL = {"name": "weather", "description": "of a city", "input_schema": WEATHER}
_CLAUDE = {
    "model": NO_MODEL,
    "messages": [{"role": "user", "content": FURTHER}],
    "output_format": {"type": "json_schema", "schema": ANSWER},
    "cache_control": {"type": "ephemeral"},
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "thinking": {"type": "disabled"},
    "tool_choice": Trial("tool_choice", {"type": "any"}, {"tools": [CLAUDE_TOOL]}),
    "tools": [CLAUDE_TOOL],
    "output_config": {"format": {"type": "json_schema", "schema": ANSWER}},
}
MESSAGES = Surface(
    "Anthropic Messages",
    "/v1/messages",
    {"model": "MODEL", "max_tokens": 3, "messages": [{"role": "user", "content": QUESTION}]},
    trials(
        hints(message_create_params.MessageCreateParamsBase),
        {
            **_CLAUDE,
            "tool_choice": Trial("tool_choice", {"type": "any"}, {"tools": [CLAUDE_TOOL], "max_tokens": 400}),
            "max_tokens": 3,
            "metadata": {"user_id": "somebody"},
            "service_tier": "auto",
            "diagnostics": {"previous_message_id": "msg_1"},
            "stop_sequences": ["zebra"],
            "stream": True,
            "temperature": 0.5,
            "top_k": 5,
            "top_p": 0.5,
        },
        extras=[
            Trial("messages: text blocks", [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]),
            Trial(
                "messages: image block",
                [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}]}],
            ),
            Trial(
                "messages: tool_use and tool_result",
                [
                    {"role": "user", "content": QUESTION},
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "rain"}]},
                ],
                {"tools": [CLAUDE_TOOL]},
            ),
            Trial("max_tokens: 0", 0),
            Trial("thinking: enabled", {"type": "enabled", "budget_tokens": 1024}, {"max_tokens": 1025}),
            Trial("tools: web_search", [{"type": "web_search_20250305", "name": "web_search"}]),
        ],
    ),
    headers=VERSION,
)
COUNT_TOKENS = Surface(
    "Anthropic count_tokens",
    "/v1/messages/count_tokens",
    {"model": "MODEL", "messages": [{"role": "user", "content": QUESTION}]},
    trials(hints(message_count_tokens_params.MessageCountTokensParams), _CLAUDE),
    headers=VERSION,
)


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


CONTENTS = [{"role": "user", "parts": [{"text": QUESTION}]}]
DECLARED = {"functionDeclarations": [{"name": "weather", "parametersJsonSchema": WEATHER}]}
GENERATION_CONFIG = Surface(
    "Gemini generationConfig",
    "/v1beta/models/MODEL:generateContent",
    {"contents": CONTENTS, "generationConfig": {"maxOutputTokens": 3}},
    trials(
        map(camel, genai.GenerationConfig.model_fields),
        {
            "candidateCount": 2,
            "frequencyPenalty": 0.5,
            "logprobs": Trial("logprobs", 2, {"responseLogprobs": True}),
            "maxOutputTokens": 3,
            "presencePenalty": 0.5,
            "responseJsonSchema": Trial("responseJsonSchema", ANSWER, {"responseMimeType": "application/json"}),
            "responseLogprobs": True,
            "responseMimeType": "application/json",
            "responseModalities": ["AUDIO"],
            "responseSchema": Trial(
                "responseSchema",
                {"type": "OBJECT", "properties": {"answer": {"type": "BOOLEAN"}}, "required": ["answer"]},
                {"responseMimeType": "application/json"},
            ),
            "seed": 7,
            "stopSequences": ["zebra"],
            "temperature": 0.5,
            "thinkingConfig": {"thinkingBudget": 100},
            "topK": 5,
            "topP": 0.5,
            "mediaResolution": "MEDIA_RESOLUTION_LOW",
            "audioTimestamp": True,
            "enableAffectiveDialog": True,
        },
    ),
    section="generationConfig",
    length="maxOutputTokens",
)
GENERATE_CONTENT = Surface(
    "Gemini generateContent",
    "/v1beta/models/MODEL:generateContent",
    {"contents": CONTENTS, "generationConfig": {"maxOutputTokens": 3}},
    trials(
        ["systemInstruction", "tools", "toolConfig", "safetySettings", "cachedContent", "labels"],
        {
            "model": Trial("model", f"models/{NONE}", missing=True),
            "contents": [{"role": "user", "parts": [{"text": FURTHER}]}],
            "generationConfig": {"maxOutputTokens": 2, "temperature": 0},
            "systemInstruction": {"parts": [{"text": "Be brief."}]},
            "tools": [DECLARED],
            "toolConfig": Trial(
                "toolConfig",
                {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["weather"]}},
                {"tools": [DECLARED], "generationConfig": {"maxOutputTokens": 400}},
            ),
            "safetySettings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
            "cachedContent": Trial("cachedContent", "cachedContents/none", missing=True),
            "labels": {"team": "a"},
        },
        extras=[
            Trial("contents: inlineData", [{"role": "user", "parts": [{"inlineData": {"mimeType": "image/png", "data": "aGk="}}]}]),
            Trial(
                "contents: functionCall and functionResponse",
                [
                    *CONTENTS,
                    {"role": "model", "parts": [{"functionCall": {"name": "weather", "args": {"city": "Oslo"}}}]},
                    {"role": "user", "parts": [{"functionResponse": {"name": "weather", "response": {"result": "rain"}}}]},
                ],
                {"tools": [DECLARED]},
            ),
            Trial("tools: googleSearch", [{"googleSearch": {}}]),
            Trial("tools: codeExecution", [{"codeExecution": {}}]),
        ],
    ),
)

SURFACES = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT_TOKENS, GENERATE_CONTENT, GENERATION_CONFIG)

NOT_SERVED: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("POST", "/v1/embeddings", {"model": "MODEL", "input": "x"}),
    ("POST", "/v1/moderations", {"input": "x"}),
    ("POST", "/v1/images/generations", {"prompt": "x"}),
    ("POST", "/v1/images/edits", {"prompt": "x"}),
    ("POST", "/v1/audio/speech", {"model": "MODEL", "input": "x", "voice": "alloy"}),
    ("POST", "/v1/audio/transcriptions", {"model": "MODEL"}),
    ("POST", "/v1/audio/translations", {"model": "MODEL"}),
    ("POST", "/v1/videos", {"prompt": "x"}),
    ("POST", "/v1/rerank", {"model": "MODEL", "query": "x", "documents": ["y"]}),
    ("POST", "/v1/score", {"model": "MODEL", "text_1": "x", "text_2": "y"}),
    ("POST", "/v1/assistants", {"model": "MODEL"}),
    ("POST", "/v1/threads", {}),
    ("POST", "/v1/conversations", {}),
    ("POST", "/v1/vector_stores", {}),
    ("POST", "/v1/fine_tuning/jobs", {"model": "MODEL", "training_file": "file-1"}),
    ("POST", "/v1/uploads", {"purpose": "batch", "filename": "x", "bytes": 1, "mime_type": "text/plain"}),
    ("POST", "/v1/realtime/client_secrets", {}),
    ("POST", "/v1/complete", {"model": "MODEL", "prompt": "x", "max_tokens_to_sample": 1}),
    ("POST", "/v1/messages/batches", {"requests": []}),
)
"""Endpoints that the APIs have and this server does not."""
