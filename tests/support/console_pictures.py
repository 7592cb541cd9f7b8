"""Pictures of the console, of a cluster that has been played for an hour: `python -m tests.support.console_pictures docs/images`, or with
names of views and `all` for every size and scheme."""

from __future__ import annotations

import asyncio
import io
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from PIL import Image

from engine.formats.files import describe
from gateway.app import GatewayServer
from springtide.config import ClusterConfig, KVConfig, ServerConfig
from springtide.process import ProcessArguments
from tests.support.browser import Page, browser
from tests.support.played_cluster import PlayedCluster
from tests.support.valkey import new_valkey

VIEWS = ("overview", "instances", "requests", "pool", "refusals", "request")
SHOWN = (("overview", 1440, "light"), ("pool", 1440, "light"), ("request", 1440, "dark"), ("requests", 375, "light"))
"""In the docs."""
HEIGHTS = {1440: 900, 375: 812}
STARTED = "document.querySelector('main h1') && document.querySelector('#status').classList.contains('pill')"


@asynccontextmanager
async def played(cluster: PlayedCluster) -> AsyncIterator[str]:
    """The URL of a gateway before a Conductor to whom the cluster goes on being played."""
    with new_valkey() as valkey, tempfile.TemporaryDirectory() as directory:
        config = ClusterConfig(
            model="demo",
            max_context=2000,
            redis_url=valkey.connection_url,
            cluster=secrets.token_hex(4),
            kv=KVConfig(open_to_strangers=True),
            server=ServerConfig(port=0, grpc_port=0),
        )
        arguments = ProcessArguments(config, describe("demo"), Path(directory), "", "gateway-0", "127.0.0.1")
        async with cluster.serving() as address, cluster.going_on():
            gateway = GatewayServer(arguments, address)
            await gateway.start()
            try:
                yield f"http://{gateway.http_address}"
            finally:
                await gateway.close()


async def show(page: Page, view: str) -> None:
    """Returns when the view is there."""
    await page.until(STARTED)
    place = {"overview": "", "request": "requests"}.get(view, view)
    await page.run(f"location.hash = '#/{place}'")
    if view == "request":
        link = "document.querySelectorAll('.table')[1]?.querySelector('.row a[href*=\"request\"]')"
        await page.until(link)
        await page.run(f"location.hash = {link}.getAttribute('href')")
        await page.until("document.querySelector('table.plain')")
    await page.run("document.fonts.ready.then(() => new Promise((done) => setTimeout(done, 1500)))")


def hour() -> PlayedCluster:
    """With a rush in it that was too much."""
    cluster = PlayedCluster(3, 4, rate=7.0)
    for rate, seconds in ((7.0, 2000.0), (60.0, 100.0), (7.0, 1440.0), (11.0, 60.0)):
        cluster.rate = rate
        cluster.play(seconds)
    cluster.to_ssd("prefill-1", 0.8)
    cluster.to_ssd("decode-2", 0.5)
    return cluster


async def main(wanted: list[tuple[str, int, str]]) -> dict[str, bytes]:
    """Pictures by their names."""
    made = {}
    async with played(hour()) as url, browser() as chromium:
        for view, width, scheme in wanted:
            async with chromium.page(f"{url}/console", width=width, height=HEIGHTS[width], scheme=scheme) as page:
                await show(page, view)
                name = f"console-{view}{'-phone' if width < 600 else ''}{'-dark' if scheme == 'dark' else ''}.png"
                made[name] = await page.picture(whole=True)
                print(name, *page.errors)
    return made


if __name__ == "__main__":
    views = [view for view in VIEWS if view in sys.argv[2:]] or list(VIEWS)
    everything = [(view, width, scheme) for view in views for width in HEIGHTS for scheme in ("light", "dark")]
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name, picture in asyncio.run(main(everything if "all" in sys.argv[2:] else list(SHOWN))).items():
        # Of 256 colours, a third of the size.
        Image.open(io.BytesIO(picture)).quantize(256).save(directory / name, optimize=True)
