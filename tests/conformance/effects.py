"""What fields do to answers, tried."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema

from tests.conformance.probe import Json, NoEffect, Probe, require
from tests.conformance.surfaces import ANSWER, CHAT, RESPONSES, WEATHER

Effect = Callable[[Probe], None]
"""Raises NoEffect."""

LONG = "The sea is wide, and nobody knows what lies on the other side of it. " * 12
"""Of several blocks."""
TIE = 0.01
"""How much two computations of one logit may differ."""


# ---- of any API ----


def cut_at_the_length(probe: Probe) -> None:
    answer = probe.tried(temperature=0)
    require(answer.output_tokens == probe.trial.value, answer.body)
    require(answer.finish in ("length", "incomplete", "max_tokens", "MAX_TOKENS"), answer.finish)


def nothing_is_made(probe: Probe) -> None:
    answer = probe.tried()
    require(answer.output_tokens == 0 and answer.prompt_tokens > 0, answer.body)


def two_choices(probe: Probe) -> None:
    answer = probe.tried()
    require(len(answer.texts) == 2, answer.body)


def decided_by_the_seed(probe: Probe) -> None:
    hot: Json = {"temperature": 1, probe.surface.length: 16}
    one, again, other = (probe.ask(**{probe.trial.field: seed}, **hot).text for seed in (7, 7, 8))
    require(one == again, f"{one!r}, then {again!r}")
    require(one != other, f"{one!r} for another seed, too")


def cold_or_hot(probe: Probe) -> None:
    cold, again = probe.greedy().text, probe.greedy().text
    require(cold == again, f"{cold!r}, then {again!r} at temperature 0")
    hot: Json = {"temperature": 1, probe.surface.length: 16}
    require({probe.ask(**hot).text for _ in range(3)} != {cold}, f"{cold!r} at temperature 1, too")


def the_likeliest_alone(value: float) -> Effect:
    """At this value the field leaves no other token, however hot it is."""

    def effect(probe: Probe) -> None:
        cold, hot = probe.greedy().text, {"temperature": 1, probe.surface.length: 16, probe.trial.field: value}
        require({probe.ask(**hot).text for _ in range(2)} == {cold}, f"other tokens than {cold!r}")

    return effect


def _marker(text: str) -> str:
    """Something in the middle of it that is written in one way alone."""
    return next(character for character in text[4:] if character.isascii() and character.isprintable())


def stopped(finish: str) -> Effect:
    def effect(probe: Probe) -> None:
        whole = probe.greedy(24).text
        marker = _marker(whole)
        cut = probe.greedy(24, **{probe.trial.field: [marker]})
        require(cut.text == whole[: whole.index(marker)] and cut.finish == finish, f"{cut.text!r} ({cut.finish}) of {whole!r}")

    return effect


def another_answer(value: Any) -> Effect:
    """Than without the field; for what the answer shows no more of."""

    def effect(probe: Probe) -> None:
        plain, changed = probe.greedy(48).text, probe.greedy(48, **{probe.trial.field: value}).text
        require(plain != changed, f"{plain!r} with it, too")

    return effect


def streamed(piece: Callable[[Json], str]) -> Effect:
    def effect(probe: Probe) -> None:
        whole = probe.greedy().text
        told = "".join(map(piece, probe.events(stream=True, temperature=0, **{probe.surface.length: 16})))
        require(told == whole, f"{told!r}, not {whole!r}")

    return effect


def another_model_is_refused(probe: Probe) -> None:
    refused = probe.sent()
    require(refused.status_code in (400, 404) and probe.post().is_success, refused.text)


def told_to_the_model(probe: Probe) -> None:
    """The prompt is longer for it."""
    told, plain = probe.tried().prompt_tokens, probe.without().prompt_tokens
    require(told > plain, f"{told} tokens, {plain} without")


def not_told_to_the_model(probe: Probe) -> None:
    """The prompt is shorter for it."""
    told, plain = probe.tried().prompt_tokens, probe.without().prompt_tokens
    require(told < plain, f"{told} tokens, {plain} without")


def thought_about(on: Json, off: Json) -> Effect:
    """The prompt opens the reasoning with `on`, and does not with `off`."""

    def effect(probe: Probe) -> None:
        told, plain = (probe.tried(**{probe.trial.field: value}).prompt_tokens for value in (on, off))
        require(told > plain, f"{told} tokens, {plain} when it is not to think")

    return effect


def as_the_text_would(probe: Probe) -> None:
    """The same prompt in other words."""
    one, other = probe.tried(temperature=0), probe.ask(temperature=0)
    require(one.prompt_tokens == other.prompt_tokens and one.text == other.text, f"{one.text!r}, not {other.text!r}")


def valid(probe: Probe) -> None:
    text = probe.tried(temperature=0, **{probe.surface.length: 120}).text
    _is_valid(_parsed(text), ANSWER)


def an_object(probe: Probe) -> None:
    answer = probe.tried(temperature=0, **{probe.surface.length: 120})
    require(answer.text.lstrip().startswith("{"), answer.text)
    if answer.finish in ("stop", "STOP"):
        require(isinstance(_parsed(answer.text), dict), answer.text)


def matching(pattern: str) -> Effect:
    def effect(probe: Probe) -> None:
        text = probe.tried(temperature=0, **{probe.surface.length: 16}).text
        require(re.fullmatch(pattern, text), text)

    return effect


def called(probe: Probe) -> None:
    answer = probe.tried()
    require(answer.calls and {name for name, _ in answer.calls} == {"weather"}, answer.body)
    # The model may go on calling until the answer is cut off.
    _is_valid(answer.calls[0][1], WEATHER)


def kept(**fields: Any) -> Effect:
    """The prompt is kept in the pool."""

    def effect(probe: Probe) -> None:
        said = probe.said(f"{probe.surface.title}, {probe.trial.name}: {LONG}")
        answer = probe.ask(**fields, **said)
        require(answer.kept_tokens >= 64, answer.body)

    return effect


def ended_by_its_deadline(probe: Probe) -> None:
    refused = probe.post(**{probe.trial.field: 1, probe.surface.length: 1000})
    require(refused.status_code in (429, 504) and refused.json()["error"]["code"] == "deadline", refused.text)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise NoEffect(f"{text!r} is no JSON") from None


def _is_valid(value: Any, schema: Json) -> None:
    try:
        jsonschema.validate(value, schema)
    except jsonschema.ValidationError as error:
        raise NoEffect(f"{value!r}: {error.message}") from None


# ---- OpenAI's first two APIs ----


def _two_tokens(probe: Probe) -> Json:
    """No others may come than `0` and `1`."""
    return {"allowed_token_ids": [probe.token("0"), probe.token("1")]}


def _scores(probe: Probe, **fields: Any) -> list[dict[str, float]]:
    """Log-probabilities of `0` and `1` at each of three positions, where no other token may come. The prompt has none of them."""
    chat = probe.surface is CHAT
    asked: Json = {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    body = probe.greedy(3, **_two_tokens(probe), **asked, **fields).body
    logprobs = body["choices"][0]["logprobs"]
    if chat:
        return [{entry["token"]: entry["logprob"] for entry in place["top_logprobs"]} for place in logprobs["content"]]
    return list(logprobs["top_logprobs"])


def _lead(place: dict[str, float]) -> float:
    """How much likelier `0` is than `1`."""
    return place["0"] - place["1"]


def punished(by: float | None, **fields: Any) -> Effect:
    """A token that has come once is less likely afterwards; `by` so much of its logit, where that is known."""

    def effect(probe: Probe) -> None:
        plain, changed = _scores(probe), _scores(probe, **fields)
        require(abs(_lead(plain[0]) - _lead(changed[0])) < TIE, f"{changed[0]}, not {plain[0]}, before any token had come")
        sign = 1 if _lead(plain[0]) > 0 else -1
        lost = sign * (_lead(plain[1]) - _lead(changed[1]))
        require(lost > TIE if by is None else abs(lost - by) < TIE, f"{lost:.3f} of the lead lost: {plain[1]}, then {changed[1]}")

    return effect


def biased(probe: Probe) -> None:
    plain, changed = _scores(probe)[0], _scores(probe, logit_bias={str(probe.token("0")): 3})[0]
    require(abs(_lead(changed) - _lead(plain) - 3) < TIE, f"{plain}, then {changed}")
    for bias, text in ((100, "0000"), (-100, "1111")):
        only = probe.greedy(4, **_two_tokens(probe), logit_bias={str(probe.token("0")): bias}).text
        require(only == text, f"{only!r} with a bias of {bias}")


def usage_in_every_chunk(probe: Probe) -> None:
    events = probe.events(**probe.trial.with_, stream_options=probe.trial.value)
    counts = [event["usage"]["completion_tokens"] for event in events]
    require(counts == sorted(counts) and counts[-1] == 3 and events[-1]["choices"] == [], events[-1])
    (last,) = [event["usage"] for event in probe.events(stream=True, stream_options={"include_usage": True}) if event["usage"]]
    require(last["completion_tokens"] == 3, last)


def ended_by_a_stop_token(probe: Probe) -> None:
    a = probe.token("a")
    answer = probe.greedy(8, allowed_token_ids=[a], stop_token_ids=[a])
    require((answer.output_tokens, answer.finish, answer.text) == (0, "stop", ""), answer.body)
    require(answer.body["choices"][0]["stop_reason"] == a, answer.body)


def _ending(probe: Probe) -> Json:
    """What has the model end at once."""
    return {"logit_bias": {str(probe.token("<|im_end|>")): 100}}


def goes_on_after_the_end_token(probe: Probe) -> None:
    plain, going_on = probe.greedy(8, **_ending(probe)), probe.greedy(8, **_ending(probe), ignore_eos=True)
    require((plain.output_tokens, plain.finish) == (0, "stop"), plain.body)
    require((going_on.output_tokens, going_on.finish) == (8, "length"), going_on.body)


def not_before_so_many(probe: Probe) -> None:
    answer = probe.greedy(8, **_ending(probe), min_tokens=4)
    require((answer.output_tokens, answer.finish) == (4, "stop"), answer.body)


def word_kept_out(probe: Probe) -> None:
    for word, others in (("0", "1" * 8), ("1", "0" * 8)):
        text = probe.greedy(8, **_two_tokens(probe), bad_words=[word]).text
        require(text == others, f"{text!r} without {word!r}")


def others_kept_out(probe: Probe) -> None:
    text = probe.greedy(16, **_two_tokens(probe)).text
    require(len(text) == 16 and set(text) <= {"0", "1"}, text)


def stop_string_kept(probe: Probe) -> None:
    whole = probe.greedy(24).text
    marker = _marker(whole)
    text = probe.greedy(24, stop=[marker], include_stop_str_in_output=True).text
    require(text == whole[: whole.index(marker) + len(marker)], f"{text!r} of {whole!r}")


def special_tokens_shown(probe: Probe) -> None:
    only = {"allowed_token_ids": [probe.token("<|im_start|>")]}
    hidden, shown = probe.greedy(2, **only).text, probe.greedy(2, **only, skip_special_tokens=False).text
    require((hidden, shown) == ("", "<|im_start|>" * 2), f"{hidden!r}, {shown!r}")


def prompt_cut(probe: Probe) -> None:
    require(probe.tried(**probe.said(LONG)).prompt_tokens == probe.trial.value, "another number of tokens")


def prompt_scored(probe: Probe) -> None:
    answer = probe.tried()
    first, *others = answer.body.get("prompt_logprobs") or answer.body["choices"][0]["prompt_logprobs"]
    require(first is None and len(others) == answer.prompt_tokens - 1, answer.body)
    require(all(1 <= len(entries) <= 2 and all(entry["logprob"] <= 0 for entry in entries.values()) for entries in others), answer.body)


def found_with_the_same_salt_alone(probe: Probe) -> None:
    said = probe.said(f"{probe.surface.title}: {LONG}")
    first, again, other = (probe.ask(cache_salt=salt, **said).cached_tokens for salt in ("pepper", "pepper", "thyme"))
    require(first == 0 and again >= 64 and other == 0, f"{first}, {again} and {other} tokens found")


def scored(likeliest: int) -> Effect:
    """Of a chat's tokens."""

    def effect(probe: Probe) -> None:
        answer = probe.tried()
        entries = answer.body["choices"][0]["logprobs"]["content"]
        require(len(entries) == answer.output_tokens and all(entry["logprob"] <= 0 for entry in entries), answer.body)
        require(all(len(entry["top_logprobs"]) == likeliest for entry in entries), answer.body)

    return effect


