"""Trying each field and each endpoint against a running cluster, and the table of what came of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httpx

from tests.conformance.surfaces import ENDPOINTS, SURFACES, Surface, Trial

MODEL = "MODEL"


class Outcome(StrEnum):
    """What becomes of a field or an endpoint."""

    SERVED = "served"
    REFUSED = "refused by name"
    WRONG = "WRONG"
    """Neither: a failure of ours, or a refusal that does not say what it is about."""


@dataclass(frozen=True, slots=True)
class Result:
    """A row of the table."""

    surface: str
    name: str
    outcome: Outcome
    said: str = ""
    """The refusal's own words, or what was wrong."""


def all_results(url: str, model: str) -> list[Result]:
    """Tries everything. Takes some hundred short requests."""
    with httpx.Client(base_url=url, timeout=120) as http:
        results = [_endpoint(http, model, *endpoint) for endpoint in ENDPOINTS]
        for surface in SURFACES:
            results += (_field(http, model, surface, trial) for trial in surface.trials)
    return results


def _endpoint(http: httpx.Client, model: str, method: str, path: str, body: Mapping[str, Any] | None) -> Result:
    headers = {"anthropic-version": "2023-06-01"} if path.startswith("/v1/messages") else {}
    response = http.request(method, path.replace(MODEL, model), json=None if body is None else _named(body, model), headers=headers)
    name = f"{method} {path.replace(MODEL, '{model}')}"
    if response.is_success:
        return Result("endpoints", name, Outcome.SERVED)
    said = _message(response)
    named = response.status_code == 404 and "does not serve" in said
    return Result("endpoints", name, Outcome.REFUSED if named else Outcome.WRONG, said)


def _field(http: httpx.Client, model: str, surface: Surface, trial: Trial) -> Result:
    name = trial.name.partition(":")[0]
    fields = {**trial.with_, name: trial.value}
    body = dict(surface.base)
    if surface.section:
        body[surface.section] = {**body[surface.section], **fields}
    else:
        body |= fields
    response = http.post(surface.path.replace(MODEL, model), json=_named(body, model), headers=dict(surface.headers))
    said = "" if response.is_success else _message(response)
    if response.is_success and re.search(r'"error": ?{', response.text):
        return Result(surface.title, trial.name, Outcome.WRONG, response.text[-300:])
    if response.is_success or (trial.missing and response.status_code in (400, 404) and "none" in said and "not supported" not in said):
        return Result(surface.title, trial.name, Outcome.SERVED)
    named = response.status_code in (400, 404, 501) and _plain(name) in _plain(said + _param(response))
    return Result(surface.title, trial.name, Outcome.REFUSED if named else Outcome.WRONG, f"{response.status_code}: {said}")


def _plain(text: str) -> str:
    return re.sub("[^a-z]", "", text.lower())


def _named(body: Mapping[str, Any], model: str) -> Any:
    return json.loads(json.dumps(body).replace(f'"{MODEL}"', json.dumps(model)))


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


def _lines(results: list[Result], versions: Mapping[str, str]) -> Iterator[str]:
    yield "# What of each API is served"
    yield ""
    yield "Made by `python -m tests.conformance` from trials against a running cluster, field by field: those that the vendors' SDKs know"
    yield f"({', '.join(f'{name} {version}' for name, version in versions.items())}), vLLM's extras, and ours. Each is sent with a value"
    yield "that asks for something. *Served*: the request is answered. *Refused by name*: the answer is an error that names the field."
    yield "What the fields do, and what some of them can do with some models only, is in [the API](api.md)."
    for surface in dict.fromkeys(result.surface for result in results):
        rows = [result for result in results if result.surface == surface]
        yield ""
        yield f"## {surface[:1].upper()}{surface[1:]}"
        yield ""
        served = [result.name for result in rows if result.outcome is Outcome.SERVED]
        yield f"Served ({len(served)}): {', '.join(f'`{name}`' for name in served)}."
        refused = [result for result in rows if result.outcome is not Outcome.SERVED]
        if refused:
            yield ""
            yield "| refused by name | in these words |"
            yield "|---|---|"
            yield from (f"| `{result.name}` | {result.said.replace('|', chr(92) + '|')[:200]} |" for result in refused)
