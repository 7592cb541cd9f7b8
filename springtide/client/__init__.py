"""A client of the gateway's HTTP API, for Python programs: answers whole or as they are made, context caches, batches.

    with Client("http://127.0.0.1:8000") as client:
        for chunk in client.chat([{"role": "user", "content": "Hello"}], max_tokens=50):
            print(chunk.text, end="", flush=True)

`AsyncClient` is the same for asyncio. What is refused for load, or cannot be reached, is tried again (`Retries`), as the server's
`Retry-After` says. Errors are those of springtide.errors: InvalidRequest, Unauthenticated, ModelNotFound, Overloaded (with
`retry_after_s`), DeadlineExceeded, Unavailable.
"""

from springtide.client.asynchronous import AsyncClient
from springtide.client.blocking import Client
from springtide.client.calls import error_of
from springtide.client.retries import NO_RETRIES, Retries
from springtide.client.words import Answer, Batch, BatchRequest, BatchResult, Cache, Chunk, ToolCalled, ToolCallPiece

__all__ = [
    "NO_RETRIES",
    "Answer",
    "AsyncClient",
    "Batch",
    "BatchRequest",
    "BatchResult",
    "Cache",
    "Chunk",
    "Client",
    "Retries",
    "ToolCallPiece",
    "ToolCalled",
    "error_of",
]
