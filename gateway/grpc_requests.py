"""The requests of gRPC's Generate, and what they ask for: `api_request` makes an ApiRequest of them."""

from __future__ import annotations

import json
import re
from typing import Any

from gateway.api_request import (
    ApiRequest,
    CacheUse,
    Conversation,
    FormatKind,
    Message,
    OutputFormat,
    Speaker,
    Texts,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from gateway.bodies import check_depth
from gateway.fields import MAX_NAME_LENGTH, TOOL_NAME, json_value
from gateway.prepare import (
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SAMPLING_FIELDS,
)
from springtide.errors import InvalidRequest
from springtide.protocol.sampling import LogitBias, TokenIds
from springtide.protocol.wire import TERMS
from springtide.rpc import inference_pb2

_OFF_AT_ZERO = ("top_p", "repetition_penalty")
"""Zero stands for 1."""
_BETWEEN_NODES = {"logit_bias": "logit_bias", "allowed_token_ids": "allowed_token_ids", "grammar": "format"}
"""Fields of `sampling` that nodes are told in a form of their own, and the request's fields that clients use."""
_SPEAKERS = {"developer": Speaker.SYSTEM, **{speaker.value: speaker for speaker in Speaker}}
_TOOL_MODES = {
    inference_pb2.TOOL_MODE_AUTO: ToolMode.AUTO,
    inference_pb2.TOOL_MODE_NONE: ToolMode.NONE,
    inference_pb2.TOOL_MODE_REQUIRED: ToolMode.REQUIRED,
}
_FORMATS = {
    inference_pb2.FORMAT_KIND_JSON_OBJECT: FormatKind.JSON_OBJECT,
    inference_pb2.FORMAT_KIND_JSON_SCHEMA: FormatKind.JSON_SCHEMA,
    inference_pb2.FORMAT_KIND_REGEX: FormatKind.REGEX,
    inference_pb2.FORMAT_KIND_CHOICE: FormatKind.CHOICE,
    inference_pb2.FORMAT_KIND_GRAMMAR: FormatKind.GRAMMAR,
}


def api_request(request: inference_pb2.GenerateRequest) -> ApiRequest:
    """What it asks for. Raises InvalidRequest, naming the field."""
    if len(request.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop may hold at most {MAX_STOP_STRINGS} strings", param="stop")
    if request.n > MAX_CHOICES:
        raise InvalidRequest(f"n must be at most {MAX_CHOICES}, not {request.n}", param="n")
    if request.truncate_prompt_tokens < -1:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be at least -1, not {request.truncate_prompt_tokens}", param="truncate_prompt_tokens"
        )
    wanted = request.sampling
    return ApiRequest(
        model=request.model,
        prompt=_prompt(request),
        max_tokens=0 if request.prompt_only else wanted.max_tokens or None,
        sampling=_sampling_values(request),
        n=request.n or 1,
        stop=tuple(request.stop),
        bad_words=tuple(request.bad_words),
        include_stop=request.include_stop,
        skip_special_tokens=not request.keep_special_tokens,
        format=_format(request.format) if request.HasField("format") else None,
        prompt_logprobs=wanted.prompt_logprobs if wanted.HasField("prompt_logprobs") else None,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        terms=TERMS.decode(request.terms),
        cache=_cache_use(request.cache),
        names={"prompt": request.WhichOneof("prompt") or "prompt", "prompt_logprobs": "sampling.prompt_logprobs"},
    )


def _prompt(request: inference_pb2.GenerateRequest) -> Conversation | Texts:
    match request.WhichOneof("prompt"):
        case "chat":
            return conversation(request.chat)
        case "text":
            return Texts((request.text,))
        case "tokens":
            return Texts((tuple(request.tokens.token_ids),))
        case _:
            raise InvalidRequest("prompt is required: one of text, tokens and chat", param="prompt")


def conversation(chat: inference_pb2.ChatPrompt) -> Conversation:
    """Raises InvalidRequest, naming the field."""
    tools = tuple(_tool(number, tool) for number, tool in enumerate(chat.tools))
    choice = chat.tool_choice
    mode = _TOOL_MODES.get(choice.mode)
    if mode is None:
        raise InvalidRequest(f"tool_choice.mode {choice.mode} is not known", param="tool_choice")
    if mode is ToolMode.REQUIRED and not tools:
        raise InvalidRequest("tool_choice wants a tool called, and there are no tools", param="tool_choice")
    if choice.name and choice.name not in {tool.name for tool in tools}:
        raise InvalidRequest(f"tool_choice names {choice.name[:100]!r}, which is not among the tools", param="tool_choice")
    if choice.name and mode is not ToolMode.REQUIRED:
        raise InvalidRequest("tool_choice.name goes with TOOL_MODE_REQUIRED", param="tool_choice")
    return Conversation(
        messages=tuple(_message(number, message) for number, message in enumerate(chat.messages)),
        tools=tools,
        tool_choice=ToolChoice(mode, choice.name, parallel=not choice.single_call),
        template_options=_json_object(chat.template_options, "template_options"),
        add_generation_prompt=not chat.continue_final_message,
        continue_final_message=chat.continue_final_message,
    )


def _message(number: int, message: inference_pb2.ChatMessage) -> Message:
    speaker = _SPEAKERS.get(message.role)
    if speaker is None:
        field = f"messages[{number}].role"
        raise InvalidRequest(f"{field} must be one of {', '.join(_SPEAKERS)}, not {message.role[:100]!r}", param=field)
    if message.tool_calls and speaker is not Speaker.ASSISTANT:
        field = f"messages[{number}].tool_calls"
        raise InvalidRequest(f"{field} are the assistant's, not of a message of role {message.role!r}", param=field)
    return Message(
        speaker,
        message.content,
        reasoning=message.reasoning,
        tool_calls=tuple(ToolCall(call.call_id, call.name, call.arguments) for call in message.tool_calls),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _tool(number: int, tool: inference_pb2.Tool) -> Tool:
    field = f"tools[{number}]"
    if len(tool.name) > MAX_NAME_LENGTH or not re.fullmatch(TOOL_NAME, tool.name):
        allowed = f"1 to {MAX_NAME_LENGTH} letters, digits and _.:/-"
        raise InvalidRequest(f"{field}.name must be {allowed}, not {tool.name[:100]!r}", param=f"{field}.name")
    return Tool(tool.name, tool.description, _json_object(tool.parameters, f"{field}.parameters"), tool.strict)


def _json_object(text: str, field: str) -> dict[str, Any]:
    """Nothing for an empty text."""
    if not text:
        return {}
    try:
        value = json_value(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} is not valid JSON: {error}", param=field) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} must be the JSON text of an object", param=field)
    check_depth(value, field)
    return value


def _format(wanted: inference_pb2.OutputFormat) -> OutputFormat:
    kind = _FORMATS.get(wanted.kind)
    if kind is None:
        raise InvalidRequest(f"format.kind {wanted.kind} is not known", param="format")
    return OutputFormat(kind, wanted.source)


def _cache_use(wanted: inference_pb2.CacheUse) -> CacheUse:
    if not 0 <= wanted.keep_s < float("inf"):
        raise InvalidRequest(f"cache.keep_s must be finite and not negative, not {wanted.keep_s}", param="cache.keep_s")
    return CacheUse(cache_id=wanted.cache_id, salt=wanted.salt, keep_all_s=wanted.keep_s)


def _sampling_values(request: inference_pb2.GenerateRequest) -> dict[str, Any]:
    wanted = request.sampling
    if wanted.HasField("logprobs") and wanted.logprobs > MAX_LOGPROBS:
        raise InvalidRequest(f"sampling.logprobs must be at most {MAX_LOGPROBS}, not {wanted.logprobs}", param="sampling.logprobs")
    told_to_nodes = [name for name in _BETWEEN_NODES if wanted.HasField(name)] + (["bad_words"] if wanted.bad_words else [])
    for name in told_to_nodes:
        own = _BETWEEN_NODES.get(name, name)
        raise InvalidRequest(f"sampling.{name} is between nodes; the request's own {own} is what you want", param=f"sampling.{name}")
    if len(wanted.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(f"stop_token_ids may hold at most {MAX_STOP_TOKEN_IDS} ids", param="stop_token_ids")
    if len(request.logit_bias) > MAX_BIASED_TOKENS:
        raise InvalidRequest(f"logit_bias may name at most {MAX_BIASED_TOKENS} tokens, not {len(request.logit_bias)}", param="logit_bias")
    if any(token_id >= 1 << 31 for token_id in request.logit_bias):
        raise InvalidRequest("logit_bias: keys must be token ids", param="logit_bias")
    if max(request.allowed_token_ids, default=0) >= 1 << 31:
        raise InvalidRequest("allowed_token_ids must be token ids", param="allowed_token_ids")
    if len(request.bad_words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"bad_words may hold at most {MAX_BAD_WORDS} texts, not {len(request.bad_words)}", param="bad_words")
    values = {name: getattr(wanted, name) for name in SAMPLING_FIELDS}
    for name in _OFF_AT_ZERO:
        values[name] = values[name] or 1.0
    return {
        **values,
        "seed": wanted.seed or None,
        "stop_token_ids": tuple(wanted.stop_token_ids),
        "logprobs": wanted.logprobs if wanted.HasField("logprobs") else None,
        "logit_bias": LogitBias.of(dict(request.logit_bias)),
        "allowed_token_ids": TokenIds.of(request.allowed_token_ids),
    }
