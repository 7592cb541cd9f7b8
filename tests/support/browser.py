"""A headless Chromium, driven by its DevTools protocol: no driver is needed, only the browser itself (Debian's package `chromium`)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Self

from websockets.asyncio.client import ClientConnection, connect

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
_LISTENS = re.compile(r"DevTools listening on (ws://\S+)")
_START_S, _ANSWER_S, _WAIT_S = 30.0, 30.0, 30.0


class Page:
    """A tab. `errors` are what its console had: errors, warnings, exceptions, what could not be loaded."""

    def __init__(self, connection: ClientConnection, session: str) -> None:
        self.errors: list[str] = []
        self.requested: list[str] = []
        self._connection = connection
        self._session = session
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._trace: list[Any] = []
        self._trace_ended = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._connection.send(json.dumps({"id": number, "sessionId": self._session, "method": method, "params": params}))
        async with asyncio.timeout(_ANSWER_S):
            return await answer

    async def open(self, url: str, width: int = 1440, height: int = 900, scheme: str = "light") -> Self:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.resize(width, height)
        await self.scheme(scheme)
        await self.call("Page.navigate", url=url)
        return self

    async def resize(self, width: int, height: int) -> None:
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    async def scheme(self, scheme: str) -> None:
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def run(self, script: str) -> Any:
        """What the expression comes to, promises awaited."""
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script[:200]}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def until(self, script: str) -> None:
        """Returns once the expression is true; it is not while it fails, as before the page is there."""
        tried = f"(() => {{ try {{ return Boolean({script}); }} catch {{ return false; }} }})()"
        async with asyncio.timeout(_WAIT_S):
            while True:
                with contextlib.suppress(RuntimeError):  # another page is on its way
                    if await self.run(tried):
                        return
                await asyncio.sleep(0.05)

    async def picture(self, whole: bool = False) -> bytes:
        """As PNG: what is in sight, or the whole page."""
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])

    @asynccontextmanager
    async def traced(self, categories: Iterable[str]) -> AsyncIterator[list[Any]]:
        """The events of the browser's trace of what is done within, there once it is left."""
        events: list[Any] = []
        self._trace = events
        self._trace_ended.clear()
        await self.call("Tracing.start", traceConfig={"includedCategories": list(categories)})
        yield events
        await self.call("Tracing.end")
        async with asyncio.timeout(_ANSWER_S):
            await self._trace_ended.wait()

    async def _read(self) -> None:
        async for text in self._connection:
            message = json.loads(text)
            if (answer := self._waiting.pop(message.get("id", 0), None)) is not None:
                if "error" in message:
                    answer.set_exception(RuntimeError(str(message["error"])))
                else:
                    answer.set_result(message["result"])
            elif message.get("sessionId") == self._session:
                self._take(message["method"], message["params"])

    def _take(self, method: str, params: Any) -> None:
        match method:
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(" ".join(str(each.get("value", each.get("description"))) for each in params["args"]))
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])
            case "Tracing.dataCollected":
                self._trace.extend(params["value"])
            case "Tracing.tracingComplete":
                self._trace_ended.set()


class Browser:
    """One that runs."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    @asynccontextmanager
    async def page(self, url: str, **options: Any) -> AsyncIterator[Page]:
        """A tab of its own, with nothing of others in it."""
        context = (await self._call(1, "Target.createBrowserContext"))["browserContextId"]
        target = (await self._call(2, "Target.createTarget", url="about:blank", browserContextId=context))["targetId"]
        session = (await self._call(3, "Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = Page(self._connection, session)
        try:
            yield await page.open(url, **options)
        finally:
            await page.close()
            await self._call(4, "Target.closeTarget", targetId=target)

    async def _call(self, number: int, method: str, **params: Any) -> Any:
        number = -number
        await self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        async with asyncio.timeout(_ANSWER_S):
            async for text in self._connection:
                message = json.loads(text)
                if message.get("id") == number:
                    return message["result"]
        raise RuntimeError("the browser has ended")


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """One of its own, one tab at a time."""
    assert CHROMIUM is not None, "there is no Chromium here"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run"]
        options += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        environment = {**os.environ, "HOME": profile}
        process = await asyncio.create_subprocess_exec(
            CHROMIUM, *options, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, env=environment
        )
        assert process.stderr is not None
        draining: asyncio.Task[bytes] | None = None
        try:
            async with asyncio.timeout(_START_S):
                while (said := _LISTENS.search((await process.stderr.readline()).decode(errors="replace"))) is None:
                    assert process.returncode is None, "Chromium has ended at its start"
            draining = asyncio.create_task(process.stderr.read())
            async with connect(said[1], max_size=None) as connection:
                yield Browser(connection)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            if draining is not None:
                await draining
