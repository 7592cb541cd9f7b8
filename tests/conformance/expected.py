"""Which effect each served field has, which fields ask for nothing, and whose effect no answer shows."""

from __future__ import annotations

from tests.conformance.effects import (
    Effect,
    after_the_one_before,
    an_object,
    another_answer,
    answer_goes_on,
    as_the_system_would,
    as_the_text_would,
    at_most_one_call,
    begins_with_the_kept,
    biased,
    called,
    cold_or_hot,
    completion_scored,
    content_scored,
    cut_at_the_length,
    decided_by_the_seed,
    ended_by_a_stop_token,
    ended_by_its_deadline,
    found_with_the_same_salt_alone,
    goes_on_after_the_end_token,
    kept,
    made_in_the_background,
    matching,
    named_tool_called,
    not_before_so_many,
    not_stored,
    not_told_to_the_model,
    nothing_is_made,
    nothing_opens_the_answer,
    one_call_alone,
    others_kept_out,
    prompt_cut,
    prompt_echoed,
    prompt_scored,
    punished,
    response_scored,
    scored,
    shown_again,
    so_many_prompt_tokens,
    special_tokens_shown,
    stop_string_kept,
    stopped,
    streamed,
    the_best_of_two,
    the_likeliest_alone,
    thought_about,
    told_to_the_model,
    tools_not_told_of,
    turns_left_out,
    two_choices,
    usage_in_every_chunk,
    valid,
    word_kept_out,
)
from tests.conformance.probe import Json
from tests.conformance.surfaces import CHAT, COMPLETIONS, COUNT_TOKENS, GENERATE_CONTENT, GENERATION_CONFIG, MESSAGES, RESPONSES


def _chat_piece(event: Json) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def _completion_piece(event: Json) -> str:
    return "".join(choice["text"] for choice in event["choices"])


def _response_piece(event: Json) -> str:
    return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""


def _message_piece(event: Json) -> str:
    return str(event["delta"]["text"]) if event["type"] == "content_block_delta" else ""


_COMMON: dict[str, Effect] = {
    "allowed_token_ids": others_kept_out,
    "bad_words": word_kept_out,
    "cache_salt": found_with_the_same_salt_alone,
    "deadline_ms": ended_by_its_deadline,
    "frequency_penalty": punished(1.5, frequency_penalty=1.5),
    "guided_choice": matching("yes|no"),
    "guided_grammar": matching("yes|no"),
    "guided_json": valid,
    "guided_regex": matching("[a-c]{2}"),
    "ignore_eos": goes_on_after_the_end_token,
    "include_stop_str_in_output": stop_string_kept,
    "logit_bias": biased,
    "max_tokens": cut_at_the_length,
    "min_p": the_likeliest_alone(1.0),
    "min_tokens": not_before_so_many,
    "n": two_choices,
    "presence_penalty": punished(1.5, presence_penalty=1.5),
    "prompt_logprobs": prompt_scored,
    "repetition_penalty": punished(None, repetition_penalty=1.5),
    "response_format: json_object": an_object,
    "seed": decided_by_the_seed,
    "skip_special_tokens": special_tokens_shown,
    "stop": stopped("stop"),
    "stop_token_ids": ended_by_a_stop_token,
    "stream_options": usage_in_every_chunk,
    "structured_outputs": matching("yes|no"),
    "temperature": cold_or_hot,
    "top_k": the_likeliest_alone(1),
    "top_p": the_likeliest_alone(1e-9),
    "truncate_prompt_tokens": prompt_cut,
}

