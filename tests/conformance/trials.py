"""Trying each field and each endpoint against a running cluster, and the table of what came of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httpx

from tests.conformance.expected import EFFECTS, NEUTRAL, UNSEEN
from tests.conformance.probe import NoEffect, Probe, Server, named
from tests.conformance.surfaces import ENDPOINTS, MODEL, SURFACES


class Outcome(StrEnum):
    """What becomes of a field or an endpoint."""

    SERVED = "served"
    """Of an endpoint: it answers."""
    CHECKED = "served, effect checked"
    UNSEEN = "served, effect not seen in an answer"
    NEUTRAL = "accepted, asks for nothing"
    REFUSED = "refused by name"
    WRONG = "WRONG"
    """None of these: a failure of ours, a refusal that does not say what it is about, a field without its effect or of which nobody has
    said what that is."""


@dataclass(frozen=True, slots=True)
class Result:
    """A row of the table."""

    surface: str
    name: str
    outcome: Outcome
    said: str = ""
    """The refusal's own words, what was wrong, or which test sees the effect."""


def all_results(server: Server) -> list[Result]:
    """Tries everything. Takes some hundred short requests."""
    results = [_endpoint(server, *endpoint) for endpoint in ENDPOINTS]
    for surface in SURFACES:
        results += (_field(Probe(server, surface, trial)) for trial in surface.trials)
    return results


def _endpoint(server: Server, method: str, path: str, body: Mapping[str, Any] | None) -> Result:
    headers = {"anthropic-version": "2023-06-01"} if path.startswith("/v1/messages") else {}
    json = None if body is None else named(body, server.model)
    response = server.http.request(method, path.replace(MODEL, server.model), json=json, headers=headers)
    name = f"{method} {path.replace(MODEL, '{model}')}"
    if response.is_success:
        return Result("endpoints", name, Outcome.SERVED)
    said = _message(response)
    refused = response.status_code == 404 and "does not serve" in said
    return Result("endpoints", name, Outcome.REFUSED if refused else Outcome.WRONG, said)


def _field(probe: Probe) -> Result:
    surface, trial = probe.surface, probe.trial
    response = probe.post(**trial.with_, **{trial.field: trial.value})
    said = "" if response.is_success else _message(response)
    if response.is_success and re.search(r'"error": ?{', response.text):
        return Result(surface.title, trial.name, Outcome.WRONG, response.text[-300:])
    if response.is_success or (trial.missing and response.status_code in (400, 404) and "none" in said and "not supported" not in said):
        return _served(probe)
    refused = response.status_code in (400, 404, 501) and _plain(trial.field) in _plain(said + _param(response))
    return Result(surface.title, trial.name, Outcome.REFUSED if refused else Outcome.WRONG, f"{response.status_code}: {said}")


def _served(probe: Probe) -> Result:
    """What a field does that is answered."""
    surface, name = probe.surface.title, probe.trial.name
    if name in NEUTRAL.get(surface, ()):
        return Result(surface, name, Outcome.NEUTRAL)
    if name in UNSEEN.get(surface, ()):
        return Result(surface, name, Outcome.UNSEEN, UNSEEN[surface][name])
    effect = EFFECTS[surface].get(name)
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
            found |= {(surface, name): listed[1].lower() for name in listed[2].split("`")[1::2]}
        elif line.startswith("| `"):
            found[surface, line.split("`")[1]] = Outcome.REFUSED
    return found


def _lines(results: list[Result], versions: Mapping[str, str]) -> Iterator[str]:
    yield "# What of each API is served"
    yield ""
    yield "Made by `python -m tests.conformance` from trials against a running cluster, field by field: those that the vendors' SDKs know"
    yield f"({', '.join(f'{name} {version}' for name, version in versions.items())}), vLLM's extras, and ours. Each is sent with a value"
    yield "that asks for something."
    yield ""
    yield f"- *{Outcome.CHECKED.capitalize()}*: what the field promises was seen in answers with and without it, of a tiny model whose chat"
    yield "  template has a place for whatever can be told to one (`tests/conformance/effects.py`)."
    yield f"- *{Outcome.UNSEEN.capitalize()}*: it shows under load, or of models that think aloud; the test that sees it is named."
    yield f"- *{Outcome.NEUTRAL.capitalize()}*: there is nothing to be done with the field, or with the values that it is taken at."
    yield f"- *{Outcome.REFUSED.capitalize()}*: the answer is an error that names the field."
    yield ""
    yield "What the fields do, and what some of them can do with some models only, is in [the API](api.md)."
    for surface in dict.fromkeys(result.surface for result in results):
        of_it = [result for result in results if result.surface == surface]
        yield ""
        yield f"## {surface[:1].upper()}{surface[1:]}"
        for outcome in (Outcome.SERVED, Outcome.CHECKED, Outcome.UNSEEN, Outcome.NEUTRAL):
            names = [f"`{result.name}`{f' ({result.said})' if result.said else ''}" for result in of_it if result.outcome is outcome]
            if names:
                yield ""
                yield f"{outcome.capitalize()} ({len(names)}): {', '.join(names)}."
        refused = [result for result in of_it if result.outcome is Outcome.REFUSED]
        if refused:
            yield ""
            yield "| refused by name | in these words |"
            yield "|---|---|"
            yield from (f"| `{result.name}` | {result.said.replace('|', chr(92) + '|')[:200]} |" for result in refused)
