"""Trying each field and each endpoint against a running cluster, and the table of what came of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httpx

from tests.conformance import grpc_fields, objects
from tests.conformance.endpoints import BESIDE, ENDPOINTS
from tests.conformance.expected import EFFECTS, NEUTRAL, SEEN_BY
from tests.conformance.probe import Json, NoEffect, Probe, Server
from tests.conformance.surfaces import NONE, NOT_SERVED, SURFACES, UNKNOWN, Surface, Trial

METHODS = ("get", "put", "post", "delete", "patch", "head")
TRIALS_AT_A_TIME = 4


class Outcome(StrEnum):
    """What becomes of a field or an endpoint."""

    CHECKED = "served, effect checked"
    SEEN = "served, seen by"
    """A test of its own."""
    NEUTRAL = "accepted, asks for nothing"
    REFUSED = "refused by name"
    WRONG = "WRONG"
    """None of these: a failure of ours, a refusal that does not say what it is about, a field or an endpoint without its effect or of which
    nobody has said what that is, and one of which it is said that is not there."""


@dataclass(frozen=True, slots=True)
class Result:
    """A row of the table."""

    surface: str
    name: str
    outcome: Outcome
    said: str = ""
    """The refusal's own words, what was wrong, or which test sees the effect."""


def all_results(server: Server) -> list[Result]:
    """Tries everything. Takes a thousand short requests, some of them at a time."""
    described = _described(server)
    results = [_endpoint(server, name, described) for name in dict.fromkeys((*described, *ENDPOINTS))]
    results += (_not_served(server, *endpoint) for endpoint in NOT_SERVED)
    surfaces = (*SURFACES, *objects.SURFACES)
    probes = [Probe(server, surface, trial) for surface in surfaces for trial in _trials(surface, described)]
    with ThreadPoolExecutor(TRIALS_AT_A_TIME) as threads:
        results += threads.map(_field, probes)
    results += _nowhere(surfaces, described)
    return [*results, *_grpc()]


def _described(server: Server) -> dict[str, Json]:
    """The operations of the API's own description by method and path, each with `fields`, the schemas of its body's fields by name, and
    `body`, the name of its body."""
    description = server.http.get("/openapi.json").json()
    schemas = description["components"]["schemas"]
    found = {}
    for path, operations in description["paths"].items():
        for method in operations.keys() & set(METHODS):
            content = operations[method].get("requestBody", {}).get("content", {})
            body = next((kind["schema"] for kind in content.values()), {})
            name = body.get("$ref", "").rpartition("/")[2]
            fields = schemas.get(name, body).get("properties", {})
            found[f"{method.upper()} {path}"] = {"body": name or path if body else "", "fields": _of_sections(fields, schemas)}
    return dict(sorted(found.items(), key=lambda entry: list(ENDPOINTS).index(entry[0]) if entry[0] in ENDPOINTS else len(ENDPOINTS)))


def _of_sections(fields: Json, schemas: Json) -> Json:
    """With what is in them in the place of the names of other schemas, also where null may be said instead."""
    named = {name: next((kind["$ref"] for kind in schema.get("anyOf", (schema,)) if "$ref" in kind), "") for name, schema in fields.items()}
    return {name: schemas.get(named[name].rpartition("/")[2], schema) for name, schema in fields.items()}


def _operation(surface: Surface) -> str:
    """What the surface is called in the API's own description."""
    path = surface.path.replace("MODEL", "{model}")
    return f"{surface.method} {path.replace('CACHE', '{cache_id}').replace('KEPT', '{cache_id}')}"


def _trials(surface: Surface, described: Mapping[str, Json]) -> tuple[Trial, ...]:
    """The surface's own, and one of each field that the server says to have and nobody has thought of."""
    fields = described[_operation(surface)]["fields"]
    if surface.section:
        fields = fields[surface.section]["properties"]
    tried = {trial.field for trial in surface.trials}
    return (*surface.trials, *(Trial(name, UNKNOWN) for name in fields if name not in tried))


