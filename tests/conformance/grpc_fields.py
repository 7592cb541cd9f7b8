"""The methods and fields of the gateway's gRPC API, taken from its schemas, and the tests that see what they do."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, FileDescriptor

from springtide.rpc import caches_pb2, inference_pb2

_REQUESTS = "tests/gateway/test_gateway_grpc_requests.py::"
_CALLS = "tests/gateway/test_gateway_grpc.py::"
_CACHES = "tests/gateway/test_gateway_grpc_caches.py::"
_MADE = f"{_CACHES}test_one_is_created_shown_listed_extended_and_deleted"
_ASKED = f"{_REQUESTS}test_a_chat_with_tools_is_a_conversation"
_WITH_CACHE = f"{_CACHES}test_a_request_begins_with_a_cache"
_SAMPLING = f"{_REQUESTS}test_every_field_of_sampling_reaches_the_nodes"
_TERMS = "tests/gateway/test_gateway_deadlines.py::test_grpc_clients_have_fields_for_them"

_BETWEEN_NODES = ("logit_bias", "allowed_token_ids", "bad_words", "grammar")
REFUSED = {f"SamplingParams.{name}": f"sampling.{name} is between nodes" for name in _BETWEEN_NODES}
"""By the test that has them refused by name, and in these words."""
REFUSED_BY = f"{_REQUESTS}test_what_is_between_nodes_is_refused_by_name"
METHODS = {
    "Inference.Generate": f"{_CALLS}test_a_chat_is_streamed_with_reason_and_usage_at_its_end",
    "Inference.ListModels": f"{_CALLS}test_health_models_and_reflection_are_served",
    **{f"ContextCaches.{name}Cache": _MADE for name in ("Create", "Get", "Extend", "Delete")},
    "ContextCaches.ListCaches": _MADE,
}
FIELDS = {
    **{f"GenerateRequest.{name}": _ASKED for name in ("chat", "format", "n", "include_stop", "keep_special_tokens", "bad_words")},
    **{f"GenerateRequest.{name}": _ASKED for name in ("model", "truncate_prompt_tokens", "allowed_token_ids", "cache", "terms")},
    **{f"GenerateRequest.{name}": f"{_CALLS}test_fields_at_zero_take_the_apis_defaults" for name in ("tokens", "tenant")},
    "GenerateRequest.text": "tests/gateway/test_gateway_prompts.py::test_prompt_logprobs_come_over_grpc_before_the_output",
    "GenerateRequest.stop": f"{_REQUESTS}test_several_outputs_come_apart_and_each_has_its_end",
    "GenerateRequest.logit_bias": f"{_CALLS}test_biases_reach_the_nodes",
    "GenerateRequest.prompt_only": f"{_REQUESTS}test_a_prompt_alone_has_no_output",
    "GenerateRequest.sampling": _SAMPLING,
    "TokenPrompt.token_ids": f"{_CALLS}test_fields_at_zero_take_the_apis_defaults",
    **{f"ChatPrompt.{name}": _ASKED for name in ("messages", "tools", "tool_choice", "template_options")},
    "ChatPrompt.continue_final_message": f"{_REQUESTS}test_a_chat_goes_on_with_its_last_message",
    **{f"ChatMessage.{name}": _ASKED for name in ("role", "content", "reasoning", "tool_calls", "tool_call_id", "name")},
    **{f"ToolCall.{name}": _ASKED for name in ("call_id", "name", "arguments")},
    **{f"Tool.{name}": _ASKED for name in ("name", "description", "parameters", "strict")},
    **{f"ToolChoice.{name}": _ASKED for name in ("mode", "name", "single_call")},
    **{f"OutputFormat.{name}": _ASKED for name in ("kind", "source")},
    **{f"CacheUse.{name}": _ASKED for name in ("salt", "keep_s")},
    "CacheUse.cache_id": _WITH_CACHE,
    **{f"Terms.{name}": _TERMS for name in ("priority", "deadline_ms")},
    "Terms.idle": _ASKED,
    **{f"CreateCacheRequest.{name}": _MADE for name in ("model", "chat", "ttl_s", "name", "metadata", "tenant")},
    "CreateCacheRequest.replicas": f"{_CACHES}test_what_cannot_be_kept_is_refused",
    "CacheName.cache_id": _MADE,
    "CacheName.tenant": f"{_CACHES}test_anothers_looks_like_one_that_there_is_not",
    **{f"ListCachesRequest.{name}": _MADE for name in ("after", "limit", "tenant")},
    **{f"ExtendCacheRequest.{name}": _MADE for name in ("cache_id", "ttl_s", "tenant")},
}
"""By message and field, the test that sees what it does. Those of `SamplingParams` have one that goes through all of them."""


def of_all(field: str) -> str | None:
    """The test that goes through all fields of this one's message, if there is one."""
    return _SAMPLING if field.startswith("SamplingParams.") else None


def methods() -> list[str]:
    """All that are served."""
    files: tuple[FileDescriptor, ...] = (inference_pb2.DESCRIPTOR, caches_pb2.DESCRIPTOR)
    return [f"{service.name}.{method.name}" for file in files for service in file.services_by_name.values() for method in service.methods]


def fields() -> list[str]:
    """Of all that requests are made of."""
    files: tuple[FileDescriptor, ...] = (inference_pb2.DESCRIPTOR, caches_pb2.DESCRIPTOR)
    services = [service for file in files for service in file.services_by_name.values()]
    found: dict[str, None] = {}
    for message in (method.input_type for service in services for method in service.methods):
        found |= dict.fromkeys(_fields(message))
    return list(found)


def _fields(message: Descriptor) -> Iterator[str]:
    if message.GetOptions().map_entry:
        return
    for field in message.fields:
        name = f"{message.name}.{field.name}"
        yield name
        if field.message_type is not None and name not in REFUSED:
            yield from _fields(field.message_type)