def completion_scored(probe: Probe) -> None:
    answer = probe.tried()
    logprobs = answer.body["choices"][0]["logprobs"]
    require(len(logprobs["token_logprobs"]) == len(logprobs["tokens"]) == answer.output_tokens, answer.body)
    drawn = zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
    require(all(token in top and len(top) <= probe.trial.value + 1 for token, top in drawn), answer.body)


def one_call_alone(probe: Probe) -> None:
    """Where the model may not end, it goes on calling."""
    forced: Json = {"tool_choice": "required", "max_tokens": 400, "logit_bias": {str(probe.token("<|im_end|>")): -100}}
    several, one = probe.greedy(**probe.trial.with_, **forced), probe.greedy(**probe.trial.with_, **forced, parallel_tool_calls=False)
    require(len(several.calls) > 1 and len(one.calls) == 1, f"{len(several.calls)} calls, and {len(one.calls)}")


def nothing_opens_the_answer(probe: Probe) -> None:
    require(probe.ask(add_generation_prompt=False).prompt_tokens < probe.ask().prompt_tokens, "the prompt is as long")


def answer_goes_on(probe: Probe) -> None:
    """The last message is not closed, and no other one opened."""
    going_on, closed = probe.tried(temperature=0), probe.ask(messages=probe.trial.with_["messages"], temperature=0)
    require(going_on.prompt_tokens < closed.prompt_tokens, f"{going_on.prompt_tokens} tokens, {closed.prompt_tokens} when it is closed")