def _nowhere(surfaces: Iterable[Surface], described: Mapping[str, Json]) -> Iterator[Result]:
    """What is said of fields that are not tried, and bodies that no surface is of."""
    names = {surface.title: {trial.name for trial in surface.trials} for surface in surfaces}
    for said in (EFFECTS, NEUTRAL, SEEN_BY):
        for title, fields in said.items():
            yield from (Result(title, name, Outcome.WRONG, "is not tried") for name in fields if name not in names[title])
    bodies = {described[_operation(surface)]["body"] for surface in surfaces}
    for name, operation in described.items():
        if operation["body"] and operation["body"] not in bodies:
            yield Result("Endpoints", name, Outcome.WRONG, "has a body whose fields nobody tries")


def _endpoint(server: Server, name: str, described: Mapping[str, Json]) -> Result:
    if name not in ENDPOINTS:
        return Result("Endpoints", name, Outcome.WRONG, "is served, and nobody tries it")
    if name not in described and name not in BESIDE:
        return Result("Endpoints", name, Outcome.WRONG, "is not in the API's own description")
    try:
        ENDPOINTS[name](server)
    except NoEffect as seen:
        return Result("Endpoints", name, Outcome.WRONG, f"has no effect: {seen}")
    return Result("Endpoints", name, Outcome.CHECKED)


def _not_served(server: Server, method: str, path: str, body: Mapping[str, Any]) -> Result:
    headers = {"anthropic-version": "2023-06-01"} if path.startswith("/v1/messages") else {}
    response = server.http.request(method, path, json=server.named(body), headers=headers)
    said = _message(response)
    refused = response.status_code == 404 and "does not serve" in said
    return Result("Endpoints", f"{method} {path}", Outcome.REFUSED if refused else Outcome.WRONG, said)


def _field(probe: Probe) -> Result:
    surface, trial = probe.surface, probe.trial
    response = probe.sent()
    said = "" if response.is_success else _message(response)
    if response.is_success and re.search(r'"error": ?{', response.text):
        return Result(surface.title, trial.name, Outcome.WRONG, response.text[-300:])
    if response.is_success or (trial.missing and response.status_code in (400, 404) and NONE in said and "not supported" not in said):
        return _served(probe)
    refused = response.status_code in (400, 404, 501) and _plain(trial.field) in _plain(said + _param(response))
    if trial.value == UNKNOWN and not re.match(rf"\S*\b{trial.field} is not (a field that this server supports|supported by)", said):
        return Result(surface.title, trial.name, Outcome.WRONG, f"a value that asks for something is wanted; {said}")
    return Result(surface.title, trial.name, Outcome.REFUSED if refused else Outcome.WRONG, f"{response.status_code}: {said}")


def _grpc() -> Iterator[Result]:
    """What is served over gRPC, and who sees it."""
    for title, there, tests in (
        ("gRPC methods", grpc_fields.methods(), grpc_fields.METHODS),
        ("gRPC fields", grpc_fields.fields(), grpc_fields.FIELDS),
    ):
        for name in dict.fromkeys((*there, *tests)):
            if name not in there:
                yield Result(title, name, Outcome.WRONG, "is not in the schemas")
            elif name in grpc_fields.REFUSED:
                yield Result(title, name, Outcome.REFUSED, f"INVALID_ARGUMENT: {grpc_fields.REFUSED[name]}")
            elif test := tests.get(name, grpc_fields.of_all(name)):
                yield Result(title, name, Outcome.SEEN, test)
            else:
                yield Result(title, name, Outcome.WRONG, "is served, and no test is named that sees it")


