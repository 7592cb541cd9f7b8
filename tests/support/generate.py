"""Requests over the gateway's gRPC API, which speaks token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event

import grpc

from springtide.rpc import common_pb2, inference_pb2, inference_pb2_grpc


@dataclass(frozen=True, slots=True)
class Generated:
    token_ids: list[int]
    text: str
    finish_reason: common_pb2.FinishReason
    prompt_tokens: int
    cached_tokens: int


def generate(
    grpc_address: str,
    model: str,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    sampling: common_pb2.SamplingParams | None = None,
    on_token: Callable[[int], None] | None = None,
    until: Event | None = None,
    timeout_s: float = 120.0,
) -> Generated:
    """Greedy unless `sampling` says otherwise, and not ended by an end-of-sequence token. `on_token(how many so far)` follows each message.
    Once `until` is set the request is called off, and the answer is what there was of it.

    Raises grpc.RpcError as the API defines.
    """
    params = common_pb2.SamplingParams()
    if sampling is not None:
        params.CopyFrom(sampling)
    params.max_tokens, params.ignore_eos = num_tokens, True
    request = inference_pb2.GenerateRequest(model=model, tokens=inference_pb2.TokenPrompt(token_ids=prompt), sampling=params)
    tokens: list[int] = []
    texts: list[str] = []
    # It is reached at its own address, whatever the environment says of proxies.
    with grpc.insecure_channel(grpc_address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        for chunk in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=timeout_s):
            tokens += chunk.token_ids
            texts.append(chunk.text)
            if on_token is not None:
                on_token(len(tokens))
            if until is not None and until.is_set():
                break
    return Generated(tokens, "".join(texts), chunk.finish_reason, chunk.usage.prompt_tokens, chunk.usage.cached_tokens)
