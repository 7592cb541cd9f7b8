"""Trace contexts: which trace a request belongs to, as W3C Trace Context writes it (https://www.w3.org/TR/trace-context/)."""

from __future__ import annotations

import random
import re
from collections import OrderedDict
from dataclasses import dataclass

TRACE_HEADER = "traceparent"
"""Of a request: which trace it belongs to, and the span that it is part of. Of an answer: which span of the trace the request's is."""
_HEADER = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01
_LOW_BITS = 64
_MOST_KNOWN = 16_384


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span and its trace, by their ids in lower-case hexadecimal."""

    trace_id: str
    span_id: str
    sampled: bool

    @property
    def header(self) -> str:
        """As `traceparent` has it."""
        return f"00-{self.trace_id}-{self.span_id}-{_SAMPLED * self.sampled:02x}"


def parsed(header: str) -> TraceContext | None:
    """What a `traceparent` says; None where it says nothing that is valid."""
    match = _HEADER.fullmatch(header)
    if match is None or (match[4] and header.startswith("00")):
        return None
    return TraceContext(match[1], match[2], bool(int(match[3], 16) & _SAMPLED))


def checked(header: str) -> str:
    """The same where it says something; else nothing."""
    return header if parsed(header) is not None else ""


def new_trace_id() -> str:
    return f"{random.getrandbits(128) or 1:032x}"


def new_span_id() -> str:
    return f"{random.getrandbits(64) or 1:016x}"


def is_chosen(trace_id: str, ratio: float) -> bool:
    """Whether a trace is among the share `ratio` of all. By the id alone, as OpenTelemetry's TraceIdRatioBased has it: whoever else samples
    at the ratio, or at a greater one, keeps it too."""
    return int(trace_id, 16) % (1 << _LOW_BITS) < round(ratio * (1 << _LOW_BITS))


class TraceIds:
    """The trace ids of the requests that this process has heard of, for its log: the last ones, as requests end in many ways. From any
    thread."""

    def __init__(self, most: int = _MOST_KNOWN) -> None:
        self._most = most
        self._ids: OrderedDict[str, str] = OrderedDict()

    def note(self, request_id: str, traceparent: str) -> None:
        """What runs under the id belongs to the trace, if it does to one."""
        if (context := parsed(traceparent)) is None:
            return
        self._ids[request_id] = context.trace_id
        while len(self._ids) > self._most:
            self._ids.popitem(last=False)

    def of(self, request_id: str) -> str | None:
        """Of a request, or of a choice of it (`id/1`)."""
        return self._ids.get(request_id) or self._ids.get(request_id.partition("/")[0])

    def of_attempt(self, attempt_id: str) -> str | None:
        """Of an attempt of a request (`id.1`)."""
        return self.of(attempt_id.rpartition(".")[0])


TRACE_IDS = TraceIds()
"""This process's."""