def as_the_system_would(probe: Probe) -> None:
    system = [{**probe.trial.value[0], "role": "system"}, *probe.trial.value[1:]]
    one, other = probe.tried(temperature=0), probe.ask(messages=system, temperature=0)
    require(one.text == other.text and one.prompt_tokens == other.prompt_tokens, f"{one.text!r}, not {other.text!r}")
    require(one.prompt_tokens != probe.ask().prompt_tokens, "as without it")


def named_tool_called(probe: Probe) -> None:
    other = {"type": "function", "function": {"name": "news", "parameters": WEATHER}}
    answer = probe.tried(temperature=0, tools=[other, *probe.trial.with_["tools"]])
    require([name for name, _ in answer.calls] == ["weather"], answer.body)


def the_best_of_two(probe: Probe) -> None:
    answer = probe.tried(ignore_eos=True)
    require(len(answer.texts) == 1 and answer.output_tokens == 2 * probe.surface.base["max_tokens"], answer.body)


def prompt_echoed(probe: Probe) -> None:
    answer = probe.tried()
    logprobs = answer.body["choices"][0]["logprobs"]
    require(answer.text.startswith(probe.surface.base["prompt"]), answer.text)
    require(logprobs["token_logprobs"][0] is None, logprobs)
    require(len(logprobs["tokens"]) == answer.prompt_tokens + answer.output_tokens, logprobs)


