"""The answers of OpenAI's APIs, for the API's own description."""

from __future__ import annotations

from gateway.described import ANY_OBJECT, FLAG, NUMBER, TEXT, WHOLE, Json, array, nullable, one_of, record

_FINISH = one_of("stop", "length", "tool_calls")
_STOPPED_BY = {"anyOf": [TEXT, WHOLE, {"type": "null"}]}
_USAGE = record(
    {
        "prompt_tokens": WHOLE,
        "completion_tokens": WHOLE,
        "total_tokens": WHOLE,
        "prompt_tokens_details": record({"cached_tokens": WHOLE, "cache_write_tokens": WHOLE}, {"cache_miss_reason": TEXT}),
        "completion_tokens_details": record({"reasoning_tokens": WHOLE}),
    }
)
_SCORE = {"token": TEXT, "logprob": nullable(NUMBER), "bytes": array(WHOLE)}
_SCORED = record({**_SCORE, "top_logprobs": array(record(_SCORE))})
_PROMPT_SCORES = array(
    nullable({"type": "object", "additionalProperties": record({"logprob": NUMBER, "rank": WHOLE, "decoded_token": TEXT})})
)
_CALL = record({"id": TEXT, "type": one_of("function"), "function": record({"name": TEXT, "arguments": TEXT})})
_HEAD = {"id": TEXT, "created": WHOLE, "model": TEXT, "usage": _USAGE}

ERROR = record({"error": record({"message": TEXT, "type": TEXT, "param": nullable(TEXT), "code": nullable(TEXT)})})
CHAT_COMPLETION = record(
    {
        **_HEAD,
        "object": one_of("chat.completion"),
        "choices": array(
            record(
                {
                    "index": WHOLE,
                    "message": record(
                        {"role": one_of("assistant"), "content": nullable(TEXT), "refusal": {"type": "null"}},
                        {"reasoning_content": TEXT, "tool_calls": array(_CALL)},
                    ),
                    "finish_reason": _FINISH,
                    "stop_reason": _STOPPED_BY,
                    "logprobs": nullable(record({"content": array(_SCORED), "refusal": {"type": "null"}})),
                }
            )
        ),
    },
    {"prompt_logprobs": _PROMPT_SCORES},
)
TEXT_COMPLETION = record(
    {
        **_HEAD,
        "object": one_of("text_completion"),
        "choices": array(
            record(
                {
                    "index": WHOLE,
                    "text": TEXT,
                    "finish_reason": _FINISH,
                    "stop_reason": _STOPPED_BY,
                    "logprobs": nullable(
                        record(
                            {
                                "tokens": array(TEXT),
                                "token_logprobs": array(nullable(NUMBER)),
                                "top_logprobs": array(nullable({"type": "object", "additionalProperties": NUMBER})),
                                "text_offset": array(WHOLE),
                            }
                        )
                    ),
                },
                {"prompt_logprobs": _PROMPT_SCORES},
            )
        ),
    }
)
TOKENIZED = record({"count": WHOLE, "max_model_len": WHOLE, "tokens": array(WHOLE), "token_strs": nullable(array(TEXT))})
DETOKENIZED = record({"prompt": TEXT})
MODEL = record(
    {
        "id": TEXT,
        "object": one_of("model"),
        "created": WHOLE,
        "owned_by": TEXT,
        "root": TEXT,
        "parent": {"type": "null"},
        "max_model_len": WHOLE,
        "permission": array(ANY_OBJECT),
    }
)


def listed(entry: Json) -> Json:
    """A page of a list."""
    ends = {"first_id": nullable(TEXT), "last_id": nullable(TEXT), "has_more": FLAG}
    return record({"object": one_of("list"), "data": array(entry), **ends})


def deleted(kind: str) -> Json:
    return record({"id": TEXT, "object": one_of(kind), "deleted": one_of(True)})


# ---- responses ----

