"""What the APIs have and this server does not: refused by name."""

from __future__ import annotations

from fastapi import APIRouter, Request

from springtide.errors import InvalidRequest

WHAT = {
    "/v1/responses/compact": "compaction; a response's `truncation` leaves out what does not fit",
    "/v1/chat/completions": "chat completions that it keeps; `/v1/responses` keeps its answers",
    "/v1/agents": "agents",
    "/v1/skills": "skills",
    "/v1/sessions": "sessions",
    "/v1/chatkit": "ChatKit",
    "/v1/embeddings": "embeddings",
    "/v1/audio": "audio",
    "/v1/images": "images",
    "/v1/videos": "videos",
    "/v1/moderations": "moderations",
    "/v1/realtime": "realtime sessions",
    "/v1/assistants": "assistants",
    "/v1/threads": "threads",
    "/v1/vector_stores": "vector stores",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/uploads": "uploads in parts",
    "/v1/evals": "evaluations",
    "/v1/containers": "containers",
    "/v1/conversations": "conversations that it keeps itself; a response's `previous_response_id` goes on with one",
    "/v1/complete": "Anthropic's text completions; messages are at /v1/messages",
    "/v1/messages/batches": "Anthropic's message batches; batches are at /v1/batches",
    "/v1/rerank": "ranking",
    "/v1/score": "scores of pairs",
    "/v1/pooling": "pooling",
    "/v1/classify": "classification",
}
"""By the beginning of the path."""


class NotServed(InvalidRequest):
    """There is such a thing, but not here."""

    http_status = 404


def routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)

    async def refuse(request: Request) -> None:
        path = request.url.path
        what = next(name for begin, name in WHAT.items() if path.startswith(begin))
        raise NotServed(f"{request.method} {path}: this server makes text, and does not serve {what}", code="not_served")

    methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    for path in WHAT:
        router.add_api_route(path, refuse, methods=methods)
        router.add_api_route(f"{path}/{{rest:path}}", refuse, methods=methods)
    return router