def so_many_prompt_tokens(probe: Probe) -> None:
    prompts = probe.trial.value if isinstance(probe.trial.value[0], list) else [probe.trial.value]
    answer = probe.tried()
    require(answer.prompt_tokens == sum(map(len, prompts)) and len(answer.texts) == len(prompts), answer.body)


# ---- OpenAI's responses ----


def made_in_the_background(probe: Probe) -> None:
    begun = probe.tried().body
    require(begun["status"] in ("queued", "in_progress") and begun["output"] == [], begun)
    probe.server.http.get(f"/v1/responses/{begun['id']}", params={"stream": True})
    ended = probe.server.http.get(f"/v1/responses/{begun['id']}").json()
    require(ended["status"] in ("completed", "incomplete") and ended["output"], ended)


def response_scored(likeliest: int) -> Effect:
    def effect(probe: Probe) -> None:
        answer = probe.tried()
        entries = answer.body["output"][0]["content"][0]["logprobs"]
        require(len(entries) == answer.output_tokens and all(len(entry["top_logprobs"]) == likeliest for entry in entries), answer.body)

    return effect


def shown_again(probe: Probe) -> None:
    body = probe.tried().body
    require(body[probe.trial.field] == probe.trial.value, body)


def at_most_one_call(probe: Probe) -> None:
    tool = next(trial.value for trial in RESPONSES.trials if trial.name == "tools")
    answer = probe.greedy(400, tools=tool, tool_choice="required", parallel_tool_calls=False)
    require(len(answer.calls) == 1 and answer.body["parallel_tool_calls"] is False, answer.body)


