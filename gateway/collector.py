"""The way to a collector of OpenTelemetry's: where what goes by OTLP goes to, as whose, and what that takes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from springtide import __version__
from springtide.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

logger = logging.getLogger(__name__)

SERVICE_NAME = "springtide"


def destination(signal: str, setting: str, endpoint: str | None, environ: Mapping[str, str]) -> str | None:
    """The URL that a signal ("traces", "metrics") goes to: that of its setting or, without, as OpenTelemetry's own variables say; None:
    nowhere. Raises ConfigError, naming the setting or the variable."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    url, named = _url(signal, setting, endpoint, environ)
    if not url:
        return None
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ConfigError(f"{named} must be a URL such as http://collector:4318, not {url!r}", param=named)
    protocol = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
    if endpoint is None and protocol != "http/protobuf":
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL must be http/protobuf, not {protocol!r}: {signal} go by OTLP over HTTP, to port 4318 of most "
            f"collectors; {setting} says where, whatever OpenTelemetry's variables say"
        )
    return url


def _url(signal: str, setting: str, endpoint: str | None, environ: Mapping[str, str]) -> tuple[str, str]:
    """What says so, too."""
    path = f"/v1/{signal}"
    if endpoint is not None:
        given = endpoint.rstrip("/")
        return given if given.endswith(path) else given + path, setting
    if environ.get(f"OTEL_{signal.upper()}_EXPORTER", "otlp").strip() != "otlp":
        return "", ""
    own = f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT"
    if whole := environ.get(own):
        return whole, own
    if base := environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return base.rstrip("/") + path, "OTEL_EXPORTER_OTLP_ENDPOINT"
    return "", ""


@contextlib.contextmanager
def forgiving_variables(setting: str | None, cost: str) -> Iterator[None]:
    """Lets a ConfigError through where there is a setting. A variable may be meant for others, and costs no more than `cost` says, which
    the log has."""
    try:
        yield
    except ConfigError as error:
        if setting is not None:
            raise
        logger.warning("%s: %s", cost, error.message)


@contextlib.contextmanager
def opentelemetry_for(what: str) -> Iterator[None]:
    """For imports of OpenTelemetry's packages, which nothing else imports: they take a quarter of a second. Raises ConfigError without
    them."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{what} need OpenTelemetry's packages: pip install 'springtide[otel]' ({error})") from None
    # What it says of a collector that is away, at each try, is more than anybody wants to read.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)


def resource(instance_id: str) -> Resource:
    """Who sends it. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES go before what we say. Needs OpenTelemetry's packages."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    own = {"service.name": SERVICE_NAME, "service.version": __version__, "service.instance.id": instance_id}
    return Resource.create(own).merge(OTELResourceDetector().detect())
