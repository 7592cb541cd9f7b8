"""What is around bodies: any header, any name in a path and in a query, any form with a file. Never a failure of ours, and nothing of it
stays."""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.parse
from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest
import redis.asyncio as redis
from gateway_cluster import MODEL, Cluster
from gateway_fuzzing import TIMEOUT_S, Judge, assert_nothing_stays, sampled

from gateway.accounts.allowance import ApiKey, digest_of, new_key, new_key_id
from gateway.accounts.register import Register
from gateway.app import GatewayServer
from springtide.ids import new_id
from springtide.process import ProcessArguments
from tests.support.waiting import until

TALK = [{"role": "user", "content": "Say it."}]
BODIES = {
    "/v1/chat/completions": {"model": MODEL, "messages": TALK},
    "/v1/completions": {"model": MODEL, "prompt": "Say it."},
    "/v1/messages": {"model": MODEL, "messages": TALK, "max_tokens": 8},
    "/v1/responses": {"model": MODEL, "input": "Say it."},
    f"/v1beta/models/{MODEL}:generateContent": {"contents": [{"parts": [{"text": "Say it."}]}]},
    "/tokenize": {"model": MODEL, "prompt": "Say it."},
}


def words(text: str) -> list[str]:
    return text.split()


HEADERS = {
    "authorization": [b"Bearer", b"Bearer x", b"Basic eDp5", b"Bearer \xff", b"Bearer x y"],
    "x-api-key": [b"sk-1"],
    "x-goog-api-key": [b"sk-1"],
    "x-springtide-tenant": [b"t" * 256, b"t" * 257, b"a:b", b"a b", b"..", b"*"],
    "x-request-id": [b"abc", b"r" * 129, b"a b"],
    "traceparent": [b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01", b"00-x"],
    "content-type": [b"text/plain", b"application/json; charset=utf-16", b"multipart/form-data", b"application/jsonx", b"a/b; boundary="],
    "content-encoding": [b"gzip", b"identity", b"br, gzip"],
    "accept": [b"text/event-stream", b"*/*;q=x"],
    "accept-encoding": [b"gzip;q=0", b"gzip;q=x", b"*", b"gzip, gzip", b"identity;q=0"],
    "x-msh-context-cache": [b"cache-1", b"mark-1"],
    "x-msh-context-cache-reset-ttl": [b"60", b"99999999999999999999", b"1e3"],
    "x-msh-context-cache-dryrun": [b"1", b"2"],
    "anthropic-version": [b"2023-06-01"],
    "anthropic-beta": [b"a,b"],
    "origin": [b"null", b"http://x.y"],
    "access-control-request-method": [b"POST"],
    "range": [b"bytes=0-1"],
    "cookie": [b"a=b; c"],
    "host": [b"a b", b"[::1", b"x:99999"],
    "connection": [b"close", b"upgrade"],
    "upgrade": [b"websocket", b"h2c"],
    "expect": [b"100-continue", b"200-ok"],
    "x-forwarded-for": [b"::1"],
    "content-length": [b"-1", b"0x1", b"1, 1", b"18446744073709551616"],
    "transfer-encoding": [b"gzip", b"identity"],
}
ANYWHERE = [b"", b"x", b"0", b"-1", b"null", b"\xff\xfe", "é🙂".encode(), b"\x01", b"a\tb", b'"', b"a,,b;c=d", b"%00", b"z" * 9000]
"""Values of any header."""


CREDENTIALS = ("authorization", "x-api-key", "x-goog-api-key")


def fuzz_headers(host: str, judge: Judge, key: str = "") -> None:
    """Each with a request of some API, on a connection of its own. With a key every request has it, save those whose header is one in which
    keys come: they are strangers'."""
    requests = [
        *(("POST", path, json.dumps(body).encode()) for path, body in BODIES.items()),
        ("GET", "/v1/models", b""),
        ("GET", "/v1/files", b""),
    ]
    cases = [(*request, name, value) for request in requests for name, own in HEADERS.items() for value in [*own, *ANYWHERE]]
    for method, path, body, name, value in sampled(cases, "headers"):
        connection = http.client.HTTPConnection(host, timeout=TIMEOUT_S)
        connection.putrequest(method, path, skip_host=name == "host", skip_accept_encoding=True)
        known = {"authorization": b"Bearer " + key.encode()} if key else {}
        said = {**known, "content-type": b"application/json", "content-length": b"%d" % len(body), name: value}
        if name in CREDENTIALS[1:]:
            said.pop("authorization", None)
        for each in said.items():
            connection.putheader(*each)
        connection.endheaders(body)
        what = f"{method} {path} {name}: {value[:60]!r}"
        try:
            reply = connection.getresponse()
            judge.take(what, reply.status, reply.read())
            if key and name in CREDENTIALS and reply.status not in (400, 401):
                judge.failures.append(f"{what}: {reply.status}, and nobody knows who that is")
        except http.client.HTTPException as error:
            judge.failures.append(f"{what}: {error!r}")
        finally:
            connection.close()


NAMES = [
    *words("x .. . * - %00 %ff %0a %2e%2e%2f.. a%2fb a%20b %F0%9F%99%82 %ed%a0%80 %zz % : x:y ; a;b=c [1] {id} %25 + null"),
    *words("file-..%2f..%2fx batch_x cache-x mark-x resp_x mark-%00"),
    "a" * 3000,
]
KINDS = ("files", "batches", "responses", "caching", "models")
OPERATIONS = [
    *(("GET", f"/v1/{kind}/{{}}{rest}") for kind in KINDS for rest in ("", "/content", "/x")),
    *(("DELETE", f"/v1/{kind}/{{}}") for kind in (*KINDS, "caching/refs/tags")),
    *(("POST", f"/v1/{kind}/{{}}/cancel") for kind in KINDS),
    *(("GET", f"/{path}") for path in ("v1/responses/{}/input_items", "v1/caching/refs/tags/{}", "v1/caching/refs/tags/{}/content")),
    *((method, "/v1beta/cachedContents/{}") for method in ("GET", "PATCH", "DELETE")),
    *((method, "/v1beta/models/{}") for method in ("GET", "POST")),
    *(("POST", "/v1beta/models/{}:generateContent"), ("PUT", "/v1/caching/{}"), ("POST", "/v1/chat/{}")),
    *(("GET", "/{}"), ("GET", "/v1/{}")),
]
LISTS = ["/v1/files", "/v1/batches", "/v1/caching", "/v1/caching/refs/tags", "/v1beta/cachedContents", "/v1beta/models", "/v1/models"]
FIELDS = ["", *words("limit after before order purpose pageSize pageToken metadata[a] metadata[] stream alt x")]
VALUES = ["", *words("1 0 -1 1.5 99999999999999999999 desc x %00 %ff %ed%a0%80 é true % 1&1"), "a" * 3000]
QUERIES = [
    *(f"{name}={value}" for name in FIELDS for value in VALUES),
    *words("&&& = ? limit limit=1&limit=x after=x&before=y ; limit=1;order=asc % []=1 limit=%EF%BC%91 limit=²"),
]


def fuzz_names(host: str, judge: Judge) -> None:
    named = [(method, path.format(name)) for method, path in OPERATIONS for name in NAMES]
    asked = [("GET", f"{path}?{query}") for path in [*LISTS, "/v1/responses/x", "/v1/responses/x/input_items"] for query in QUERIES]
    for method, path in [*sampled(named, "names"), *sampled(asked, "queries")]:
        connection = http.client.HTTPConnection(host, timeout=TIMEOUT_S)
        body = b"{}" if method in ("POST", "PUT", "PATCH") else b""
        connection.putrequest(method, urllib.parse.quote(path, safe="/?&=%:;[]{}+*"))
        for name, value in (("content-type", "application/json"), ("content-length", str(len(body)))):
            connection.putheader(name, value)
        connection.endheaders(body)
        reply = connection.getresponse()
        judge.take(f"{method} {path[:120]}", reply.status, reply.read())
        connection.close()


def form(*parts: bytes, end: bytes = b"--b--\r\n") -> bytes:
    return b"".join(b"--b\r\n%s\r\n" % part for part in parts) + end


def part(name: bytes, content: bytes, *, file: bytes = b"", headers: bytes = b"") -> bytes:
    file_name = b'; filename="%s"' % file if file else b""
    return b'content-disposition: form-data; name="%s"%s\r\n%s\r\n%s' % (name, file_name, headers, content)


PURPOSE, LINES = part(b"purpose", b"batch"), part(b"file", b"{}\n", file=b"a.jsonl")
WHOLE = form(PURPOSE, LINES)
OTHER_NAMES = [b"../../x", b"\xff\xfe", b"a" * 9000, b"\\", b'a\\"b', b"\x01", "é🙂".encode()]
FORMS = [
    *(WHOLE, form(LINES, PURPOSE), form(PURPOSE, LINES, LINES), form(PURPOSE, PURPOSE, LINES), form(), form(PURPOSE), form(LINES)),
    *(b"", b"--b--", b"--b", form(PURPOSE, LINES, end=b""), WHOLE[:-20], WHOLE + b"x", b"x" + WHOLE),
    *(form(PURPOSE, part(b"file", b"{}", file=name)) for name in OTHER_NAMES),
    *(form(part(name, b"batch"), LINES) for name in (b"", b"\xff", b"purpose[]", b"p" * 9000)),
    *(form(part(b"purpose", value), LINES) for value in (b"", b"\xff", b"BATCH", b"batch\r\n", b"b" * 9000, b"batch\x00")),
    *(form(PURPOSE, part(b"file", b"{}", file=b"a", headers=more)) for more in (b"x: y\r\n" * 300, b"x: %s\r\n" % (b"y" * 9000), b":\r\n")),
    *(form(PURPOSE, part(b"expires_after[anchor]", value), LINES) for value in (b"created_at", b"x", b"")),
    *(form(PURPOSE, part(b"expires_after[seconds]", value), LINES) for value in (b"3600", b"-1", b"1e9", b"x")),
    *(form(b"%s\r\n\r\nx" % head, LINES) for head in (b"", b"x: y", b"content-disposition: form-data", b"content-disposition: x")),
    form(*[part(b"p%d" % number, b"") for number in range(2000)]),
]
FORM_TYPE = "multipart/form-data; boundary="
FORM_TYPES = [
    *[f"{FORM_TYPE}b"] * 4,
    *(f"{FORM_TYPE}{boundary}" for boundary in ("", '"b"', "b" * 300, "b; boundary=c", "b c")),
    *("multipart/form-data", "multipart/mixed; boundary=b", "application/x-www-form-urlencoded", FORM_TYPE.title() + "b"),
]


def fuzz_files(url: str, judge: Judge) -> None:
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        for content, kind in sampled([(content, kind) for content in FORMS for kind in FORM_TYPES], "files"):
            reply = client.post("/v1/files", content=content, headers={"content-type": kind})
            judge.take(f"{kind[:60]} {content[:300]!r}", reply.status_code, reply.content)
            if reply.status_code == 200:
                read = client.get(f"/v1/files/{reply.json()['id']}/content")
                judge.take(f"the content of {kind[:60]} {content[:300]!r}", read.status_code, read.content)


@pytest.mark.parametrize("fuzz", [fuzz_headers, fuzz_names])
async def test_any_header_and_any_name(gateway: GatewayServer, cluster: Cluster, fuzz: Callable[[str, Judge], None]) -> None:
    judge = Judge()
    await asyncio.to_thread(fuzz, gateway.http_address, judge)
    judge.done()
    await assert_nothing_stays(gateway, cluster)


async def test_any_header_where_only_keys_are_let_in(arguments: ProcessArguments, cluster: Cluster, valkey_url: str) -> None:
    config, key = arguments.config.model_copy(update={"cluster": new_id("cluster")}), new_key()
    async with redis.Redis.from_url(valkey_url) as client:
        await Register(client, config.cluster).add_key(digest_of(key), ApiKey(new_key_id(), "acme"))
    gateway = GatewayServer(replace(arguments, config=config), cluster.conductor.address)
    await gateway.start()
    try:
        judge = Judge()
        await asyncio.to_thread(fuzz_headers, gateway.http_address, judge, key)
        judge.done()
        assert judge.statuses[401] > 5 and judge.statuses[200] > 5
    finally:
        await gateway.close()
    await until(lambda: cluster.idle)


async def test_any_form_of_a_file(gateway: GatewayServer, cluster: Cluster) -> None:
    judge = Judge()
    await asyncio.to_thread(fuzz_files, f"http://{gateway.http_address}", judge)
    judge.done()
    await assert_nothing_stays(gateway, cluster)
