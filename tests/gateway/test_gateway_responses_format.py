"""What the Responses API's answers and events are made of, by the types of OpenAI's client; and conversations, of items."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.api_request import Message, Speaker, ToolCall
from gateway.openai.responses_body import ResponseRequest
from gateway.openai.responses_format import ResponseFormat
from gateway.openai.responses_items import ItemIds, conversation_of, input_items, response_of
from gateway.output import CallArguments, CallBegun, Content, Delta, Ending, Part, Reasoning, gathered
from springtide.errors import Overloaded, Unavailable
from springtide.protocol.outputs import Finish
from springtide.protocol.usage import Usage

EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
USAGE = Usage(prompt_tokens=10, completion_tokens=7, cached_tokens=4, reasoning_tokens=2)
STOP, LENGTH = Ending(Finish.STOP), Ending(Finish.LENGTH)
THINKS_AND_CALLS: tuple[Part, ...] = (
    Reasoning("It is "),
    Reasoning("far."),
    Content("I look "),
    Content("it up."),
    CallBegun(0, "c1", "weather"),
    CallArguments(0, '{"city":'),
    CallArguments(0, '"Ulm"}'),
    CallBegun(1, "c2", "time"),
    CallArguments(1, "{}"),
)


def new_format() -> ResponseFormat:
    body = ResponseRequest(model="m", input="Hi.", tools=[{"type": "function", "name": "weather", "parameters": {}}])
    return ResponseFormat("resp-1", "resp_1", body.shown(), num_input_items=1)


def deltas_of(parts: Sequence[Part], ending: Ending) -> list[Delta]:
    return [*(Delta(0, (part,)) for part in parts), Delta(0, (), ending=ending)]


def events_of(data: Iterable[bytes]) -> list[Any]:
    """Each is what the client's types say."""
    events = []
    for event in data:
        head, _, text = event.decode().partition("\ndata: ")
        events.append(EVENT.validate_python(json.loads(text), strict=False))
        assert head == f"event: {events[-1].type}" and text.endswith("\n\n")
    return events


def streamed(parts: Sequence[Part], ending: Ending) -> list[Any]:
    written = new_format()
    data = [*written.begin()]
    for delta in deltas_of(parts, ending):
        data += written.delta(delta, USAGE)
    return events_of([*data, *written.end(USAGE)])


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    events = streamed(THINKS_AND_CALLS, STOP)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    item = ["response.output_item.added", "response.content_part.added"]
    ends = ["response.content_part.done", "response.output_item.done"]
    reasoning, text, call = "response.reasoning_text", "response.output_text", "response.function_call_arguments"
    assert [event.type for event in events] == [
        *("response.created", "response.in_progress"),
        *(*item, f"{reasoning}.delta", f"{reasoning}.delta", f"{reasoning}.done", *ends),
        *(*item, f"{text}.delta", f"{text}.delta", f"{text}.done", *ends),
        *("response.output_item.added", f"{call}.delta", f"{call}.delta", f"{call}.done", "response.output_item.done"),
        *("response.output_item.added", f"{call}.delta", f"{call}.done", "response.output_item.done"),
        "response.completed",
    ]
    response = events[-1].response
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert response.output[0].content[0].text == "It is far." and response.output_text == "I look it up."
    assert [(item.call_id, item.name, item.arguments) for item in response.output[2:]] == [
        ("c1", "weather", '{"city":"Ulm"}'),
        ("c2", "time", "{}"),
    ]
    assert all(item.status == "completed" for item in response.output)
    assert response.usage.output_tokens_details.reasoning_tokens == 2 and response.usage.input_tokens_details.cached_tokens == 4


@pytest.mark.parametrize("ending", [STOP, LENGTH])
def test_a_whole_answer_is_what_the_last_event_has(ending: Ending) -> None:
    written = new_format()
    text = "".join(written.whole(gathered(deltas_of(THINKS_AND_CALLS, ending), USAGE)))
    whole, last = Response.model_validate_json(text), streamed(THINKS_AND_CALLS, ending)[-1]
    assert whole.output == last.response.output and whole.status == last.response.status
    assert whole.status == ("completed" if ending is STOP else "incomplete")
    assert [item.status for item in whole.output] == ["completed"] * 3 + ["completed" if ending is STOP else "incomplete"]


@pytest.mark.parametrize(
    ("error", "code"),
    [(Unavailable("node-7 is gone"), "server_error"), (Overloaded("later", retry_after_s=1, reason="ttft"), "rate_limit_exceeded")],
)
def test_what_fails_ends_what_has_begun(error: Any, code: str) -> None:
    written = new_format()
    data = [*written.begin(), *written.delta(Delta(0, (Content("So far"),)), USAGE), *written.failed(error)]
    events = events_of(data)
    assert [event.type for event in events[-3:]] == ["response.output_item.done", "error", "response.failed"]
    response = events[-1].response
    assert response.status == "failed" and response.error.code == code and "node-7" not in response.error.message
    assert response.output_text == "So far" and response.output[0].status == "incomplete"


def test_what_is_given_out_can_be_given_back() -> None:
    """The items of an answer, sent as input, make the turn that they came from."""
    output = streamed(THINKS_AND_CALLS, STOP)[-1].response.output
    sent = json.loads(json.dumps([item.model_dump(mode="json", exclude_unset=True) for item in output]))
    results: list[Any] = [{"type": "function_call_output", "call_id": call_id, "output": call_id} for call_id in ("c1", "c2")]
    items = input_items([{"role": "user", "content": "Hi."}, *sent, *results, {"role": "developer", "content": "Stop."}])
    calls = (ToolCall("c1", "weather", '{"city":"Ulm"}'), ToolCall("c2", "time", "{}"))
    assert conversation_of(items) == [
        Message(Speaker.USER, "Hi."),
        Message(Speaker.ASSISTANT, "I look it up.", reasoning="It is far.", tool_calls=calls),
        Message(Speaker.TOOL, "c1", tool_call_id="c1", name="weather"),
        Message(Speaker.TOOL, "c2", tool_call_id="c2", name="time"),
        Message(Speaker.SYSTEM, "Stop."),
    ]


def test_an_items_id_says_whose_it_is() -> None:
    named = ItemIds("resp_ab12").named(input_items([{"role": "user", "content": "Hi."}, {"role": "user", "content": "Ho.", "id": "mine"}]))
    assert response_of(named[0]["id"]) == "resp_ab12" and named[1]["id"] == "mine"
    assert response_of("mine") is None and response_of("msg_x_y") is None
