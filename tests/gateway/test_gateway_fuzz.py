"""Whatever a client sends, made from the API's own description and from its opposite: an answer or a refusal, never a failure of ours, and
nothing of it stays."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import schemathesis
from gateway_cluster import MODEL, Cluster
from gateway_fuzzing import MORE, assert_nothing_stays
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.openapi.checks import RejectedPositiveData

from gateway.app import GatewayServer

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
OPENAI_ERROR = ("message", "type", "param", "code")
LEAST_ANSWERS = 5
BUDGET_S = 4.0
"""For each kind of request; what is drawn after it, and after the least answers, is not sent."""
SHARDS = 4
EXAMPLES = MORE or 10
"""Of each operation and mode, twice where it has a body: the same ones each time, or with FUZZ_EXAMPLES so many others."""
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**30), 10**30)
UNSAID = {
    "a schema cannot name what is there": r"^(after|before|pageToken): (there is no |.* is no item of )",
    "a schema does not know the model's vocabulary and context": (
        r"token ids must be between|keys must be token ids|takes \d+ tokens|has \d+ tokens|context"
    ),
    "to JSON Schema 4.0 is an integer": r": input should be a valid integer, not -?[\d.e+]+$|^(prompt|allowed_token_ids) must be a ",
    "to JSON Schema 5e-324 is above 0": r"top_p must be above 0|topP must be above 0|repetition_penalty must be between",
    "readers of schemas know more or fewer letters (\\w)": r"\.name: string should match pattern",
    "what one field may be depends on others": (
        r"may only be set (when|with)|are two words for one thing|must not be given both|contradict each other|cannot both be|"
        r"goes with the type|is required, and not both|one of them alone|must be less than max_tokens|needs store|must be at least n \(|"
        r"must equal n|the output can be held to one thing|min_tokens must be at most|must be 'application/json'|"
        r"is required with|is required where|"
        r"is not for a chat|is the cachedContent's|is what output_config.format|but .* in the path|may hold at most"
    ),
    "something has to be in one of several places": (
        r"must have at least one|there is nothing to keep|must hold at least one message|a file with something in it"
    ),
    "tools are named in one field and meant by another": r"^tool_choice(\.name)? |tool_choice of type|must have names of their own",
    "who may say what after whom is not of a schema": (
        r"content is required of a message|are the assistant's, not|no place in a message of this role|has no tool_(use|result)|"
        r"no function_call with|is the model's to make|answers no functionCall|must be the only thing in its part|they are a part each|"
        r"has neither text nor|\.role must be|the role cache|last message|has not been answered|continue_final_message"
    ),
    "marks of caches are counted over the whole body": r"cache_control(:| may be on at most)",
    "blocks are of tokens": r"at least \d+ are needed to be kept",
    "a schema knows no clock": r"must be in the future|ttl must be more than 0|completion_window must be",
    "schemas, expressions and templates in a body are of languages of their own": (
        r"Gemini's schemas|schema|cannot be compiled|regex|grammar|chat_template_kwargs|template"
    ),
    "only responses of the background have it": r"was not made in the background|the events of .* are not there",
    "by this refusal Anthropic's client knows to send all messages": r"^thread is not supported",
}
"""Why a request that the description allows may be refused all the same, and in which words it is."""
AGAIN = re.compile(r"/v1beta/(cachedContents|models/\{model\}:)")
"""Paths of operations that are those of /v1."""
NEVER = {
    "POST /v1/responses/{response_id}/cancel",
    "POST /v1/batches/{batch_id}/cancel",
}
"""Operations for which nothing is there that they could be about."""
TEXTS = {"type": "string", "minLength": 1, "maxLength": 20}
NULL = {"type": "null"}
SECONDS = {"type": "integer", "minimum": 60, "maximum": 3600}
LENGTH, COUNT = {"type": "integer", "minimum": 4, "maximum": 8}, {"enum": [1, 2]}
EASY: dict[str, Any] = {
    **dict.fromkeys(("max_tokens", "max_output_tokens", "maxOutputTokens"), LENGTH),
    **dict.fromkeys(("n", "candidateCount"), COUNT),
    **dict.fromkeys(("best_of", "max_completion_tokens", "deadline_ms", "min_tokens", "truncate_prompt_tokens", "stop_token_ids"), NULL),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object", "response_format"), NULL),
    **dict.fromkeys(("structured_outputs", "allowed_token_ids", "logit_bias", "bad_words", "stream_options", "top_logprobs"), NULL),
    **dict.fromkeys(("tools", "tool_choice", "toolConfig", "tool_calls", "functionCall", "functionResponse", "thinking", "thread"), NULL),
    **dict.fromkeys(("output_config", "output_format", "generateContentRequest", "previous_response_id", "cachedContent"), NULL),
    **dict.fromkeys(("responseSchema", "responseJsonSchema", "responseMimeType", "logprobs", "prompt_logprobs", "include"), NULL),
    **dict.fromkeys(("cache_control", "expired_at", "expireTime", "continue_final_message", "background", "store"), NULL),
    **dict.fromkeys(("add_generation_prompt", "chat_template_kwargs"), NULL),
    "tokens": {"type": "array", "items": {"type": "integer", "minimum": 10, "maximum": 1000}},
}
"""Values at which nothing stands in a request's way, and of which its answer is short."""
EASY_SCHEMAS: dict[str, Any] = {
    "ChatMessage": {"role": {"enum": ["system", "user", "assistant"]}, "content": {"type": "string", "minLength": 1}},
    "MessageParam": {"role": {"enum": ["user", "assistant"]}, "content": TEXTS},
    "Part": {"text": TEXTS},
    "Content": {"role": {"enum": ["user"]}, "parts": {"type": "array", "items": {"$ref": "#/components/schemas/Part"}, "minItems": 1}},
    "CompletionRequest": {"prompt": TEXTS},
    "TokenizeRequest": {"prompt": TEXTS, "messages": {"maxItems": 0, "type": "array"}},
    "ResponseRequest": {"input": TEXTS},
    "InputTokensRequest": {"input": TEXTS},
    "BatchRequest": {"completion_window": {"enum": ["24h", "7d", "30m"]}},
    "CachingRequest": {"ttl": SECONDS},
    "CachingUpdate": {"ttl": SECONDS},
    "CacheUpdate": {"ttl": {"enum": ["60s", "3.5s"]}},
    "CachedContent": {"ttl": {"enum": ["60s", "3.5s"]}},
}
"""The same of whole objects, whose fields these are."""
RANGES: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 2) | st.sampled_from([1e-45, 1e-38, 1e-300]) | NUMBERS,
    "top_p": st.floats(0, 1) | NUMBERS,
    "min_p": st.floats(0, 1) | NUMBERS,
    "top_k": st.integers(-2, 1 << 33),
    "repetition_penalty": st.floats(0.01, 100) | NUMBERS,
    "presence_penalty": st.floats(-2, 2) | NUMBERS,
    "frequency_penalty": st.floats(-2, 2) | NUMBERS,
    "seed": st.integers(-(1 << 65), 1 << 65),
    "n": st.integers(-1, 4),
    "max_tokens": st.integers(0, 8) | st.integers(),
    "logprobs": st.integers(-1, 21) | st.booleans(),
    "stream": st.booleans(),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "stop_token_ids": st.lists(st.integers(-1, 1 << 33), max_size=3),
    "logit_bias": st.dictionaries(st.integers(-1, 1 << 33).map(str), NUMBERS, max_size=3),
    "deadline_ms": NUMBERS,
    "priority": st.integers(-(1 << 32), 1 << 32),
}