_STATUS = one_of("completed", "incomplete", "in_progress")
_ITEM = {"id": TEXT, "status": _STATUS}
ITEM: Json = {
    "anyOf": [
        record({**_ITEM, "type": one_of("message"), "role": TEXT, "content": array(ANY_OBJECT)}, {"phase": TEXT}),
        record({**_ITEM, "type": one_of("function_call"), "call_id": TEXT, "name": TEXT, "arguments": TEXT}),
        record({**_ITEM, "type": one_of("function_call_output"), "call_id": TEXT, "output": TEXT}),
        record({**_ITEM, "type": one_of("reasoning"), "summary": array(ANY_OBJECT), "content": array(ANY_OBJECT)}),
    ]
}
_RESPONSE_USAGE = record(
    {
        "input_tokens": WHOLE,
        "input_tokens_details": record({"cached_tokens": WHOLE, "cache_write_tokens": WHOLE}),
        "output_tokens": WHOLE,
        "output_tokens_details": record({"reasoning_tokens": WHOLE}),
        "total_tokens": WHOLE,
    }
)
RESPONSE = record(
    {
        "id": TEXT,
        "object": one_of("response"),
        "created_at": WHOLE,
        "completed_at": nullable(WHOLE),
        "status": one_of("queued", "in_progress", "completed", "incomplete", "failed", "cancelled"),
        "error": nullable(record({"code": TEXT, "message": TEXT})),
        "incomplete_details": nullable(record({"reason": TEXT})),
        "usage": nullable(_RESPONSE_USAGE),
        "output": array(ITEM),
        "instructions": nullable(TEXT),
        "max_output_tokens": nullable(WHOLE),
        "max_tool_calls": nullable(WHOLE),
        "metadata": {"type": "object", "additionalProperties": TEXT},
        "model": TEXT,
        "parallel_tool_calls": FLAG,
        "previous_response_id": nullable(TEXT),
        "prompt_cache_key": nullable(TEXT),
        "prompt_cache_retention": nullable(TEXT),
        "reasoning": record({"effort": nullable(TEXT), "summary": {"type": "null"}}),
        "safety_identifier": nullable(TEXT),
        "service_tier": one_of("default", "flex"),
        "store": FLAG,
        "background": FLAG,
        "temperature": NUMBER,
        "text": record({"format": ANY_OBJECT, "verbosity": TEXT}),
        "tool_choice": {"anyOf": [TEXT, ANY_OBJECT]},
        "tools": array(ANY_OBJECT),
        "top_logprobs": WHOLE,
        "top_p": NUMBER,
        "truncation": one_of("auto", "disabled"),
        "user": nullable(TEXT),
    },
    {"prompt_cache_options": record({"mode": TEXT, "ttl": TEXT})},
)
INPUT_TOKENS = record({"object": one_of("response.input_tokens"), "input_tokens": WHOLE})

# ---- files and batches ----

FILE = record(
    {
        "id": TEXT,
        "object": one_of("file"),
        "bytes": WHOLE,
        "created_at": WHOLE,
        "expires_at": nullable(WHOLE),
        "filename": TEXT,
        "purpose": TEXT,
        "status": one_of("processed"),
        "status_details": {"type": "null"},
    }
)
_BATCH_ERROR = record({"code": TEXT, "message": TEXT, "line": nullable(WHOLE), "param": nullable(TEXT)})
_TIMES = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")
BATCH = record(
    {
        "id": TEXT,
        "object": one_of("batch"),
        "endpoint": TEXT,
        "errors": nullable(record({"object": one_of("list"), "data": array(_BATCH_ERROR)})),
        "input_file_id": TEXT,
        "completion_window": TEXT,
        "status": one_of("validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"),
        "output_file_id": nullable(TEXT),
        "error_file_id": nullable(TEXT),
        "created_at": WHOLE,
        "expires_at": WHOLE,
        **dict.fromkeys(_TIMES, nullable(WHOLE)),
        "request_counts": record({"total": WHOLE, "completed": WHOLE, "failed": WHOLE}),
        "metadata": nullable({"type": "object", "additionalProperties": TEXT}),
    }
)
