"""OpenAI's files and batches over HTTP, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import httpx
import openai
import pytest
from gateway_cluster import MODEL, Cluster
from openai.types import Batch

from gateway.answer import TextAssembler
from gateway.app import GatewayServer
from gateway.batches import core
from gateway.openai import batches
from gateway.openai.batches import OpenAIBatches
from gateway.uploads import MOST_AT_ONCE, Uploads
from springtide.config import ServerConfig
from springtide.errors import Overloaded
from springtide.process import ProcessArguments
from tests.support.waiting import until

TEXT = "Hello, wörld! One two three four."


@pytest.fixture
async def client(arguments: ProcessArguments, cluster: Cluster, tmp_path: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    # A name of its own in Valkey: the others' batches are not this gateway's.
    server = ServerConfig(port=0, grpc_port=0, max_file_size=100_000, max_tenant_files_size=250_000)
    config = arguments.config.model_copy(update={"cluster": f"batches-{tmp_path.name}", "server": server})
    gateway = GatewayServer(replace(arguments, config=config), cluster.conductor.address)
    await gateway.start()
    async with openai.AsyncOpenAI(base_url=f"http://{gateway.http_address}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client
    await gateway.close()


def chat_line(custom_id: str, **body: Any) -> dict[str, Any]:
    whole = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": whole}


def jsonl(*lines: Any) -> bytes:
    return b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)


async def send(client: openai.AsyncOpenAI, content: bytes) -> str:
    return (await client.files.create(file=("lines.jsonl", content), purpose="batch")).id


async def submit(client: openai.AsyncOpenAI, content: bytes, endpoint: Any = "/v1/chat/completions") -> Batch:
    file_id = await send(client, content)
    return await client.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window="24h", metadata={"for": "tests"})


async def over(client: openai.AsyncOpenAI, batch_id: str) -> Batch:
    async def ended() -> Batch | None:
        batch = await client.batches.retrieve(batch_id)
        return batch if batch.status in ("completed", "failed", "expired", "cancelled") else None

    return await until(ended, within_s=60)


async def rows(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    content = await client.files.content(file_id)
    return [json.loads(line) for line in content.text.splitlines()]


# ---- files ----


async def test_a_file_is_kept_as_it_was_sent_until_it_is_deleted(client: openai.AsyncOpenAI) -> None:
    content = bytes(range(256)) * 300
    made = await client.files.create(file=("some lines.jsonl", content), purpose="batch")
    assert (made.object, made.bytes, made.filename, made.purpose, made.status) == ("file", 76_800, "some lines.jsonl", "batch", "processed")
    assert await client.files.retrieve(made.id) == made
    assert (await client.files.content(made.id)).content == content
    assert [file.id async for file in client.files.list()] == [made.id]
    assert (await client.files.delete(made.id)).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            await call(made.id)


async def test_files_are_listed_page_by_page(client: openai.AsyncOpenAI) -> None:
    made = [await send(client, b"%d" % i) for i in range(5)]
    assert [file.id async for file in client.files.list(limit=2, order="asc")] == made
    assert (await client.files.list(limit=2, order="asc", after=made[1])).data[0].id == made[2]
    assert (await client.files.list(purpose="batch_output")).data == []
    for pages in (client.files.list(after="file-of-none"), client.batches.list(after="batch-of-none")):
        with pytest.raises(openai.BadRequestError, match="-of-none") as caught:
            await pages
        assert caught.value.param == "after"


async def test_files_can_be_deleted_while_they_are_listed(client: openai.AsyncOpenAI) -> None:
    made = [await send(client, b"%d" % i) for i in range(5)]
    listed = [file.id async for file in client.files.list(limit=2) if (await client.files.delete(file.id)).deleted]
    assert listed == made[::-1] and (await client.files.list()).data == []


async def test_pages_are_filled_with_files_of_the_purpose_that_is_asked_for(client: openai.AsyncOpenAI) -> None:
    done = await over(client, (await submit(client, jsonl(chat_line("a")))).id)
    newer = [await send(client, b"%d" % i) for i in range(4)]
    page = await client.files.list(purpose="batch_output", limit=2)
    assert [file.id for file in page.data] == [done.output_file_id] and not page.has_more
    assert [file.id async for file in client.files.list(purpose="batch", limit=2, order="asc")] == [done.input_file_id, *newer]


async def test_a_file_larger_than_it_may_be_is_refused_and_leaves_nothing(client: openai.AsyncOpenAI, tmp_path: Path) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await send(client, bytes(100_001))
    assert caught.value.status_code == 413 and caught.value.code == "file_too_large"
    await send(client, bytes(100_000))
    await send(client, bytes(100_000))
    with pytest.raises(openai.APIStatusError) as caught:
        await send(client, bytes(100_000))
    assert caught.value.status_code == 413
    kept = (await client.files.list()).data
    assert len(kept) == 2 and {path.name for path in (tmp_path / "files" / "files").iterdir()} == {file.id for file in kept}
    await client.files.delete(kept[0].id)
    await send(client, bytes(100_000))


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"files": {"file": b"x"}}, "purpose"),
        ({"files": {"file": b"x"}, "data": {"purpose": "fine-tune"}}, "purpose"),
        ({"files": {"file": b"x"}, "data": {"purpose": "batch", "expires_after[seconds]": "3600"}}, "expires_after[seconds]"),
        ({"files": {"document": b"x"}, "data": {"purpose": "batch"}}, "document"),
        ({"files": {"nothing": (None, "")}, "data": {"purpose": "batch"}}, "nothing"),
        ({"files": {"purpose": (None, "batch")}}, "file"),
        ({"files": {"file": b"x"}, "data": {"purpose": "b" * 5000}}, "purpose"),
        ({"json": {}}, None),
    ],
)
async def test_a_form_that_is_not_right_is_refused_by_field(client: openai.AsyncOpenAI, form: dict[str, Any], param: str | None) -> None:
    async with httpx.AsyncClient(base_url=str(client.base_url)) as http:
        answer = await http.post("files", **form)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert (await client.files.list()).data == []


async def test_forms_that_are_none_keep_no_others_out(client: openai.AsyncOpenAI) -> None:
    async with httpx.AsyncClient(base_url=str(client.base_url)) as http:
        for _ in range(40):
            assert (await http.post("files", json={"purpose": "batch"})).status_code == 400
    assert await send(client, jsonl(chat_line("a")))


async def test_a_form_that_goes_on_after_its_end_is_refused(client: openai.AsyncOpenAI) -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nabc\r\n--b--\r\n' + bytes(1 << 20)
    async with httpx.AsyncClient(base_url=str(client.base_url)) as http:
        answer = await http.post("files", content=body, headers={"content-type": "multipart/form-data; boundary=b"})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "invalid_form" and "362144 bytes" in error["message"]


async def test_a_tenant_that_sends_many_files_slowly_leaves_places_to_others() -> None:
    uploads, going_on = Uploads(1000), asyncio.Event()

    class Slow:
        headers: ClassVar = {"content-type": "multipart/form-data; boundary=b"}

        async def stream(self) -> AsyncIterator[bytes]:
            await going_on.wait()
            yield b"--b--"

    async def send_one(tenant: str) -> str:
        try:
            await uploads.receive(Slow(), tenant, "file", cast("Any", None))  # type: ignore[arg-type]
        except Overloaded:
            return "overloaded"
        except AttributeError:
            return "no form"
        return "received"

    slow = [asyncio.create_task(send_one("slow")) for _ in range(MOST_AT_ONCE)]
    others = [asyncio.create_task(send_one(f"other-{number}")) for number in range(MOST_AT_ONCE // 2 + 1)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    going_on.set()
    refused = [await task == "overloaded" for task in (*slow, *others)]
    half = MOST_AT_ONCE // 2
    assert refused == [False] * half + [True] * half + [False] * half + [True], "half of the places are for others"
    assert await send_one("slow") != "overloaded"


async def test_a_form_that_breaks_off_is_no_file(client: openai.AsyncOpenAI, tmp_path: Path) -> None:
    async with httpx.AsyncClient(base_url=str(client.base_url)) as http:
        body = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\nContent-Disposition: form-data; name="file"; '
        body += b'filename="x"\r\n\r\n' + bytes(70_000)
        answer = await http.post("files", content=body, headers={"content-type": "multipart/form-data; boundary=b"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_form"
    assert list((tmp_path / "files" / "files").iterdir()) == []


# ---- batches ----


async def test_every_line_of_a_batch_has_its_answer_in_idle_capacity(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    batch = await submit(client, jsonl(*(chat_line(f"q-{i}") for i in range(50))))
    assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", "/v1/chat/completions")
    assert batch.expires_at == batch.created_at + 86_400 and batch.metadata == {"for": "tests"}
    done = await over(client, batch.id)
    assert done.status == "completed" and done.error_file_id is None
    assert done.request_counts is not None and done.request_counts.to_dict() == {"total": 50, "completed": 50, "failed": 0}
    answers = await rows(client, done.output_file_id)
    assert [row["custom_id"] for row in answers] == [f"q-{i}" for i in range(50)]
    assert {row["response"]["body"]["choices"][0]["message"]["content"] for row in answers} == {TEXT}
    assert {row["response"]["status_code"] for row in answers} == {200} and {row["error"] for row in answers} == {None}
    assert len({row["id"] for row in answers}) == len({row["response"]["request_id"] for row in answers}) == 50
    assert all(request.terms.idle for request in cluster.conductor.requests)


async def test_completions_and_responses_have_batches_too(client: openai.AsyncOpenAI) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, "prompt": "Hi", "max_tokens": 20}}
    done = await over(client, (await submit(client, jsonl(line), "/v1/completions")).id)
    assert (await rows(client, done.output_file_id))[0]["response"]["body"]["choices"][0]["text"] == TEXT
    line = {"custom_id": "b", "method": "POST", "url": "/v1/responses", "body": {"model": MODEL, "input": "Hi"}}
    done = await over(client, (await submit(client, jsonl(line), "/v1/responses")).id)
    (row,) = await rows(client, done.output_file_id)
    assert row["response"]["body"]["output"][0]["content"][0]["text"] == TEXT
    kept = await client.responses.retrieve(row["response"]["body"]["id"])
    assert kept.output_text == TEXT


async def test_lines_that_cannot_be_answered_are_errors_beside_the_others(client: openai.AsyncOpenAI) -> None:
    lines = [chat_line("good"), chat_line("hot", temperature=9), chat_line("other", model="gpt-4"), chat_line("piped", stream=True)]
    done = await over(client, (await submit(client, jsonl(*lines))).id)
    assert (
        done.status == "completed"
        and done.request_counts is not None
        and (done.request_counts.completed, done.request_counts.failed) == (1, 3)
    )
    assert [row["custom_id"] for row in await rows(client, done.output_file_id)] == ["good"]
    told = {row["custom_id"]: row["response"] for row in await rows(client, done.error_file_id)}
    assert {name: response["status_code"] for name, response in told.items()} == {"hot": 400, "other": 404, "piped": 400}
    assert [told[name]["body"]["error"]["param"] for name in ("hot", "piped")] == ["temperature", "stream"]


@pytest.mark.parametrize(
    ("content", "errors"),
    [
        (b"", []),
        (b"\n \n", [("empty_file", None)]),
        (jsonl(chat_line("a"), b"\n", chat_line("a")), [("duplicate_custom_id", 3)]),
        (jsonl(b"no json\n", chat_line("a"), b"[1]\n"), [("invalid_json_line", 1), ("invalid_json_line", 3)]),
        (jsonl({**chat_line("a"), "url": "/v1/completions"}), [("mismatched_endpoint", 1)]),
        (jsonl({**chat_line("a"), "method": "GET"}), [("invalid_method", 1)]),
        (
            jsonl({**chat_line("a"), "custom_id": 7}, {**chat_line("a"), "custom_id": ""}),
            [("invalid_custom_id", 1), ("invalid_custom_id", 2)],
        ),
        (jsonl({"custom_id": "a"}), [("missing_required_parameter", 1)]),
        (jsonl({**chat_line("a"), "extra": 1}), [("unknown_parameter", 1)]),
        (
            jsonl(chat_line("a"), chat_line("b", user="\ud83d"), chat_line("c", **{"\ud83d": 1})),
            [("invalid_json_line", 2), ("invalid_json_line", 3)],
        ),
    ],
)
async def test_a_file_with_lines_that_are_none_fails_and_says_which(
    client: openai.AsyncOpenAI, cluster: Cluster, content: bytes, errors: list[tuple[str, int | None]]
) -> None:
    if not content:
        with pytest.raises(openai.BadRequestError, match="file"):
            await submit(client, content)
        return
    done = await over(client, (await submit(client, content)).id)
    assert done.status == "failed" and done.errors is not None and done.errors.data is not None
    assert [(error.code, error.line) for error in done.errors.data] == errors
    assert cluster.conductor.requests == []


async def test_what_is_asked_for_wrongly_is_refused_by_name(client: openai.AsyncOpenAI) -> None:
    file_id = await send(client, jsonl(chat_line("a")))
    good: dict[str, Any] = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    for change, param in [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"metadata": {"a": 5}}, "metadata.a"),
    ]:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.batches.create(**{**good, **change})
        assert caught.value.param == param
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.batches.create(**{**good, "input_file_id": "file-of-nobody"})
    assert unknown.value.param == "input_file_id"
    with pytest.raises(openai.NotFoundError):
        await client.batches.retrieve("batch-of-nobody")


async def test_one_that_is_cancelled_keeps_what_was_answered(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    batch = await submit(client, jsonl(*(chat_line(f"q-{i}") for i in range(10))))
    done = await over(client, batch.id)
    assert done.status == "completed"
    with pytest.raises(openai.ConflictError):
        await client.batches.cancel(batch.id)
    for node in cluster.nodes.values():
        node.pause_at = 0
    batch = await submit(client, jsonl(*(chat_line(f"q-{i}") for i in range(40))))
    await until(lambda: any(node.running for node in cluster.nodes.values()))
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    done = await over(client, batch.id)
    assert done.status == "cancelled" and done.cancelled_at is not None and done.request_counts is not None
    assert done.request_counts.completed == 0 and done.output_file_id is None
    await until(lambda: not any(node.running for node in cluster.nodes.values()))


async def test_lines_that_are_not_answered_in_time_say_so(
    client: openai.AsyncOpenAI, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(batches._UNITS_S, "m", 1)
    for node in cluster.nodes.values():
        node.pause_at = 0
    file_id = await send(client, jsonl(*(chat_line(f"q-{i}") for i in range(3))))
    batch = await client.batches.create(input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="1m")
    done = await over(client, batch.id)
    assert done.status == "expired" and done.expired_at is not None and done.output_file_id is None
    assert done.request_counts is not None and done.request_counts.to_dict() == {"total": 3, "completed": 0, "failed": 3}
    told = await rows(client, done.error_file_id)
    assert [(row["custom_id"], row["response"], row["error"]["code"]) for row in told] == [
        (f"q-{i}", None, "batch_expired") for i in range(3)
    ]
    assert told[0]["error"]["message"].endswith("within 1m")
    await until(lambda: cluster.idle)


@pytest.mark.parametrize("failures", [2, 9])
async def test_a_line_that_fails_for_an_internal_error_is_tried_some_times(
    client: openai.AsyncOpenAI, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    monkeypatch.setattr(core, "FIRST_PAUSE_S", 0.01)
    push = TextAssembler.push

    def broken(assembler: TextAssembler, tokens: Any) -> Any:
        if len(cluster.attempts_on("prefill-0")) <= failures:
            raise ValueError("no words for it")
        return push(assembler, tokens)

    monkeypatch.setattr(TextAssembler, "push", broken)
    done = await over(client, (await submit(client, jsonl(chat_line("a")))).id)
    passes = failures < 5
    assert done.status == "completed" and len(cluster.attempts_on("prefill-0")) == (failures + 1 if passes else 5)
    [row] = await rows(client, done.output_file_id if passes else done.error_file_id)
    assert row["response"]["status_code"] == (200 if passes else 500)


async def test_a_line_of_which_nobody_has_foreseen_what_comes_is_tried_some_times(
    client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds its batch up no longer than another internal error."""
    monkeypatch.setattr(core, "FIRST_PAUSE_S", 0.01)
    tries = []

    async def unforeseen(*arguments: Any) -> str:
        tries.append(arguments)
        raise ZeroDivisionError

    monkeypatch.setattr(OpenAIBatches, "_answered", unforeseen)
    done = await over(client, (await submit(client, jsonl(chat_line("a")))).id)
    [row] = await rows(client, done.error_file_id)
    assert len(tries) == 5 and row["response"]["status_code"] == 500 and row["response"]["body"]["error"]["code"] == "internal_error"


async def test_an_input_that_is_deleted_is_answered_all_the_same(client: openai.AsyncOpenAI) -> None:
    batch = await submit(client, jsonl(*(chat_line(f"q-{i}") for i in range(20))))
    await client.files.delete(batch.input_file_id)
    assert (await over(client, batch.id)).status == "completed"


async def test_tenants_know_nothing_of_each_other(client: openai.AsyncOpenAI) -> None:
    first, second = (client.with_options(default_headers={"X-Springtide-Tenant": name}) for name in ("first", "second"))
    batch = await submit(first, jsonl(chat_line("a")))
    done = await over(first, batch.id)
    assert [one.id async for one in second.batches.list()] == [] and [one.id async for one in second.files.list()] == []
    for wrong in (
        second.batches.retrieve(batch.id),
        second.batches.cancel(batch.id),
        second.files.content(done.output_file_id or ""),
        second.files.delete(batch.input_file_id),
        second.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            await wrong
    assert [one.id async for one in first.batches.list()] == [batch.id]
