"""OpenAI's client for Node.js, unmodified, against a running cluster. It is installed for the test, where node and npm are on the PATH."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster

NODE, NPM = shutil.which("node"), shutil.which("npm")
pytestmark = pytest.mark.skipif(not (NODE and NPM), reason="wants node and npm on the PATH")
PACKAGES = ("openai@6", "zod@4")
SCRIPT = Path(__file__).with_name("node_client.mjs")
Done = Callable[[str], Any]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("node")
    command = [str(NPM), "install", "--no-audit", "--no-fund", "--prefix", str(directory), *PACKAGES]
    install = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    if install.returncode:
        pytest.skip(f"npm could not install {' and '.join(PACKAGES)}: {install.stderr.strip()[-300:]}")
    shutil.copy(SCRIPT, directory)
    return directory


@pytest.fixture(scope="module")
def done(cluster: Cluster, installed: Path) -> Done:
    """What came of a case of the script."""

    def run(case: str) -> Any:
        command = [str(NODE), str(installed / SCRIPT.name), f"{cluster.url}/v1", cluster.model, case]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    return run


def test_the_model_is_listed(cluster: Cluster, done: Done) -> None:
    assert done("models") == {"listed": [cluster.model], "retrieved": cluster.model}


def test_a_stream_says_what_the_whole_answer_says(done: Done) -> None:
    seen = done("chat")
    assert seen["whole"]["message"]["content"] == seen["stream"]["text"] != ""
    assert seen["stream"]["finish"] == seen["whole"]["finish_reason"]
    assert seen["stream"]["usage"]["completion_tokens"] == seen["usage"]["completion_tokens"]
    helped = done("helper")
    assert helped["final"] == helped["text_at_the_end"] == seen["stream"]["text"]


def test_functions_are_run_until_the_loop_ends(done: Done) -> None:
    seen = done("tools")
    assert seen["seen"] == [["user", "assistant", "tool", "assistant", "tool"]] * 2
    assert len(seen["asked"]) == 4 and set(seen["asked"]) <= {"Oslo", "Rome"}
    assert seen["told"]


def test_responses_are_streamed_and_stored(done: Done) -> None:
    seen = done("responses")
    assert seen["whole"] == seen["text"] == seen["final"] == seen["kept"] != "" != seen["next"]


def test_answers_are_what_zod_describes(done: Done) -> None:
    seen = done("parsed")
    for person in (seen["chat"], seen["response"]):
        assert person["mood"] in ("good", "bad") and len(person["name"]) <= 20


def test_streams_that_are_left_free_what_they_held(cluster: Cluster, done: Done) -> None:
    seen = done("aborted")
    # Of a stream of 4,000: what the client had read with the third chunk when it aborted, it still hands out.
    assert seen["chunks"] == 3 <= seen["more"] < 100
    for store in ("instance-0-store", "instance-1-store"):
        cluster.wait_metric(store, "springtide_store_slots", lambda slots: slots == 0, labels={"state": "in_use"})


def test_a_batch_is_sent_and_fetched(done: Done) -> None:
    seen = done("batches")
    assert seen["file"]["id"] in seen["listed"] and seen["deleted"]
    assert seen["batch"]["status"] == "completed" and seen["batch"]["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert {answer["custom_id"] for answer in seen["answers"]} == {"line-0", "line-1", "line-2"}
    assert all(answer["response"]["body"]["choices"][0]["message"]["content"] for answer in seen["answers"])


def test_a_bad_field_is_named(done: Done) -> None:
    seen = done("refused")
    assert seen["bad"] and seen["status"] == 400 and seen["param"] == "colour" and seen["id"] and "colour" in seen["said"]
