"""Outputs that are held to something, through OpenAI's SDK, with the demo model and with random ones, at temperature 1.

`EVERY_SCHEMA=1 pytest tests/e2e/test_structured_output.py -k schema -rP` asks each model for an output of all two hundred schemas, not of
some (`make test-long`).
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from engine.backends import choice as backends
from engine.formats.files import read_config
from tests.support.cluster import Cluster
from tests.support.json_schemas import Schema, check, schemas
from tests.support.models import demo_gguf, make_tiny_llama, make_tiny_model
from tests.support.profiles import DEMO_PROFILE, TINY_PROFILE

DTYPE = "bfloat16" if backends.native_can_run(read_config(demo_gguf())) else "float32"
"""In which an output is the same whatever the company, and wherever it goes on."""
EVERY = "EVERY_SCHEMA" in os.environ
CHOSEN = schemas() if EVERY else schemas()[::19]
FAMILIES = ("demo", "Llama", "Qwen3Moe") if EVERY else ("demo", "Llama")
SCHEMAS_TIMEOUT_S = 120 + 5 * len(CHOSEN)
AT_A_TIME = 16
MOST_TOKENS = 500
ASKED = [{"role": "user", "content": "Describe a town by the sea, in JSON."}]
TOWN = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "people": {"type": "integer", "minimum": 0, "maximum": 10_000_000},
        "streets": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 4, "maxItems": 6},
        "about": {"type": "string", "minLength": 80, "maxLength": 160},
    },
    "required": ["name", "people", "streets", "about"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    settings = {"device": "cpu", "dtype": DTYPE, "profile": DEMO_PROFILE, "max_context": 2048}
    with Cluster(prefill=1, decode=2, prefill_node={"threads": 1}, decode_node={"threads": 1}, **settings) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client


def schema_format(schema: Schema) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def ask(client: openai.OpenAI, model: str, **fields: Any) -> Any:
    fields = {"messages": ASKED, "temperature": 1.0, "max_tokens": 300, "seed": 1, **fields}
    return client.chat.completions.create(model=model, **fields).choices[0]


def outcomes(cluster: Cluster) -> Counter[str]:
    """How the outputs of all that is chosen have ended, one of each schema. Fails where one that is finished does not satisfy its schema;
    one that is refused raises."""
    model, began = cluster.model, time.monotonic()
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0, timeout=SCHEMAS_TIMEOUT_S) as client:

        def ended(numbered: tuple[int, tuple[str, Schema]]) -> tuple[str, str]:
            """By what, and what is wrong."""
            seed, (name, schema) = numbered
            choice = ask(client, model, response_format=schema_format(schema), seed=seed, max_tokens=MOST_TOKENS)
            if choice.finish_reason == "stop":
                try:
                    check(choice.message.content, schema)
                except Exception as error:
                    return "stop", f"{name}: {choice.message.content!r} does not satisfy {json.dumps(schema)}: {error}"
            return choice.finish_reason, ""

        with concurrent.futures.ThreadPoolExecutor(AT_A_TIME) as threads:
            told = list(threads.map(ended, enumerate(CHOSEN)))
    wrong = [what for _, what in told if what]
    counts = Counter(how for how, _ in told)
    print(f"{len(told)} schemas in {time.monotonic() - began:.0f} s: {dict(counts)}, {len(wrong)} wrong")
    assert not wrong, "\n".join(wrong)
    return counts


def test_schemas_of_every_kind_are_chosen() -> None:
    kinds = [{name.rpartition("-")[0] for name, _ in some} for some in (CHOSEN, schemas())]
    assert kinds[0] == kinds[1] and len(schemas()) == 200


@pytest.mark.timeout(SCHEMAS_TIMEOUT_S)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_output_that_is_finished_satisfies_its_schema(request: pytest.FixtureRequest, tmp_path: Path, family: str) -> None:
    """To the random models, of 320 tokens, each is about as likely as another wherever more than one may come."""
    if family == "demo":
        counts = outcomes(request.getfixturevalue("cluster"))
    else:
        if family == "Llama":
            make_tiny_llama(tmp_path / family, seed=1)
        else:
            make_tiny_model(tmp_path / family, family, seed=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
        with Cluster(model=str(tmp_path / family), max_context=2048, profile=TINY_PROFILE) as random:
            counts = outcomes(random)
    assert counts.keys() <= {"stop", "length"}
    assert counts["stop"] >= len(CHOSEN) // 2, "otherwise little has been seen"


def test_outputs_are_held_to_whatever_can_be_asked_for(cluster: Cluster, client: openai.OpenAI) -> None:
    model = cluster.model
    choices = (ask(client, model, response_format={"type": "json_object"}, max_tokens=600, seed=seed) for seed in range(1, 6))
    assert isinstance(json.loads(next(choice for choice in choices if choice.finish_reason == "stop").message.content), dict)
    assert re.fullmatch("[A-Z]{3}-[0-9]{2}", ask(client, model, extra_body={"guided_regex": "[A-Z]{3}-[0-9]{2}"}).message.content)
    assert ask(client, model, extra_body={"guided_choice": ["Brest", "São Tomé"]}).message.content in ("Brest", "São Tomé")
    gbnf = 'root ::= "yes" | "no " digit\ndigit ::= [0-9]'
    assert re.fullmatch("yes|no [0-9]", ask(client, model, extra_body={"structured_outputs": {"grammar": gbnf}}).message.content)
    # The same seed draws the same, also where it is held to something.
    first, second = (ask(client, model, response_format=schema_format(TOWN), seed=5).message.content for _ in range(2))
    assert first == second
    check(first, TOWN)


def test_pydantic_models_are_parsed(cluster: Cluster, client: openai.OpenAI) -> None:
    class Street(BaseModel):
        name: str = Field(max_length=20)
        kind: Literal["road", "lane"]

    class Town(BaseModel):
        name: str = Field(max_length=20)
        streets: list[Street] = Field(max_length=2)
        mayor: str | None

    completion = client.chat.completions.parse(
        model=cluster.model, messages=ASKED, response_format=Town, temperature=1.0, max_tokens=400, seed=2
    )
    assert isinstance(completion.choices[0].message.parsed, Town)


def test_tokens_are_left_out_or_chosen_among(cluster: Cluster, client: openai.OpenAI) -> None:
    def complete(**extra: Any) -> Any:
        return client.completions.create(model=cluster.model, prompt="The sea is", max_tokens=40, temperature=1.0, seed=3, extra_body=extra)

    assert complete(min_tokens=40).usage.completion_tokens == 40
    text = complete(bad_words=["the", "a", "sea"], min_tokens=40).choices[0].text
    assert not re.search(r"\b(the|a|sea)\b", text)
    assert set(complete(allowed_token_ids=[28, 29, 30], min_tokens=10).choices[0].text) <= set(",-.")


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": schema_format({"not": {"type": "string"}})}, "response_format", "not"),
        ({"response_format": schema_format({"type": "string", "pattern": "(?=a)b"})}, "response_format", "look-ahead"),
        ({"extra_body": {"guided_regex": "("}}, None, "unclosed"),
        ({"extra_body": {"guided_grammar": "start: A\nA: " + " & ".join(f"/.*a.{{{i}}}/" for i in range(1, 40))}}, None, "compiled within"),
    ],
)
def test_what_cannot_be_compiled_is_refused_and_nobody_waits_for_it(
    cluster: Cluster, client: openai.OpenAI, fields: dict[str, Any], param: str | None, says: str
) -> None:
    model = cluster.model
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        refused = other.submit(ask, client, model, **fields)
        assert ask(client, model, max_tokens=4).finish_reason == "length"
        with pytest.raises(openai.BadRequestError, match=says) as error:
            refused.result()
    assert param is None or error.value.param == param


def test_an_output_goes_on_as_it_would_have_when_its_decode_node_is_killed(cluster: Cluster, client: openai.OpenAI) -> None:
    fields = {
        "model": cluster.model,
        "messages": ASKED,
        "temperature": 1.0,
        "seed": 11,
        "max_tokens": 400,
        "response_format": schema_format(TOWN),
    }
    undisturbed = client.chat.completions.create(**fields).choices[0]
    assert undisturbed.finish_reason == "stop"
    nodes = ("decode-0", "decode-1")
    before = {name: cluster.metric(name, "springtide_decode_tokens_total") for name in nodes}
    text, killed = "", ""
    for event in client.chat.completions.create(**fields, stream=True):
        text += event.choices[0].delta.content or ""
        if len(text) > 20 and not killed:
            killed = max(nodes, key=lambda name: cluster.metric(name, "springtide_decode_tokens_total") - before[name])
            cluster.kill(killed)
    assert killed and text == undisturbed.message.content
    check(text, TOWN)
    cluster.wait_ready(restarted=killed)
