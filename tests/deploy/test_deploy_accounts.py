"""`springtide keys`, `tenants` and `usage`, with a Valkey."""

from __future__ import annotations

import asyncio
import csv
import datetime
import io
import json
from collections.abc import Callable, Iterator

import pytest
import redis.asyncio as redis
from typer.testing import CliRunner

from deploy import cli
from gateway.accounts.accounts import Accounts
from gateway.accounts.allowance import Allowance
from gateway.accounts.register import UnknownKey
from gateway.accounts.usage import Counts, UsageBook, UsageRow
from springtide.errors import ConfigError, Unauthenticated
from springtide.ids import new_id
from tests.support.valkey import new_valkey

DAY = datetime.date(2026, 11, 24)


@pytest.fixture(scope="module")
def valkey_url() -> Iterator[str]:
    with new_valkey() as valkey:
        yield valkey.connection_url


@pytest.fixture
def cluster_name() -> str:
    return new_id("cluster")


@pytest.fixture
def springtide(valkey_url: str, cluster_name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs a command and returns what it prints. Raises what it fails with."""
    monkeypatch.setenv("COLUMNS", "400")

    def run(*arguments: str) -> str:
        command = [*arguments, "--redis-url", valkey_url, "--cluster", cluster_name]
        return CliRunner().invoke(cli.app, command, catch_exceptions=False).stdout

    return run


def callers(valkey_url: str, cluster_name: str, *keys: str) -> list[object]:
    """What a gateway that starts now says of these keys."""

    async def ask() -> list[object]:
        client = redis.Redis.from_url(valkey_url)
        accounts = Accounts(client, cluster_name, {})
        await accounts.start()
        found: list[object] = []
        for key in keys:
            try:
                found.append(accounts.caller(f"Bearer {key}"))
            except Unauthenticated as error:
                found.append(error.message)
        await accounts.close()
        await client.aclose()
        return found

    return asyncio.run(ask())


def test_an_operators_key_is_made_as_one_and_shown_as_one(springtide: Callable[..., str], valkey_url: str, cluster_name: str) -> None:
    plain, operators = (springtide("keys", "create", "ops", *options).strip() for options in ([], ["--operator"]))
    assert [caller.operator for caller in callers(valkey_url, cluster_name, plain, operators)] == [False, True]  # type: ignore[attr-defined]
    assert springtide("keys", "ls").count("an operator's") == 1


def test_a_key_is_shown_once_and_let_in_until_it_is_revoked(springtide: Callable[..., str], valkey_url: str, cluster_name: str) -> None:
    limits = ["--requests-per-minute", "60", "--cache-tokens", "5000", "--models", "a, b"]
    key = springtide("keys", "create", "acme", "--name", "build server", *limits).strip()
    made = json.loads(springtide("keys", "create", "zeta", "--expires", "30d", "--json"))
    first, second = callers(valkey_url, cluster_name, key, made["key"])
    assert (first.tenant, first.of_key) == ("acme", Allowance(("a", "b"), requests_per_minute=60, cache_tokens=5000))  # type: ignore[attr-defined]
    assert second.key_id == made["key_id"]  # type: ignore[attr-defined]

    listed = springtide("keys", "ls")
    assert "build server" in listed and "60 requests per minute" in listed and f"…{key[-4:]}" in listed and key not in listed
    [record] = json.loads(springtide("keys", "ls", "--tenant", "zeta", "--json"))
    assert record["expires_at"] - record["made_at"] == pytest.approx(30 * 86400) and "key" not in record

    assert "is revoked" in springtide("keys", "revoke", key)
    springtide("keys", "revoke", made["key_id"])
    assert callers(valkey_url, cluster_name, key, made["key"]) == ["this API key has been revoked"] * 2
    assert json.loads(springtide("keys", "ls", "--json")) == []
    assert "revoked" in springtide("keys", "ls", "--all")
    with pytest.raises(UnknownKey, match="key_0"):
        springtide("keys", "revoke", "key_0")


def test_what_a_tenant_may_have_is_set_as_a_whole(springtide: Callable[..., str]) -> None:
    springtide("tenants", "set", "acme", "--requests-per-minute", "60", "--cache-tokens", "100000")
    springtide("tenants", "set", "acme", "--tokens-per-minute", "5000")
    assert json.loads(springtide("tenants", "ls", "--json"))["acme"]["tokens_per_minute"] == 5000
    listed = springtide("tenants", "ls")
    assert "5000 tokens per minute" in listed and "60" not in listed


def test_usage_is_shown_by_what_is_asked_for(springtide: Callable[..., str], valkey_url: str, cluster_name: str) -> None:
    async def used() -> None:
        client = redis.Redis.from_url(valkey_url)
        book, chat, batch = UsageBook(client, cluster_name), "/v1/chat/completions", "/v1/batches"
        await book.add("a", 1, DAY, {UsageRow("acme", "key_1", "demo", chat): Counts(2, 10, 4, 6)})
        await book.add("a", 2, DAY, {UsageRow("acme", "key_2", "demo", batch, True): Counts(1, 1, 1, 1)})
        await book.add("a", 3, DAY + datetime.timedelta(days=1), {UsageRow("zeta", "key_3", "demo", chat): Counts(1, 7, 0, 3)})
        await client.aclose()

    asyncio.run(used())
    days = ("--from", "2026-11-24", "--to", "2026-11-25")
    by_tenant = json.loads(springtide("usage", *days, "--format", "json"))
    assert by_tenant == [
        {"tenant": "acme", "batch": False, "requests": 2, "prompt_tokens": 10, "cached_tokens": 4, "output_tokens": 6},
        {"tenant": "acme", "batch": True, "requests": 1, "prompt_tokens": 1, "cached_tokens": 1, "output_tokens": 1},
        {"tenant": "zeta", "batch": False, "requests": 1, "prompt_tokens": 7, "cached_tokens": 0, "output_tokens": 3},
    ]
    rows = list(csv.DictReader(io.StringIO(springtide("usage", *days, "--by", "day,model", "--format", "csv"))))
    assert [(row["day"], row["model"], row["output_tokens"]) for row in rows if row["batch"] == "False"] == [
        ("2026-11-24", "demo", "6"),
        ("2026-11-25", "demo", "3"),
    ]
    assert "key_2" in springtide("usage", *days, "--by", "key", "--tenant", "acme")
    assert json.loads(springtide("usage", "--from", "2026-11-25", "--to", "2026-11-25", "--tenant", "acme", "--format", "json")) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("usage", "--by", "moon"), "--by: usage is shown by tenant, day"),
        (("usage", "--from", "2026-11-25", "--to", "2026-11-24"), "--from 2026-11-25 --to 2026-11-24"),
        (("keys", "create", "acme", "--expires", "soon"), "--expires soon: write a time"),
        (("keys", "create", ""), "TENANT"),
        (("tenants", "set", "a" * 300), "TENANT"),
    ],
)
def test_what_makes_no_sense_is_said(springtide: Callable[..., str], arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        springtide(*arguments)
    assert said in raised.value.message
