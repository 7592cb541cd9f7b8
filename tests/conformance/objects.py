"""What is made, kept or counted beside answers: files, batches, context caches, tokens. Its surfaces, and what their fields do there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from google.genai import types as genai
from openai.types import batch_create_params, file_create_params
from openai.types.responses import input_token_count_params

from tests.conformance.effects import LONG, Effect, another_model_is_refused, not_told_to_the_model, told_to_the_model
from tests.conformance.probe import Json, Probe, require
from tests.conformance.surfaces import (
    ANSWER,
    CONTENTS,
    DECLARED,
    FUNCTION,
    FURTHER,
    MODEL,
    NO_MODEL,
    NONE,
    QUESTION,
    TOOL,
    Surface,
    Trial,
    camel,
    hints,
    trials,
)

FILE, CACHE, KEPT = "FILE", "CACHE", "KEPT"
"""Stand for the names of a file, of a cache of Kimi's API and of one of Gemini's (without `cachedContents/`), which are there."""
CHAT_MESSAGES = [{"role": "user", "content": QUESTION}]
WINDOW_S = 6000
LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": MODEL, "messages": CHAT_MESSAGES, "max_tokens": 3},
}


def _inexact(seconds: float, wanted: float) -> bool:
    return abs(seconds - wanted) > 5


# ---- effects ----


def shown(name: str = "") -> Effect:
    """What is made has what was asked for, under this name where it is another one."""

    def effect(probe: Probe) -> None:
        body = probe.tried().body
        require(body[name or probe.trial.field] == probe.server.named(probe.trial.value), body)

    return effect


def ends(after: Callable[[Json], float], wanted_s: float) -> Effect:
    def effect(probe: Probe) -> None:
        body = probe.tried().body
        require(not _inexact(after(body), wanted_s), f"ends after {after(body)} s, not {wanted_s}")

    return effect


def ends_at(written: Callable[[float], Any], end: Callable[[Json], float]) -> Effect:
    """What is made ends when it is told to, which `written` writes and `end` reads."""

    def effect(probe: Probe) -> None:
        wanted = time.time() + WINDOW_S
        body = probe.ask(**probe.trial.with_, **{probe.trial.field: written(wanted)}).body
        require(not _inexact(end(body), wanted), body)

    return effect


def _left(body: Json) -> float:
    return float(body["expired_at"] - time.time())


def _iso(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


def _expires(body: Json) -> float:
    return datetime.fromisoformat(body["expireTime"]).timestamp()


def content_is_kept(probe: Probe) -> None:
    made = probe.tried().body
    content = probe.server.http.get(f"/v1/files/{made['id']}/content").text
    require(content == probe.server.named(probe.trial.value), content)


def another_purpose_is_refused(probe: Probe) -> None:
    require(probe.tried().body["purpose"] == "batch", "another purpose")
    refused = probe.post(purpose="fine-tune")
    require(refused.status_code == 400 and refused.json()["error"]["param"] == "purpose", refused.text)


def names_the_cache(probe: Probe) -> None:
    cache_id = probe.tried().body["cache_id"]
    require(probe.server.http.get(f"/v1/caching/refs/tags/{probe.surface.base['tag']}/content").json()["id"] == cache_id, cache_id)


def texts_of_tokens(probe: Probe) -> None:
    plain, told = probe.ask().body, probe.tried().body
    require(plain["token_strs"] is None and len(told["token_strs"]) == told["count"], told)


def special_tokens_left_out(probe: Probe) -> None:
    special = probe.token("<|im_start|>")
    texts = [probe.ask(tokens=[special], skip_special_tokens=skip).body["prompt"] for skip in (False, True)]
    require(texts == ["<|im_start|>", ""], texts)


def text_of_the_tokens(probe: Probe) -> None:
    text = probe.ask(tokens=[probe.token("a"), probe.token("b")]).body["prompt"]
    require(text == "ab", text)


def begins_with_the_one_before(probe: Probe) -> None:
    response = probe.server.http.post("/v1/responses", json={"model": probe.server.model, "input": QUESTION, "max_output_tokens": 3}).json()
    told, plain = probe.ask(previous_response_id=response["id"]).prompt_tokens, probe.ask().prompt_tokens
    require(told > plain, f"{told} tokens, {plain} without")


def turns_left_out(probe: Probe) -> None:
    (model,) = probe.server.http.get("/v1/models").json()["data"]
    turns = [{"role": role, "content": "a" * (model["max_model_len"] // 4)} for _ in range(4) for role in ("user", "assistant")]
    asked = [*turns, {"role": "user", "content": QUESTION}]
    whole, cut = (probe.ask(input=asked, truncation=truncation).prompt_tokens for truncation in ("disabled", "auto"))
    require(0 < cut < model["max_model_len"] < whole, f"{cut} tokens of {whole}")


def whole_request_counted(probe: Probe) -> None:
    told, plain = probe.tried().prompt_tokens, probe.ask().prompt_tokens
    require(told > plain, f"{told} tokens, {plain} of the contents alone")


# ---- files and batches ----

FILES = Surface(
    "OpenAI files",
    "/v1/files",
    {"file": json.dumps(LINE), "purpose": "batch"},
    trials(
        hints(file_create_params.FileCreateParams),
        {"file": json.dumps({**LINE, "custom_id": "b"}), "purpose": "batch", "expires_after": "3600"},
    ),
    form=True,
)
BATCHES = Surface(
    "OpenAI batches",
    "/v1/batches",
    {"input_file_id": FILE, "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    trials(
        hints(batch_create_params.BatchCreateParams),
        {
            "input_file_id": FILE,
            "endpoint": "/v1/completions",
            "completion_window": "30m",
            "metadata": {"trace": "1"},
            "output_expires_after": {"anchor": "created_at", "seconds": 3600},
        },
    ),
)

# ---- Kimi's caching ----

_FOR_A_WHILE = {"ttl": WINDOW_S, "expired_at": int(time.time()) + WINDOW_S, "metadata": {"trace": "1"}}
_SYSTEM = [{"role": "system", "content": LONG}]
CACHING = Surface(
    "Kimi context caches: made",
    "/v1/caching",
    {"model": MODEL, "messages": _SYSTEM},
    trials(
        (),
        {
            "model": NO_MODEL,
            "messages": [{"role": "system", "content": LONG + FURTHER}],
            "tools": [TOOL],
            "name": "tide",
            "description": "what is said of it",
            "pin": "soft",
            "replicas": 2,
            **_FOR_A_WHILE,
        },
    ),
)
CACHING_UPDATE = Surface("Kimi context caches: changed", f"/v1/caching/{CACHE}", {}, trials((), _FOR_A_WHILE), method="PUT")
TAGS = Surface(
    "Kimi tags",
    "/v1/caching/refs/tags",
    {"tag": "harbour", "cache_id": CACHE},
    trials((), {"tag": "haven", "cache_id": CACHE}),
)
ESTIMATE = Surface(
    "Kimi estimate-token-count",
    "/v1/tokenizers/estimate-token-count",
    {"model": MODEL, "messages": CHAT_MESSAGES},
    trials((), {"model": NO_MODEL, "messages": [{"role": "user", "content": FURTHER}], "tools": [TOOL]}),
)

# ---- Gemini's cachedContents, and its counting ----

_LASTING = {"ttl": f"{WINDOW_S}s", "expireTime": _iso(time.time() + WINDOW_S)}
_KEPT_CONTENTS = [{"role": "user", "parts": [{"text": LONG}]}]
CACHED_CONTENTS = Surface(
    "Gemini cachedContents: made",
    "/v1beta/cachedContents",
    {"model": f"models/{MODEL}", "contents": _KEPT_CONTENTS},
    trials(
        (camel(name) for name in genai.CreateCachedContentConfig.model_fields if name != "http_options"),
        {
            "model": Trial("model", f"models/{NONE}", missing=True),
            "contents": [{"role": "user", "parts": [{"text": LONG + FURTHER}]}],
            "systemInstruction": {"parts": [{"text": "Be brief."}]},
            "tools": [DECLARED],
            "toolConfig": Trial("toolConfig", {"functionCallingConfig": {"mode": "ANY"}}, {"tools": [DECLARED]}),
            "displayName": "tide",
            "kmsKeyName": "a-key",
            **_LASTING,
        },
    ),
)
CACHED_CONTENTS_UPDATE = Surface(
    "Gemini cachedContents: changed", f"/v1beta/cachedContents/{KEPT}", {}, trials((), _LASTING), method="PATCH"
)
GEMINI_COUNT = Surface(
    "Gemini countTokens",
    f"/v1beta/models/{MODEL}:countTokens",
    {"contents": CONTENTS},
    trials(
        (),
        {
            "contents": [{"role": "user", "parts": [{"text": FURTHER}]}],
            "generateContentRequest": Trial(
                "generateContentRequest",
                {"model": f"models/{MODEL}", "contents": CONTENTS, "systemInstruction": {"parts": [{"text": "Be brief."}]}},
                {"contents": None},
            ),
        },
    ),
)

# ---- tokens ----

_NO_CHAT = {"messages": []}
TOKENIZE = Surface(
    "vLLM tokenize",
    "/tokenize",
    {"model": MODEL, "messages": CHAT_MESSAGES},
    trials(
        (),
        {
            "model": NO_MODEL,
            "messages": [{"role": "user", "content": FURTHER}],
            "prompt": Trial("prompt", "The sea", _NO_CHAT),
            "add_special_tokens": Trial("add_special_tokens", False, {"prompt": "The sea", **_NO_CHAT}),
            "return_token_strs": True,
            "add_generation_prompt": False,
            "continue_final_message": Trial(
                "continue_final_message",
                True,
                {"add_generation_prompt": False, "messages": [*CHAT_MESSAGES, {"role": "assistant", "content": "Hello, my"}]},
            ),
            "tools": [TOOL],
            "chat_template_kwargs": {"enable_thinking": True},
        },
    ),
)
DETOKENIZE = Surface(
    "vLLM detokenize",
    "/detokenize",
    {"model": MODEL, "tokens": [10, 11]},
    trials((), {"model": NO_MODEL, "tokens": [12, 13], "skip_special_tokens": True, "return_token_strs": True}),
)
INPUT_TOKENS = Surface(
    "OpenAI Responses: input_tokens",
    "/v1/responses/input_tokens",
    {"model": MODEL, "input": QUESTION},
    trials(
        hints(input_token_count_params.InputTokenCountParams),
        {
            "model": NO_MODEL,
            "input": FURTHER,
            "conversation": "conv_1",
            "instructions": "Be brief.",
            "parallel_tool_calls": Trial("parallel_tool_calls", False, {"tools": [FUNCTION]}),
            "previous_response_id": Trial("previous_response_id", "resp_none", missing=True),
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "json_schema", "name": "answer", "schema": ANSWER, "strict": True}},
            "tool_choice": Trial("tool_choice", "none", {"tools": [FUNCTION]}),
            "tools": [FUNCTION],
            "truncation": "auto",
        },
    ),
)

SURFACES = (
    *(FILES, BATCHES, CACHING, CACHING_UPDATE, TAGS, ESTIMATE, CACHED_CONTENTS, CACHED_CONTENTS_UPDATE),
    *(GEMINI_COUNT, TOKENIZE, DETOKENIZE, INPUT_TOKENS),
)
_KIMI_LASTS: dict[str, Effect] = {
    "ttl": ends(_left, WINDOW_S),
    "expired_at": ends_at(int, lambda body: float(body["expired_at"])),
    "metadata": shown(),
}
_GEMINI_LASTS: dict[str, Effect] = {
    "ttl": ends(lambda body: _expires(body) - time.time(), WINDOW_S),
    "expireTime": ends_at(_iso, _expires),
}
EFFECTS: dict[str, dict[str, Effect]] = {
    FILES.title: {"file": content_is_kept, "purpose": another_purpose_is_refused},
    BATCHES.title: {
        "input_file_id": shown(),
        "endpoint": shown(),
        "completion_window": ends(lambda body: body["expires_at"] - body["created_at"], 30 * 60),
        "metadata": shown(),
    },
    CACHING.title: {
        "model": another_model_is_refused,
        "messages": told_to_the_model,
        "tools": told_to_the_model,
        "name": shown(),
        "description": shown(),
        "pin": shown(),
        "replicas": shown(),
        **_KIMI_LASTS,
    },
    CACHING_UPDATE.title: _KIMI_LASTS,
    TAGS.title: {"tag": shown(), "cache_id": names_the_cache},
    ESTIMATE.title: {"model": another_model_is_refused, "messages": told_to_the_model, "tools": told_to_the_model},
    CACHED_CONTENTS.title: {
        "model": another_model_is_refused,
        "contents": told_to_the_model,
        "systemInstruction": told_to_the_model,
        "tools": told_to_the_model,
        "displayName": shown(),
        **_GEMINI_LASTS,
    },
    CACHED_CONTENTS_UPDATE.title: _GEMINI_LASTS,
    GEMINI_COUNT.title: {"contents": told_to_the_model, "generateContentRequest": whole_request_counted},
    TOKENIZE.title: {
        "model": another_model_is_refused,
        "messages": told_to_the_model,
        "prompt": lambda probe: require(probe.tried().prompt_tokens < probe.ask().prompt_tokens, "a text is as long as a chat"),
        "add_special_tokens": not_told_to_the_model,
        "return_token_strs": texts_of_tokens,
        "add_generation_prompt": not_told_to_the_model,
        "continue_final_message": not_told_to_the_model,
        "tools": told_to_the_model,
        "chat_template_kwargs": told_to_the_model,
    },
    DETOKENIZE.title: {"model": another_model_is_refused, "tokens": text_of_the_tokens, "skip_special_tokens": special_tokens_left_out},
    INPUT_TOKENS.title: {
        "model": another_model_is_refused,
        "input": told_to_the_model,
        "instructions": told_to_the_model,
        "previous_response_id": begins_with_the_one_before,
        "reasoning": told_to_the_model,
        "tool_choice": not_told_to_the_model,
        "tools": told_to_the_model,
        "truncation": turns_left_out,
    },
}
NEUTRAL: dict[str, set[str]] = {INPUT_TOKENS.title: {"parallel_tool_calls", "text"}}
SEEN_BY: dict[str, dict[str, str]] = {
    CACHED_CONTENTS.title: {"toolConfig": "tests/gateway/test_gateway_caching.py::test_geminis_tool_config_goes_with_its_cached_content"}
}