EFFECTS: dict[str, dict[str, Effect]] = {
    CHAT.title: {
        **_COMMON,
        "add_generation_prompt": nothing_opens_the_answer,
        "chat_template_kwargs": told_to_the_model,
        "continue_final_message": answer_goes_on,
        "logprobs": scored(0),
        "max_completion_tokens": cut_at_the_length,
        "messages: developer": as_the_system_would,
        "messages: name": told_to_the_model,
        "messages: text parts": as_the_text_would,
        "messages: tool_calls and tool": told_to_the_model,
        "parallel_tool_calls": one_call_alone,
        "prompt_cache_options": kept(prompt_cache_options={"mode": "implicit"}),
        "prompt_cache_retention": kept(prompt_cache_retention="24h"),
        "reasoning_effort": told_to_the_model,
        "response_format": valid,
        "stream": streamed(_chat_piece),
        "tool_choice": called,
        "tool_choice: one by name": named_tool_called,
        "tools": told_to_the_model,
        "top_logprobs": scored(2),
    },
    COMPLETIONS.title: {
        **_COMMON,
        "add_special_tokens": not_told_to_the_model,
        "best_of": the_best_of_two,
        "echo": prompt_echoed,
        "logprobs": completion_scored,
        "max_tokens: 0": nothing_is_made,
        "prompt: several lists of token ids": so_many_prompt_tokens,
        "prompt: several texts": two_choices,
        "prompt: token ids": so_many_prompt_tokens,
        "response_format": an_object,
        "stream": streamed(_completion_piece),
    },
    RESPONSES.title: {
        "background": made_in_the_background,
        "include": response_scored(0),
        "input: function_call_output": told_to_the_model,
        "input: items": as_the_text_would,
        "instructions": told_to_the_model,
        "max_output_tokens": cut_at_the_length,
        "metadata": shown_again,
        "parallel_tool_calls": at_most_one_call,
        "previous_response_id": after_the_one_before,
        "prompt_cache_options": kept(prompt_cache_options={"mode": "implicit"}),
        "prompt_cache_retention": kept(prompt_cache_retention="24h"),
        "reasoning": told_to_the_model,
        "store": not_stored,
        "stream": streamed(_response_piece),
        "temperature": cold_or_hot,
        "text": valid,
        "tool_choice": called,
        "tools": told_to_the_model,
        "top_logprobs": response_scored(2),
        "top_p": the_likeliest_alone(1e-9),
        "truncation": turns_left_out,
    },
    MESSAGES.title: {
        "cache_control": kept(cache_control={"type": "ephemeral"}),
        "max_tokens": cut_at_the_length,
        "max_tokens: 0": nothing_is_made,
        "messages: text blocks": as_the_text_would,
        "messages: tool_use and tool_result": told_to_the_model,
        "output_config": valid,
        "stop_sequences": stopped("stop_sequence"),
        "stream": streamed(_message_piece),
        "system": told_to_the_model,
        "temperature": cold_or_hot,
        "thinking": thought_about({"type": "adaptive"}, {"type": "disabled"}),
        "thinking: enabled": thought_about({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}),
        "tool_choice": called,
        "tools": told_to_the_model,
        "top_k": the_likeliest_alone(1),
        "top_p": the_likeliest_alone(1e-9),
    },
    COUNT_TOKENS.title: {
        "system": told_to_the_model,
        "thinking": thought_about({"type": "adaptive"}, {"type": "disabled"}),
        "tool_choice": tools_not_told_of,
        "tools": told_to_the_model,
    },
    GENERATE_CONTENT.title: {
        "cachedContent": begins_with_the_kept,
        "contents: functionCall and functionResponse": told_to_the_model,
        "systemInstruction": told_to_the_model,
        "toolConfig": called,
        "tools": told_to_the_model,
    },
    GENERATION_CONFIG.title: {
        "candidateCount": two_choices,
        "frequencyPenalty": another_answer(2.0),
        "logprobs": content_scored(2),
        "maxOutputTokens": cut_at_the_length,
        "presencePenalty": another_answer(2.0),
        "responseJsonSchema": valid,
        "responseLogprobs": content_scored(0),
        "responseMimeType": an_object,
        "responseSchema": valid,
        "seed": decided_by_the_seed,
        "stopSequences": stopped("STOP"),
        "temperature": cold_or_hot,
        "thinkingConfig": thought_about({"thinkingBudget": 100}, {"thinkingBudget": 0}),
        "topK": the_likeliest_alone(1),
        "topP": the_likeliest_alone(1e-9),
    },
}

NEUTRAL: dict[str, set[str]] = {
    CHAT.title: {
        *("add_special_tokens", "function_call", "metadata", "modalities", "prompt_cache_key", "safety_identifier", "service_tier"),
        *("spaces_between_special_tokens", "user"),
    },
    COMPLETIONS.title: {"spaces_between_special_tokens", "user"},
    RESPONSES.title: {"max_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier", "stream_options", "user"},
    MESSAGES.title: {"metadata", "service_tier"},
    COUNT_TOKENS.title: {"cache_control", "output_config"},
    GENERATE_CONTENT.title: {"safetySettings"},
}
"""There is nothing to be done with them, or with the values that they are taken at."""

UNSEEN: dict[str, dict[str, str]] = {
    CHAT.title: {
        "include_reasoning": "tests/gateway/test_gateway_vendors.py",
        "priority": "tests/conductor/test_conductor_overload.py",
        "service_tier: flex": "tests/gateway/test_gateway_deadlines.py",
    },
    COMPLETIONS.title: {"priority": "tests/conductor/test_conductor_overload.py"},
}
"""What they do shows under load, or of models that say to themselves what they think, and is tested there."""
