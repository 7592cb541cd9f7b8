"""The error tree. Each error knows what it is for a client (HTTP status, OpenAI type); messages name the field and the value."""

from __future__ import annotations


class SpringtideError(Exception):
    """Base of every error that Springtide raises on purpose."""

    http_status = 500
    openai_type = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequest(SpringtideError):
    """The request can never succeed as it stands; `param` names the field."""

    http_status = 400
    openai_type = "invalid_request_error"


class Unauthenticated(SpringtideError):
    """No API key, or one that is not known."""

    http_status = 401
    openai_type = "authentication_error"


class ModelNotFound(InvalidRequest):
    http_status = 404


class Overloaded(SpringtideError):
    """Rejected early: it would miss its objectives. `retry_after_s` says when to come back."""

    http_status = 429
    openai_type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: float, reason: str) -> None:
        super().__init__(message, code=reason)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(SpringtideError):
    """The request's own deadline cannot be kept, or has passed."""

    http_status = 504
    openai_type = "deadline_exceeded"


class Unavailable(SpringtideError):
    """Nodes that the request needs are gone, beyond retry."""

    http_status = 503
    openai_type = "service_unavailable"


class ConfigError(SpringtideError):
    """A wrong key or value in the configuration; the message names it and says what would be right."""


class UnsupportedModel(SpringtideError):
    """The model's files ask for something that the engine does not have; the message names it."""


class StaleHandle(SpringtideError):
    """The slot behind a handle has been given to another block since, or its store has restarted."""


class PeerLost(SpringtideError):
    """The other side is gone or unreachable."""


class NoMemory(SpringtideError):
    """The machine, or this process's limits, do not have it."""


class PoolFull(SpringtideError):
    """No slot is free or evictable."""