def _served(probe: Probe) -> Result:
    """What a field does that is answered."""
    surface, name = probe.surface.title, probe.trial.name
    if name in NEUTRAL.get(surface, ()):
        return Result(surface, name, Outcome.NEUTRAL)
    if name in SEEN_BY.get(surface, ()):
        return Result(surface, name, Outcome.SEEN, SEEN_BY[surface][name])
    effect = EFFECTS.get(surface, {}).get(name)
    if effect is None:
        return Result(surface, name, Outcome.WRONG, "is served, and nobody has said what it does")
    try:
        effect(probe)
    except NoEffect as seen:
        return Result(surface, name, Outcome.WRONG, f"has no effect: {seen}")
    return Result(surface, name, Outcome.CHECKED)


def _plain(text: str) -> str:
    return re.sub("[^a-z]", "", text.lower())


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def _param(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"].get("param") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


def table(results: list[Result], versions: Mapping[str, str]) -> str:
    """docs/conformance.md."""
    return "\n".join(_lines(results, versions)) + "\n"


def rows(page: str) -> dict[tuple[str, str], str]:
    """What docs/conformance.md says of each field and endpoint, by surface and name."""
    surface, found = "", dict[tuple[str, str], str]()
    for line in page.splitlines():
        if line.startswith("## "):
            surface = line.removeprefix("## ").lower()
        elif listed := re.fullmatch(r"(.+) \(\d+\): (.+)\.", line):
            said = "`".join((listed[1][:1].lower() + listed[1][1:]).split("`")[:2])
            found |= {(surface, name): said.replace("`", "") for name in listed[2].split("`")[1::2]}
        elif line.startswith("| `"):
            found[surface, line.split("`")[1]] = Outcome.REFUSED
    return found


def said(result: Result) -> str:
    """What `rows` has of a result."""
    return f"{result.outcome} {result.said}" if result.outcome is Outcome.SEEN else result.outcome


def _lines(results: list[Result], versions: Mapping[str, str]) -> Iterator[str]:
    yield "# What of each API is served"
    yield ""
    yield "Made by `python -m tests.conformance` from trials against a running cluster, endpoint by endpoint and field by field: those"
    yield "that the server itself describes (`/openapi.json`, `proto/`), those that the vendors' SDKs know"
    yield f"({', '.join(f'{name} {version}' for name, version in versions.items())}), and vLLM's extras."
    yield "Each is sent with a value that asks for something."
    yield ""
    yield f"- *{Outcome.CHECKED.capitalize()}*: what the field or the endpoint promises was seen in answers, of a field with and without"
    yield "  it, of a tiny model whose chat template has a place for whatever can be told to one (`tests/conformance/`)."
    yield f"- *{Outcome.SEEN.capitalize()}* a test, which is named: it shows under load, of models that think aloud, or over gRPC."
    yield f"- *{Outcome.NEUTRAL.capitalize()}*: there is nothing to be done with the field, or with the values that it is taken at."
    yield f"- *{Outcome.REFUSED.capitalize()}*: the answer is an error that names the field."
    yield ""
    yield "What the fields do, and what some of them can do with some models only, is in [the API](api.md)."
    for surface in dict.fromkeys(result.surface for result in results):
        of_it = [result for result in results if result.surface == surface]
        yield ""
        yield f"## {surface}"
        yield from _listed(Outcome.CHECKED, of_it)
        for test in dict.fromkeys(result.said for result in of_it if result.outcome is Outcome.SEEN):
            yield from _listed(f"{Outcome.SEEN} `{test}`", [result for result in of_it if result.said == test])
        yield from _listed(Outcome.NEUTRAL, of_it)
        refused = [result for result in of_it if result.outcome is Outcome.REFUSED]
        if refused:
            yield ""
            yield "| refused by name | in these words |"
            yield "|---|---|"
            yield from (f"| `{result.name}` | {result.said.replace('|', chr(92) + '|')[:200]} |" for result in refused)


def _listed(what: str, results: Iterable[Result]) -> Iterator[str]:
    """A line of those of this outcome, if there are any."""
    names = [f"`{result.name}`" for result in results if what.startswith(result.outcome)]
    if names:
        yield ""
        yield f"{what[:1].upper()}{what[1:]} ({len(names)}): {', '.join(names)}."
