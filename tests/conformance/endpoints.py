"""What each endpoint does, tried."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from tests.conformance.effects import LONG
from tests.conformance.objects import (
    BATCHES,
    CACHED_CONTENTS,
    CACHING,
    DETOKENIZE,
    ESTIMATE,
    FILES,
    GEMINI_COUNT,
    INPUT_TOKENS,
    LINE,
    TAGS,
    TOKENIZE,
)
from tests.conformance.probe import Json, Server, require
from tests.conformance.surfaces import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    GENERATE_CONTENT,
    MESSAGES,
    MODEL,
    QUESTION,
    RESPONSES,
    Surface,
)

Trial = Callable[[Server], None]
"""Raises NoEffect."""
POLL_S, LIMIT_S = 0.1, 60.0


def _json(server: Server, method: str, path: str, body: Any = None, **more: Any) -> Json:
    response = server.http.request(method, server.named(path), json=server.named(body), **more)
    require(response.is_success, f"{method} {path}: {response.text}")
    return dict(response.json())


def _made(server: Server, surface: Surface, **fields: Any) -> Json:
    response = server.post(surface, fields)
    require(response.is_success, response.text)
    return dict(response.json())


def _gone(server: Server, path: str) -> None:
    require((status := server.http.get(path).status_code) == 404, f"{path} is still there: {status}")


def _until(done: Callable[[], bool], seen: Callable[[], object]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not done():
        require(time.monotonic() < limit, seen())
        time.sleep(POLL_S)


def counted(surface: Surface, count: Callable[[Json], int], path: str = "") -> Trial:
    def trial(server: Server) -> None:
        body = _json(server, "POST", path or surface.path, surface.base, headers=dict(surface.headers))
        require(count(body) > 0, body)

    return trial


def got(path: str, wanted: Callable[[Json], object], **headers: str) -> Trial:
    def trial(server: Server) -> None:
        body = _json(server, "GET", path, headers=headers)
        require(wanted(body), body)

    return trial


def listed(surface: Surface, path: str, things: str = "data", name: str = "id") -> Trial:
    """What was just made is the first of the list."""

    def trial(server: Server) -> None:
        body = _made(server, surface)
        first = _json(server, "GET", path)[things][0]
        require(first[name] == body[name], first)

    return trial


def streamed(path: str) -> Trial:
    def trial(server: Server) -> None:
        response = server.http.post(server.named(path), params={"alt": "sse"}, json=server.named(GENERATE_CONTENT.base))
        events = [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line]
        require(events[-1]["candidates"][0]["finishReason"] in ("MAX_TOKENS", "STOP"), response.text)

    return trial


# ---- OpenAI's ----


def _response(server: Server, **fields: Any) -> Json:
    return _made(server, RESPONSES, **fields)


def response_is_shown(server: Server) -> None:
    response = _response(server)
    require(_json(server, "GET", f"/v1/responses/{response['id']}") == response, response)


def response_is_deleted(server: Server) -> None:
    path = f"/v1/responses/{_response(server)['id']}"
    require(_json(server, "DELETE", path)["deleted"], path)
    _gone(server, path)


def response_is_cancelled(server: Server) -> None:
    path = f"/v1/responses/{_response(server, background=True, idle=True, max_output_tokens=1000)['id']}"
    ended = _json(server, "POST", f"{path}/cancel")
    require(ended["status"] in ("cancelled", "incomplete", "completed"), ended)
    require(_json(server, "GET", path)["status"] == ended["status"], ended)


def input_items_are_shown(server: Server) -> None:
    (item,) = _json(server, "GET", f"/v1/responses/{_response(server)['id']}/input_items")["data"]
    require(item["content"][0]["text"] == QUESTION, item)


def file_is_kept(server: Server) -> None:
    file = _made(server, FILES)
    require(file["purpose"] == "batch" and _json(server, "GET", f"/v1/files/{file['id']}") == file, file)


def file_is_deleted(server: Server) -> None:
    path = f"/v1/files/{_made(server, FILES)['id']}"
    require(_json(server, "DELETE", path)["deleted"], path)
    _gone(server, path)


def content_is_given(server: Server) -> None:
    content = server.http.get(f"/v1/files/{_made(server, FILES)['id']}/content").json()
    require(content == server.named(LINE), content)


def batch_is_answered(server: Server) -> None:
    path = f"/v1/batches/{_made(server, BATCHES)['id']}"
    _until(lambda: _json(server, "GET", path)["status"] == "completed", lambda: _json(server, "GET", path))
    batch = _json(server, "GET", path)
    require(batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}, batch)
    line = server.http.get(f"/v1/files/{batch['output_file_id']}/content").json()
    require(line["custom_id"] == "a" and line["response"]["body"]["choices"], line)


def batch_is_cancelled(server: Server) -> None:
    path = f"/v1/batches/{_made(server, BATCHES)['id']}"
    cancelled = server.http.post(f"{path}/cancel")
    # It may have ended before.
    require(cancelled.is_success or cancelled.status_code in (400, 409), cancelled.text)
    ended = ("cancelled", "completed")
    _until(lambda: _json(server, "GET", path)["status"] in ended, lambda: _json(server, "GET", path))


# ---- Kimi's ----


def cache_is_shown(server: Server) -> None:
    path = f"/v1/caching/{_made(server, CACHING)['id']}"
    _until(lambda: _json(server, "GET", path)["status"] == "ready", lambda: _json(server, "GET", path))
    (message,) = _json(server, "GET", path)["messages"]
    require(message["content"] == LONG, message)


def cache_is_changed(server: Server) -> None:
    path = f"/v1/caching/{_made(server, CACHING)['id']}"
    require(_json(server, "PUT", path, {"metadata": {"a": "1"}})["metadata"] == {"a": "1"}, path)
    require(_json(server, "GET", path)["metadata"] == {"a": "1"}, path)


def cache_is_deleted(server: Server) -> None:
    path = f"/v1/caching/{_made(server, CACHING)['id']}"
    require(_json(server, "DELETE", path)["deleted"], path)
    _gone(server, path)


def tag_is_shown(server: Server) -> None:
    tag = _made(server, TAGS)
    require(_json(server, "GET", f"/v1/caching/refs/tags/{tag['tag']}")["cache_id"] == tag["cache_id"], tag)


def tag_is_deleted(server: Server) -> None:
    path = f"/v1/caching/refs/tags/{_made(server, TAGS, tag='buoy')['tag']}"
    require(_json(server, "DELETE", path)["deleted"], path)
    _gone(server, path)


def content_of_a_tag(server: Server) -> None:
    tag = _made(server, TAGS)
    cache = _json(server, "GET", f"/v1/caching/refs/tags/{tag['tag']}/content")
    require(cache["id"] == tag["cache_id"] and cache["messages"], cache)


# ---- Gemini's ----


def _kept(server: Server, version: str) -> str:
    return f"{version}/{_json(server, 'POST', f'{version}/cachedContents', CACHED_CONTENTS.base)['name']}"


def _gemini(version: str) -> dict[str, Trial]:
    models, kept = f"{version}/models/{{model}}", f"{version}/cachedContents"
    at_model = f"{version}/models/{MODEL}"

    def created(server: Server) -> None:
        cache = _json(server, "GET", _kept(server, version))
        require(cache["usageMetadata"]["totalTokenCount"] > 64, cache)

    def shown_in_the_list(server: Server) -> None:
        path = _kept(server, version)
        require(path.endswith(_json(server, "GET", kept)["cachedContents"][0]["name"]), path)

    def lasts_longer(server: Server) -> None:
        path = _kept(server, version)
        before, after = _json(server, "GET", path), _json(server, "PATCH", path, {"ttl": "7200s"})
        require(before["expireTime"] < after["expireTime"] == _json(server, "GET", path)["expireTime"], after)

    def deleted(server: Server) -> None:
        path = _kept(server, version)
        require(_json(server, "DELETE", path) == {}, path)
        _gone(server, path)

    return {
        f"POST {models}:generateContent": counted(
            GENERATE_CONTENT, lambda body: body["usageMetadata"]["promptTokenCount"], f"{at_model}:generateContent"
        ),
        f"POST {models}:streamGenerateContent": streamed(f"{at_model}:streamGenerateContent"),
        f"POST {models}:countTokens": counted(GEMINI_COUNT, lambda body: body["totalTokens"], f"{at_model}:countTokens"),
        f"POST {kept}": created,
        f"GET {kept}": shown_in_the_list,
        f"GET {kept}/{{cache_id}}": created,
        f"PATCH {kept}/{{cache_id}}": lasts_longer,
        f"DELETE {kept}/{{cache_id}}": deleted,
    }


# ---- the server itself ----


def metrics_are_given(server: Server) -> None:
    require("springtide_gateway_requests_in_flight" in server.http.get("/metrics").text, "no metrics")


def pinged(server: Server) -> None:
    require(_json(server, "POST", "/ping") == {}, "another answer")


def head(path: str) -> Trial:
    def trial(server: Server) -> None:
        response = server.http.head(path)
        require(response.is_success and not response.content, response.status_code)

    return trial


ENDPOINTS: dict[str, Trial] = {
    "GET /v1/models": got("/v1/models", lambda body: body["data"][0]["max_model_len"]),
    "GET /v1/models/{model_id}": got(f"/v1/models/{MODEL}", lambda body: body["max_model_len"]),
    "GET /v1beta/models": got("/v1beta/models", lambda body: body["models"][0]["inputTokenLimit"]),
    "GET /v1beta/models/{model_id}": got(f"/v1beta/models/{MODEL}", lambda body: body["inputTokenLimit"]),
    "POST /v1/chat/completions": counted(CHAT, lambda body: body["usage"]["prompt_tokens"]),
    "POST /v1/completions": counted(COMPLETIONS, lambda body: body["usage"]["prompt_tokens"]),
    "POST /v1/responses": counted(RESPONSES, lambda body: body["usage"]["input_tokens"]),
    "POST /v1/responses/input_tokens": counted(INPUT_TOKENS, lambda body: body["input_tokens"]),
    "GET /v1/responses/{response_id}": response_is_shown,
    "DELETE /v1/responses/{response_id}": response_is_deleted,
    "POST /v1/responses/{response_id}/cancel": response_is_cancelled,
    "GET /v1/responses/{response_id}/input_items": input_items_are_shown,
    "POST /v1/messages": counted(MESSAGES, lambda body: body["usage"]["input_tokens"]),
    "POST /v1/messages/count_tokens": counted(COUNT_TOKENS, lambda body: body["input_tokens"]),
    "POST /v1/files": file_is_kept,
    "GET /v1/files": listed(FILES, "/v1/files"),
    "GET /v1/files/{file_id}": file_is_kept,
    "GET /v1/files/{file_id}/content": content_is_given,
    "DELETE /v1/files/{file_id}": file_is_deleted,
    "POST /v1/batches": batch_is_answered,
    "GET /v1/batches": listed(BATCHES, "/v1/batches"),
    "GET /v1/batches/{batch_id}": batch_is_answered,
    "POST /v1/batches/{batch_id}/cancel": batch_is_cancelled,
    "POST /v1/caching": cache_is_shown,
    "GET /v1/caching": listed(CACHING, "/v1/caching"),
    "GET /v1/caching/{cache_id}": cache_is_shown,
    "PUT /v1/caching/{cache_id}": cache_is_changed,
    "DELETE /v1/caching/{cache_id}": cache_is_deleted,
    "POST /v1/caching/refs/tags": tag_is_shown,
    "GET /v1/caching/refs/tags": listed(TAGS, "/v1/caching/refs/tags", name="tag"),
    "GET /v1/caching/refs/tags/{tag}": tag_is_shown,
    "GET /v1/caching/refs/tags/{tag}/content": content_of_a_tag,
    "DELETE /v1/caching/refs/tags/{tag}": tag_is_deleted,
    "POST /v1/tokenizers/estimate-token-count": counted(ESTIMATE, lambda body: body["data"]["total_tokens"]),
    **_gemini("/v1beta"),
    **_gemini("/v1"),
    "POST /tokenize": counted(TOKENIZE, lambda body: body["count"]),
    "POST /detokenize": counted(DETOKENIZE, lambda body: len(body["prompt"])),
    "GET /version": got("/version", lambda body: body["version"]),
    "GET /ping": got("/ping", lambda body: body == {}),
    "POST /ping": pinged,
    "HEAD /ping": head("/ping"),
    "GET /health": got("/health", lambda body: body["status"] == "ok"),
    "HEAD /health": head("/health"),
    "GET /ready": got("/ready", lambda body: body["ready"]),
    "HEAD /ready": head("/ready"),
    "GET /metrics": metrics_are_given,
    "GET /openapi.json": got("/openapi.json", lambda body: body["paths"]),
}
"""By method and path, as in the API's own description."""
BESIDE = {"HEAD /ping", "HEAD /health", "HEAD /ready", "GET /openapi.json"}
"""Those that are not in the API's own description."""