class Fuzz:
    """Sends cases from a thread, and judges the answers."""

    def __init__(self, url: str, *error_fields: str) -> None:
        """`error_fields` are those of the API's errors."""
        self.url = url
        self._error_fields = set(error_fields)
        self.statuses: Counter[int] = Counter()
        self._http = httpx.Client(base_url=url, timeout=20)
        self._until = time.monotonic() + BUDGET_S

    @property
    def over(self) -> bool:
        return time.monotonic() > self._until and min(self.statuses[200], self.statuses[400]) >= LEAST_ANSWERS

    def judge(self, status: int, content: bytes) -> None:
        """503 and 504 are the cluster's: it is refused here, or its deadline was too short."""
        self.statuses[status] += 1
        assert status < 500 or status == 504, (status, content[:500])
        if status in (400, 404, 413, 422, 504):
            error = json.loads(content)["error"]
            assert {*error, "details"} == {*self._error_fields, "details"} and error["message"]
        elif status == 200 and not content.startswith((b"data:", b"event:")):
            json.loads(content, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    def post(self, path: str, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        reply = self._http.post(path, content=content, headers={"content-type": "application/json"})
        self.judge(reply.status_code, reply.content)


def settings_for(examples: int, *, again: bool = False) -> settings:
    """No shrinking: what fails is printed as it is."""
    return settings(
        max_examples=examples,
        derandomize=again,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


def things(http: httpx.Client) -> dict[str, str]:
    """Names of what is there, by the names of parameters in paths."""

    def made(path: str, **fields: Any) -> dict[str, Any]:
        return dict(http.post(path, **fields).raise_for_status().json())

    file = made("/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", b"{}")})["id"]
    batch = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    messages = [{"role": "user", "content": "The sea is wide, and the tide comes in. " * 20}]
    cache = made("/v1/caching", json={"model": MODEL, "messages": messages})["id"]
    return {
        "model": MODEL,
        "model_id": MODEL,
        "response_id": made("/v1/responses", json={"model": MODEL, "input": "Say it."})["id"],
        "file_id": file,
        "batch_id": made("/v1/batches", json=batch)["id"],
        "cache_id": cache,
        "tag": made("/v1/caching/refs/tags", json={"tag": "tide", "cache_id": cache})["tag"],
    }


def description(http: httpx.Client, there: Mapping[str, str], *, easy: bool) -> dict[str, Any]:
    """The API's own, which of names knows those that are there; `easy`: with values alone at which requests are answered."""
    said: dict[str, Any] = http.get("/openapi.json").json()
    names = {"model": {"enum": [MODEL]}, "input_file_id": {"enum": [there["file_id"]]}, "cache_id": {"enum": [there["cache_id"]]}}
    for schema_name, schema in said["components"]["schemas"].items():
        own = EASY_SCHEMAS.get(schema_name, {})
        for name in schema.get("properties", {}):
            if known := {**names, **(EASY if easy else {}), **(own if easy else {})}.get(name):
                null = [NULL] if NULL in schema["properties"][name].get("anyOf", ()) else []
                schema["properties"][name] = {"anyOf": [known, *null]} if name in names else known
        if easy and own:
            schema["required"] = sorted({*schema.get("required", ()), *own})
    return said


@dataclass(slots=True)
class Findings:
    failures: dict[str, str] = field(default_factory=dict)
    """The first of each kind."""
    statuses: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    """By operation."""
    unsaid: Counter[str] = field(default_factory=Counter)

    def judge(self, case: schemathesis.Case, url: str) -> None:
        reply = case.call(base_url=url, timeout=20)
        label = case.operation.label
        self.statuses[label][reply.status_code] += 1
        try:
            case.validate_response(reply, excluded_checks=[not_a_server_error])
        except FailureGroup as group:
            for failure in group.exceptions:
                self._failed(failure, label, reply)
        if reply.status_code >= 500 and reply.status_code != 504:
            self.failures.setdefault(f"{label}: {reply.status_code}", reply.text[:300])

    def _failed(self, failure: Failure, label: str, reply: Any) -> None:
        said = _message(reply.text)
        if isinstance(failure, RejectedPositiveData):
            for reason, words in UNSAID.items():
                if re.search(words, said):
                    self.unsaid[reason] += 1
                    return
        kind = f"{label}: {type(failure).__name__} {re.sub('[0-9]+', '0', said)[:60]}"
        self.failures.setdefault(kind, f"{failure}\n{reply.request.url}\n{reply.request.body!r:.2000}\n{reply.text[:500]}")


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def fuzz_operation(url: str, label: str, mode: GenerationMode, findings: Findings) -> None:
    method, path = label.split(" ")
    with httpx.Client(base_url=url, timeout=20) as http:
        there = things(http)
        named = {name: value for name, value in there.items() if f"{{{name}}}" in path}
        descriptions = [description(http, there, easy=False)]
        if mode is GenerationMode.POSITIVE and "requestBody" in descriptions[0]["paths"][path][method.lower()]:
            descriptions.append(description(http, there, easy=True))
    for said in descriptions:
        operation = schemathesis.openapi.from_dict(said)[path][method]

        @settings_for(EXAMPLES, again=not MORE)
        @given(case=operation.as_strategy(generation_mode=mode, path_parameters=named))
        def send(case: schemathesis.Case) -> None:
            findings.judge(case, url)

        # Of an operation that takes nothing there is no data that it does not take.
        with contextlib.suppress(Unsatisfiable):
            send()


def _fields(names: set[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({name: RANGES[name] for name in sorted(names)})


def fuzz_parameters(fuzz: Fuzz, path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "Say it."}]} if path == CHAT else {"prompt": "Say it."}

    @settings_for(400)
    @given(fields=st.sets(st.sampled_from(sorted(RANGES)), max_size=3).flatmap(_fields))
    def send(fields: dict[str, Any]) -> None:
        if not fuzz.over:
            fuzz.post(path, {"model": MODEL, **prompt, **fields})

    send()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("shard", range(SHARDS))
async def test_answers_are_as_described_and_what_is_described_is_taken_and_nothing_else(
    gateway: GatewayServer, cluster: Cluster, http: httpx.AsyncClient, shard: int, mode: GenerationMode
) -> None:
    paths = (await http.get("/openapi.json")).json()["paths"]
    labels = [f"{method.upper()} {path}" for path in paths if not AGAIN.match(path) for method in paths[path]][shard::SHARDS]
    findings = Findings()
    for label in labels:
        await asyncio.to_thread(fuzz_operation, f"http://{gateway.http_address}", label, mode, findings)
    for label, statuses in findings.statuses.items():
        print(label, dict(statuses))
    print(findings.unsaid)
    assert not findings.failures, "\n\n".join(f"{kind}\n{failure}" for kind, failure in findings.failures.items())
    if mode is GenerationMode.POSITIVE:
        assert {label for label in labels if not findings.statuses[label][200]} <= NEVER
    await assert_nothing_stays(gateway, cluster)


@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_parameters_within_their_ranges_and_beyond(gateway: GatewayServer, cluster: Cluster, path: str) -> None:
    fuzz = Fuzz(f"http://{gateway.http_address}", *OPENAI_ERROR)
    await asyncio.to_thread(fuzz_parameters, fuzz, path)
    print(fuzz.statuses)
    assert fuzz.statuses[400] >= LEAST_ANSWERS and fuzz.statuses[200] >= LEAST_ANSWERS
    await assert_nothing_stays(gateway, cluster)
