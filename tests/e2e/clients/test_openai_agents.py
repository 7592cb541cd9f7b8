"""OpenAI's agents, unmodified: a tool is called and its result used, streams are followed, and a conversation goes on from a response."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.support.cluster import Cluster

CLIENTS = os.environ.get("CLIENTS", "")
pytestmark = pytest.mark.skipif(not CLIENTS, reason="wants an environment of its own: make test-clients")
ASK = """
import asyncio, json, sys
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel
from typing import Literal

set_tracing_disabled(True)
url, name = sys.argv[1:]
calls = []

class Sure(BaseModel):
    "So short that the model comes to an end."
    sure: Literal["yes", "no"]

@function_tool
def add(first: int, second: int) -> str:
    "Adds two whole numbers."
    calls.append((first, second))
    return "the sum is known"

async def main():
    model = OpenAIResponsesModel(model=name, openai_client=AsyncOpenAI(base_url=url, api_key="none", max_retries=0))
    once = ModelSettings(tool_choice="required", temperature=0, max_tokens=400)
    agent = Agent(name="adder", instructions="You add numbers by your tool.", tools=[add], model=model,
                  model_settings=once, tool_use_behavior="stop_on_first_tool")
    said = await Runner.run(agent, "What is 2 and 3?", max_turns=4)
    streamed = Runner.run_streamed(agent, "What is 4 and 5?", max_turns=4)
    kinds = [event.type async for event in streamed.stream_events()]
    plain = Agent(name="plain", output_type=Sure, model=model, model_settings=ModelSettings(temperature=0, max_tokens=100))
    further = await Runner.run(plain, "Thank you.", previous_response_id=said.last_response_id)
    alone = await Runner.run(plain, "Thank you.")
    print(json.dumps({
        "calls": calls, "said": said.final_output, "streamed": streamed.final_output, "kinds": sorted(set(kinds)),
        "items": [item.type for item in said.new_items], "further": further.final_output.sure,
        "prompt": [alone.raw_responses[-1].usage.input_tokens, further.raw_responses[-1].usage.input_tokens],
    }))

asyncio.run(main())
"""


def test_an_agent_calls_its_tool_streams_and_goes_on(cluster: Cluster) -> None:
    command = [f"{CLIENTS}/bin/python", "-c", ASK, f"{cluster.url}/v1", cluster.model]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert len(told["calls"]) >= 2 and all(isinstance(number, int) for call in told["calls"] for number in call)
    assert 0 < told["items"].count("tool_call_item") == told["items"].count("tool_call_output_item")
    assert told["said"] == told["streamed"] == "the sum is known" and told["further"] in ("yes", "no")
    assert {"raw_response_event", "run_item_stream_event"} <= set(told["kinds"])
    assert told["prompt"][1] > told["prompt"][0], "the conversation before it is in the prompt"
