"""Logs and metrics, the same in every process."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import REGISTRY, make_wsgi_app

from springtide.config import in_url
from springtide.credentials import Credentials
from springtide.errors import ConfigError
from springtide.tls import Tls
from springtide.trace_context import TRACE_IDS

logger = logging.getLogger(__name__)

_METRICS_TIMEOUT_S = 10.0
MAX_METRICS_CONNECTIONS = 32
_CONTEXT_FIELDS = ("request_id", "attempt_id")
LATENCY_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, role, logger, message; the request's and the attempt's id where the call gave them as `extra`,
    and then the id of the trace that the request belongs to, if it does to one."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "role": self._role,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update(_context(record))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class TextFormatter(logging.Formatter):
    """`12:00:01.234 INFO  prefill-0 engine ready attempt_id=…`"""

    def __init__(self, role: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d %(levelname)-7s {role} %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        context = "".join(f" {name}={value}" for name, value in _context(record).items())
        head, newline, rest = super().format(record).partition("\n")
        return head + context + newline + rest


def _context(record: logging.LogRecord) -> dict[str, str]:
    ids = {name: value for name in _CONTEXT_FIELDS if (value := getattr(record, name, None))}
    if ids:
        trace_id = TRACE_IDS.of(ids["request_id"]) if "request_id" in ids else TRACE_IDS.of_attempt(ids["attempt_id"])
        if trace_id is not None:
            ids["trace_id"] = trace_id
    return ids


class FewWarnings:
    """Warns of what others can bring about as often as they like: a few times in a while, then says how many more there were."""

    MOST = 10
    PERIOD_S = 10.0

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._began = clock()
        self._count = 0

    def warn(self, message: str, *arguments: object) -> None:
        now = self._clock()
        if now - self._began >= self.PERIOD_S:
            if self._count > self.MOST:
                self._logger.warning("%d more warnings like the last ones were left out", self._count - self.MOST)
            self._began, self._count = now, 0
        self._count += 1
        if self._count <= self.MOST:
            self._logger.warning(message, *arguments)


def setup_logging(role: str, level: str = "info", log_format: str = "text") -> None:
    """Sends every log record of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(role) if log_format == "json" else TextFormatter(role))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """A thread for each connection, of which there are few: when another comes, the oldest makes room for it."""

    daemon_threads = True
    tls: Tls | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._open: dict[socket.socket, None] = {}
        self._closed = threading.Condition()

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        if self.tls is not None:
            # The handshake is made by the thread of the connection, which nobody else has to wait for.
            connection = self.tls.server_context().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._closed:
            while len(self._open) >= MAX_METRICS_CONNECTIONS:
                with contextlib.suppress(OSError):  # beneath TLS: nobody is waited for
                    socket.socket.shutdown(next(iter(self._open)), socket.SHUT_RDWR)
                self._closed.wait()
            self._open[request] = None
        super().process_request(request, client_address)

    def close_request(self, request: Any) -> None:
        with self._closed:
            self._open.pop(request, None)
            super().close_request(request)
            self._closed.notify()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a client of the metrics at %s was not answered", client_address, exc_info=True)


class _MetricsServer6(_MetricsServer):
    address_family = socket.AF_INET6


class _SilentHandler(WSGIRequestHandler):
    timeout = _METRICS_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        pass


_page = make_wsgi_app(REGISTRY)


def _metrics(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """The page. In OpenMetrics, prometheus_client 0.26 writes a sample's name without its colon, and vLLM's names have one, unless it is
    told that any character will do."""
    if "HTTP_ACCEPT" in environ:
        said = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8"
        environ["HTTP_ACCEPT"] = re.sub(r"application/openmetrics-text\b[^,]*", said, environ["HTTP_ACCEPT"])
    page: Iterable[bytes] = _page(environ, start_response)
    return page


def serve_metrics(credentials: Credentials, host: str = "127.0.0.1", port: int = 0) -> str:
    """Serves the process's Prometheus registry on `http://host:port/metrics` from a daemon thread; returns host:port. With certificates, on
    https and to those who have one. Where the port is taken, as by a node that this one comes in the place of, it is a free one. Raises
    ConfigError where other machines could come in without TLS, or it cannot listen there."""
    credentials.check_host(host)
    kind = _MetricsServer6 if ":" in host else _MetricsServer
    try:
        server = make_server(host, port, _metrics, kind, _SilentHandler)
    except OSError as error:
        if port == 0 or error.errno != errno.EADDRINUSE:
            raise ConfigError(f"--metrics-port: cannot listen on {host}:{port}: {error.strerror}") from None
        logger.warning("--metrics-port: %s:%d is in use; the metrics of this process are at a free port", host, port)
        return serve_metrics(credentials, host)
    server.tls = credentials.tls
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return f"{in_url(host)}:{server.server_port}"
