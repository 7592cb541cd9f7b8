"""What one client may send to harm all others: `python -m benchmarks.hostile_attacks NAME URL GRPC_ADDRESS MODEL SECONDS` does so.

It prints one line when it begins to send, and how often each answer came at the end, as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx

from springtide.rpc import inference_pb2, inference_pb2_grpc
from springtide.rpc.channels import connect

CLIENTS = 4
WORK = "n = 32"
"""In the names of what the cluster takes on: one at a time."""
VOCABULARY = 49_152
HELD_CONNECTIONS = 1_200
_TIMEOUT_S = 120.0
PLAIN, CHAT = "/v1/completions", "/v1/chat/completions"

Body = Callable[[str], bytes]


def _completion(**fields: Any) -> Body:
    return lambda model: json.dumps({"model": model, "prompt": "Hi.", "max_tokens": 8, **fields}).encode()


def _repeated(before: str, unit: str, count: int, after: str) -> Body:
    """A body that would take the client long to build from objects."""
    return lambda model: (f'{{"model": "{model}", ' + before).encode() + unit.encode() * count + after.encode() + b"}"


def _words(num_bytes: int) -> str:
    return " ".join(f"word{number * 7919 % 99991}" for number in range(num_bytes // 9))


def _chat(count: int) -> Body:
    return _repeated('"messages": [', '{"role":"user","content":""},', count, '{"role":"user","content":""}]')


BODIES: dict[str, tuple[str, Body]] = {
    "a text of 10 MB": (PLAIN, lambda model: _completion(prompt=_words(10_000_000))(model)),
    "a text of 60 MB": (PLAIN, lambda model: _completion(prompt=_words(60_000_000))(model)),
    "the longest text that is tokenised": (PLAIN, lambda model: _completion(prompt=_words(600_000))(model)),
    "300,000 empty messages": (CHAT, _chat(300_000)),
    "8,000 empty messages": (CHAT, _chat(8_000)),
    "10 million stop_token_ids": (PLAIN, _repeated('"prompt": "Hi.", "stop_token_ids": [', "1,", 10_000_000, "1]")),
    "a prompt of 31 million ids": (PLAIN, _repeated('"prompt": [', "1,", 31_000_000, "1]")),
    "a prompt of 150,000 ids": (PLAIN, _repeated('"prompt": [', "40000,", 150_000, "1]")),
    "lists of nothing": (PLAIN, _repeated('"prompt": "Hi.", "x": [', "[],", 1_500_000, "1]")),
    "5 MB of numbers between quotes": (PLAIN, _repeated('"prompt": ["', '",1,"', 1_000_000, '"]')),
    "70,000 fields": (PLAIN, lambda model: json.dumps({"model": model, **{f"a{number}": 1 for number in range(70_000)}}).encode()),
    "a bias for each token, n = 32": (
        PLAIN,
        lambda model: _completion(n=32, max_tokens=64, ignore_eos=True, logit_bias={str(i): -0.5 for i in range(VOCABULARY)})(model),
    ),
    "n = 32 alone": (PLAIN, _completion(n=32, max_tokens=64, ignore_eos=True)),
    "stop strings that nearly come, n = 32": (
        PLAIN,
        # Token 97 is what comes each time, and what the stop strings begin with.
        _completion(n=32, max_tokens=400, ignore_eos=True, stop=["q" * 1000 + str(i) for i in range(16)], logit_bias={"97": 100}),
    ),
}


async def post_bodies(name: str, url: str, model: str, until: float, answers: Counter[str]) -> None:
    path, build = BODIES[name]
    raw = build(model)
    print("begins", flush=True)

    async def client() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S) as http:
            while time.monotonic() < until:
                with contextlib.suppress(httpx.TransportError):
                    answers["broken off"] += 1
                    reply = await http.post(path, content=raw, headers={"content-type": "application/json"})
                    answers["broken off"] -= 1
                    answers[str(reply.status_code)] += 1

    await asyncio.gather(*(client() for _ in range(1 if WORK in name else CLIENTS)))


def _pipelined(_: str) -> bytes:
    return b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 20_000


def _endless_headers(_: str) -> bytes:
    return b"GET /health HTTP/1.1\r\n" + b"".join(b"h%d: 1\r\n" % number for number in range(200_000))


def _endless_header(_: str) -> bytes:
    return b"GET /health HTTP/1.1\r\nx: " + b"a" * (32 << 20)


def _tiny_chunks(_: str) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"1\r\n \r\n" * 1_000_000


STREAMS: dict[str, Body] = {
    "20,000 requests in one go": _pipelined,
    "200,000 headers": _endless_headers,
    "a header of 32 MB": _endless_header,
    "a body of 1-byte chunks": _tiny_chunks,
}


async def send_bytes(name: str, url: str, until: float, answers: Counter[str]) -> None:
    raw = STREAMS[name]("")
    where = urlsplit(url)
    print("begins", flush=True)

    async def client() -> None:
        while time.monotonic() < until:
            answers["reset"] += 1
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(where.hostname, where.port)
                with contextlib.closing(writer):
                    taking = asyncio.create_task(reader.read(12))
                    writer.write(raw)
                    with contextlib.suppress(OSError):
                        await writer.drain()
                    with contextlib.suppress(TimeoutError):
                        answers[(await asyncio.wait_for(taking, 5.0))[9:].decode() or "closed"] += 1
                        answers["reset"] -= 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


_HALF_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
_HALF_BODY = _HALF_HEAD + b"content-type: application/json\r\ncontent-length: 1000\r\n\r\n{"
HELD: dict[str, tuple[bytes, bytes]] = {
    "1,200 idle connections": (b"", _HALF_HEAD),
    "1,200 bodies that stop in the middle": (_HALF_BODY, _HALF_BODY),
}
"""What each second connection sends, and what the others do."""


async def hold_connections(name: str, url: str, until: float, answers: Counter[str]) -> None:
    where = urlsplit(url)
    print("begins", flush=True)
    held: list[socket.socket] = []
    loop = asyncio.get_running_loop()
    for number in range(HELD_CONNECTIONS):
        connection = socket.socket()
        connection.setblocking(False)
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(loop.sock_connect(connection, (where.hostname, where.port)), 1.0)
            await loop.sock_sendall(connection, HELD[name][number % 2])
            answers["connected"] += 1
        held.append(connection)
    await asyncio.sleep(max(0.0, until - time.monotonic()))
    for connection in held:
        connection.close()


AT_ONCE = "gRPC: texts of 1.5 MB, 40 at once"
MESSAGES: dict[str, Callable[[str], inference_pb2.GenerateRequest]] = {
    "gRPC: 60 MB of ids": lambda model: inference_pb2.GenerateRequest(
        model=model, tokens=inference_pb2.TokenPrompt(token_ids=[1] * 60_000_000)
    ),
    "gRPC: 800,000 empty messages": lambda model: inference_pb2.GenerateRequest(
        model=model, chat=inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage()] * 800_000)
    ),
    "gRPC: a text of 10 MB": lambda model: inference_pb2.GenerateRequest(model=model, text=_words(10_000_000)),
    AT_ONCE: lambda model: inference_pb2.GenerateRequest(model=model, text=_words(1_500_000)),
}


async def call(name: str, address: str, model: str, until: float, answers: Counter[str]) -> None:
    request = MESSAGES[name](model)
    print("begins", flush=True)

    async def client() -> None:
        async with connect(address) as channel:
            await asyncio.gather(*(ask(inference_pb2_grpc.InferenceStub(channel)) for _ in range(10 if name == AT_ONCE else 1)))

    async def ask(stub: inference_pb2_grpc.InferenceStub) -> None:
        while time.monotonic() < until:
            try:
                [_ async for _ in stub.Generate(request, timeout=_TIMEOUT_S)]
                answers["OK"] += 1
            except grpc.aio.AioRpcError as error:
                answers[error.code().name] += 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


NAMES = (*BODIES, *STREAMS, *MESSAGES, *HELD)


async def main(name: str, url: str, address: str, model: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    answers: Counter[str] = Counter()
    attack: Coroutine[Any, Any, None]
    if name in BODIES:
        attack = post_bodies(name, url, model, until, answers)
    elif name in STREAMS:
        attack = send_bytes(name, url, until, answers)
    elif name in MESSAGES:
        attack = call(name, address, model, until, answers)
    else:
        attack = hold_connections(name, url, until, answers)
    await attack
    print(json.dumps(+answers), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=NAMES, metavar="name", help="; ".join(NAMES))
    for argument in ("url", "address", "model"):
        parser.add_argument(argument)
    parser.add_argument("seconds", type=float)
    asyncio.run(main(**vars(parser.parse_args())))
