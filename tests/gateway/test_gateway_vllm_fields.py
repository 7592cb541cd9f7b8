"""Each field that vLLM's server (0.32) has in its two APIs is known, and accepted at the value that it has there by default, or null."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.openai.requests import ChatCompletionRequest, CompletionRequest

BOTH: dict[str, Any] = {
    "frequency_penalty": None,
    "logit_bias": None,
    "max_tokens": None,
    "n": 1,
    "presence_penalty": None,
    "seed": None,
    "stop": [],
    "stream": False,
    "stream_options": None,
    "temperature": None,
    "top_p": None,
    "user": None,
    "use_beam_search": False,
    "top_k": None,
    "min_p": None,
    "repetition_penalty": None,
    "watermarking": None,
    "length_penalty": 1.0,
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "truncation_side": None,
    "prompt_logprobs": None,
    "logprob_token_ids": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "echo": False,
    "response_format": None,
    "structured_outputs": None,
    "priority": 0,
    "request_id": None,
    "session_id": None,
    "return_tokens_as_token_ids": None,
    "return_token_ids": None,
    "routed_experts_prompt_start": 0,
    "return_token_offsets": False,
    "mm_payload": "tensors",
    "return_mm_kwargs": None,
    "cache_salt": None,
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "vllm_xargs": None,
    "repetition_detection": None,
    "stream_interval": None,
    "thinking_token_budget": None,
}
CHAT: dict[str, Any] = {
    **BOTH,
    "logprobs": False,
    "top_logprobs": 0,
    "max_completion_tokens": None,
    "tools": None,
    "tool_choice": "none",
    "reasoning_effort": None,
    "include_reasoning": True,
    "parallel_tool_calls": True,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": False,
    "documents": None,
    "chat_template": None,
    "chat_template_kwargs": None,
    "media_io_kwargs": None,
    "mm_processor_kwargs": None,
    "return_prompt_text": None,
}
PLAIN: dict[str, Any] = {**BOTH, "logprobs": None, "suffix": None, "add_special_tokens": True, "prompt_embeds": None}


@pytest.mark.parametrize(
    ("fields", "kind", "body"),
    [
        (CHAT, ChatCompletionRequest, {"model": "m", "messages": [{"role": "user", "content": "Say it."}]}),
        (PLAIN, CompletionRequest, {"model": "m", "prompt": "Say it."}),
    ],
    ids=["chat", "plain"],
)
def test_each_is_accepted_where_it_asks_for_nothing(
    fields: dict[str, Any], kind: type[ChatCompletionRequest | CompletionRequest], body: dict[str, Any]
) -> None:
    kind.model_validate({**body, **fields})
    without, with_nulls = kind.model_validate(body), kind.model_validate({**body, **dict.fromkeys(fields)})
    assert with_nulls.api_request() == without.api_request(), "null is as if it were left out"


def test_openai_s_own_is_null_without_being_refused() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Say it."}]}
    ChatCompletionRequest.model_validate({**body, "moderation": None})
    with pytest.raises(ValueError, match="top_logprobs may only be set when logprobs is true"):
        ChatCompletionRequest.model_validate({**body, "top_logprobs": 2})
