"""`instructor`, unmodified, gets what pydantic describes, from a small model that would not have kept to it by itself."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.support.cluster import Cluster

CLIENTS = os.environ.get("CLIENTS", "")
pytestmark = pytest.mark.skipif(not CLIENTS, reason="wants an environment of its own: make test-clients")
ASK = """
import json, sys
from enum import Enum
from typing import Annotated
import instructor, openai
from pydantic import BaseModel, Field

class Kind(Enum):
    CAT = "cat"
    DOG = "dog"

class Owner(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=18, le=99)

class Pet(BaseModel):
    kind: Kind
    names: list[Annotated[str, Field(max_length=20)]] = Field(min_length=1, max_length=2)
    owner: Owner

url, model, mode = sys.argv[1:]
client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none", max_retries=0), mode=instructor.Mode[mode])
messages = [{"role": "user", "content": "Ann, who is 30, has a dog that she calls Rex."}]
pet = client.chat.completions.create(
    model=model, messages=messages, response_model=Pet, max_retries=0, temperature=1.0, seed=3, max_tokens=400
)
print(json.dumps(pet.model_dump(mode="json")))
"""


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_answers_are_what_their_description_asks_for(cluster: Cluster, mode: str) -> None:
    command = [f"{CLIENTS}/bin/python", "-c", ASK, f"{cluster.url}/v1", cluster.model, mode]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    pet = json.loads(run.stdout)
    assert pet["kind"] in ("cat", "dog") and 1 <= len(pet["names"]) <= 2 and 18 <= pet["owner"]["age"] <= 99