def after_the_one_before(probe: Probe) -> None:
    first = probe.ask()
    second = probe.ask(previous_response_id=first.body["id"])
    require(second.prompt_tokens > first.prompt_tokens, f"{second.prompt_tokens} tokens after {first.prompt_tokens}")


def not_stored(probe: Probe) -> None:
    for store, status in ((True, 200), (False, 404)):
        response = probe.ask(store=store).body
        found = probe.server.http.get(f"/v1/responses/{response['id']}")
        require(found.status_code == status and response["store"] is store, found.text)


def turns_left_out(probe: Probe) -> None:
    (model,) = probe.server.http.get("/v1/models").json()["data"]
    turns = [{"role": role, "content": "the sea " * 12} for _ in range(4) for role in ("user", "assistant")]
    asked: Json = {"input": [*turns, {"role": "user", "content": "Yes or no?"}], "text": _named_format({"enum": ["yes", "no"]})}
    asked["max_output_tokens"] = model["max_model_len"] - 100
    refused = probe.post(**asked)
    require(refused.status_code == 400, refused.text)
    require(probe.ask(**asked, truncation="auto").prompt_tokens <= 100, "nothing is left out")


def _named_format(schema: Json) -> Json:
    return {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}


# ---- Anthropic's messages ----


def tools_not_told_of(probe: Probe) -> None:
    told, hidden = probe.tried().prompt_tokens, probe.tried(tool_choice={"type": "none"}).prompt_tokens
    require(hidden < told, f"{hidden} tokens when no tool may be called, {told} when one must")


# ---- Gemini's contents ----


def begins_with_the_kept(probe: Probe) -> None:
    contents = [{"role": "user", "parts": [{"text": LONG}]}]
    kept_content = {"model": f"models/{probe.server.model}", "contents": contents, "ttl": "60s"}
    name = probe.server.http.post("/v1beta/cachedContents", json=kept_content).json()["name"]
    answer = probe.ask(cachedContent=name)
    require(answer.prompt_tokens > 64 + probe.ask().prompt_tokens, answer.body)


def so_many_tokens(length: int) -> Effect:
    def effect(probe: Probe) -> None:
        answer = probe.tried()
        require(answer.output_tokens == length, answer.body)

    return effect


def content_scored(likeliest: int) -> Effect:
    def effect(probe: Probe) -> None:
        answer = probe.tried()
        result = answer.body["candidates"][0]["logprobsResult"]
        require(len(result["chosenCandidates"]) == answer.output_tokens, answer.body)
        require(all(len(entry["candidates"]) == likeliest for entry in result["topCandidates"]), answer.body)

    return effect
