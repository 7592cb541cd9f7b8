"""The console in a real browser: no errors, nothing from elsewhere, fit for screen readers and phones, at any size of cluster."""

from __future__ import annotations

import base64
import os
import shutil
import ssl
import subprocess
import tarfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.console import CATEGORIES, KEEP_DRAWING, SCRIPT_LIMIT_MS, frames_of
from conductor.core.types.events import InstanceDown
from gateway.accounts.allowance import digest_of
from gateway.app import GatewayServer
from springtide.config import ServerConfig
from springtide.ids import InstanceId
from springtide.process import ProcessArguments
from tests.support.browser import CHROMIUM, Browser, Page, browser
from tests.support.certificates import Authority
from tests.support.console_pictures import STARTED, VIEWS, played, show
from tests.support.played_cluster import PlayedCluster

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here (on Debian: apt-get install chromium)"),
    pytest.mark.timeout(600),
]
AXE = "axe-core@4.14.1"
MOST_HEAP_BYTES = 150 << 20
MOST_ELEMENTS = 3000
MANY_FRAMES = 20
VIOLATIONS = "axe.run().then((report) => report.violations.map((one) => [one.id, one.nodes.map((node) => node.html)]))"
OVERFLOW = "document.documentElement.scrollWidth - innerWidth"


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The accessibility checker's script: AXE_CORE names it, or npm fetches it."""
    if (given := os.environ.get("AXE_CORE")) is not None:
        return Path(given).read_text()
    directory, npm = tmp_path_factory.mktemp("axe"), shutil.which("npm")
    if npm is None or subprocess.run([npm, "pack", AXE], cwd=directory, capture_output=True, timeout=120).returncode:
        pytest.skip(f"{AXE} is not to be had: there is no npm, or it reaches no registry (AXE_CORE=FILE names one that is there)")
    with tarfile.open(next(directory.glob("*.tgz"))) as packed:
        script = packed.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


@pytest.fixture
async def chromium() -> AsyncIterator[Browser]:
    async with browser() as started:
        yield started


def small() -> PlayedCluster:
    cluster = PlayedCluster(3, 4, rate=8.0)
    cluster.play(60.0)
    cluster.rate = 120.0
    cluster.play(5.0)
    cluster.rate = 8.0
    cluster.play(20.0)
    return cluster


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1440, 900), (375, 812)])
async def test_every_view_is_whole_and_fit_for_all(chromium: Browser, axe: str, width: int, height: int, scheme: str) -> None:
    async with played(small()) as url, chromium.page(f"{url}/console", width=width, height=height, scheme=scheme) as page:
        for view in VIEWS:
            await show(page, view)
            assert await page.run(OVERFLOW) <= 0, f"{view} is wider than the screen"
            await page.run(axe + "; 0")
            found = await page.run(VIOLATIONS)
            assert found == [], f"{view}: {found}"
        assert page.errors == []
        assert all(each.startswith((url, "data:")) for each in page.requested), page.requested


async def test_what_happens_is_seen(chromium: Browser) -> None:
    cluster = small()
    async with played(cluster) as url, chromium.page(f"{url}/console") as page:
        await page.until("document.querySelector('#status').textContent === 'Ready'")
        cluster.silence("decode-3")
        cluster.runner.feed(InstanceDown(InstanceId("decode-3"), 1, hung=True))
        await page.until("document.querySelector('#status').textContent === '1 of 7 away'")
        await page.until("document.querySelector('h1').textContent.includes('1 of 7 instances away')")
        await page.run("location.hash = '#/instances'")
        await page.until("[...document.querySelectorAll('.row')].some((row) => /decode-3\\s*(silent|not ready)/.test(row.textContent))")
        assert page.errors == []


async def test_an_instance_of_both_roles_is_one(chromium: Browser) -> None:
    cluster = PlayedCluster(0, 0, rate=4.0, instances=2)
    cluster.play(60.0)
    request_id = cluster.runner.history.changed_since(0, 1)[0].request_id
    text = "document.querySelector('main').textContent"
    async with played(cluster) as url, chromium.page(f"{url}/console") as page:
        await page.until(f"{text}.includes('All is there: 2 instances.')")
        await page.run("location.hash = '#/instances'")
        await page.until("document.querySelectorAll('.row').length === 4")
        rows = await page.run("[...document.querySelectorAll('.row')].map((row) => row.firstChild.textContent).sort()")
        assert rows == [f"instance-{number}{role}: ready" for number in range(2) for role in ("decode", "prefill")]
        assert await page.run("document.querySelector('.tools .muted').textContent") == "2 instances"
        await page.run(f"location.hash = '#/request/{request_id}'")
        await page.until("document.querySelector('.story')")
        told = await page.run(text)
        assert ".prefill" not in told and "prefill group" not in told
        cluster.silence("instance-1")
        cluster.runner.feed(InstanceDown(InstanceId("instance-1"), 1, hung=True))
        await page.until("document.querySelector('#status').textContent === '1 of 2 away'")
        assert page.errors == []


async def test_a_request_is_found_by_its_id_and_one_that_is_not_known_says_so(chromium: Browser) -> None:
    cluster = small()
    request_id = cluster.runner.history.changed_since(0, 1)[0].request_id
    async with played(cluster) as url, chromium.page(f"{url}/console#/requests") as page:
        await page.until("document.querySelector('form.tools input')")
        await page.run(f"document.querySelector('form.tools input').value = '{request_id}'")
        await page.run("document.querySelector('form.tools').requestSubmit()")
        await page.until("document.querySelector('.story')")
        await page.run("location.hash = '#/request/chatcmpl-0123456789'")
        await page.until("document.querySelector('.empty')?.textContent.includes('no decision about')")


async def test_a_key_is_asked_for_kept_in_the_tab_and_forgotten(chromium: Browser, arguments: ProcessArguments) -> None:
    server = ServerConfig(port=0, grpc_port=0, api_keys={digest_of("the-key"): "acme"})
    cluster = small()
    async with cluster.serving() as address:
        gateway = GatewayServer(replace(arguments, config=arguments.config.model_copy(update={"server": server})), address)
        await gateway.start()
        async with chromium.page(f"http://{gateway.http_address}/console") as page:
            await give_key(page, "another")
            await page.until("document.querySelector('[role=alert]:not([hidden])')?.textContent.includes('not known')")
            await give_key(page, "the-key")
            await page.until("document.querySelector('#who').textContent.startsWith('tenant acme')")
            assert "globex" not in await page.run("document.body.textContent")
            await page.run("window.isOld = true; location.reload()")
            await page.until("!window.isOld && document.querySelector('#who')?.textContent.startsWith('tenant acme')")
            await page.run("document.querySelector('#who button').click()")
            await page.until("document.querySelector('.key-form')")
            assert await page.run("sessionStorage.length + localStorage.length") == 1, "the theme alone is kept"
        await gateway.close()


async def test_with_a_certificate_that_it_is_given_the_page_is_whole_over_tls(
    chromium: Browser, arguments: ProcessArguments, tmp_path: Path
) -> None:
    authority, certificate, key = Authority(tmp_path), tmp_path / "server.pem", tmp_path / "server.key"
    authority.sign(certificate, key)
    server = ServerConfig(port=0, grpc_port=0, tls_certificate=certificate, tls_key=key)
    cluster = small()
    async with cluster.serving() as address, cluster.going_on():
        gateway = GatewayServer(replace(arguments, config=arguments.config.model_copy(update={"server": server})), address)
        await gateway.start()
        url = f"https://{gateway.http_address}"
        async with chromium.page("about:blank") as page:
            refused = await page.call("Page.navigate", url=f"{url}/console")
            assert refused["errorText"] == "net::ERR_CERT_AUTHORITY_INVALID", "nobody has told the browser of the authority"
            # Nor can anybody, of a browser without a profile: it is shown below that this is the certificate.
            await page.call("Security.setIgnoreCertificateErrors", ignore=True)
            page.errors.clear()
            page.requested.clear()
            await page.call("Page.navigate", url=f"{url}/console")
            for view in VIEWS:
                await show(page, view)
            assert await page.run("isSecureContext && document.querySelector('#status').textContent") == "Ready"
            shown = (await page.call("Network.getCertificate", origin=url))["tableNames"]
            assert base64.b64decode(shown[0]) == ssl.PEM_cert_to_DER_cert(certificate.read_text())
            assert page.errors == []
            assert page.requested and all(each.startswith((url, "data:")) for each in page.requested), page.requested
        await gateway.close()


async def give_key(page: Page, key: str) -> None:
    await page.until("document.querySelector('.key-form')")
    await page.run(f"document.querySelector('#key').value = '{key}'; document.querySelector('.key-form').requestSubmit()")
    await page.until("!document.querySelector('.key-form') || document.querySelector('.key-form [role=alert]')")


async def test_a_page_that_loses_its_gateway_says_so(chromium: Browser) -> None:
    async with chromium.page("about:blank") as page:
        async with played(small()) as url:
            await page.run(f"location.href = '{url}/console'")
            await page.until("document.querySelector('#status')?.textContent === 'Ready'")
        await page.until("document.querySelector('#status').textContent === 'No connection'")
        assert "is tried again" in await page.run("document.querySelector('#notice').textContent")


async def test_at_a_thousand_instances_the_page_stays_small(chromium: Browser) -> None:
    cluster = PlayedCluster(500, 500, rate=50.0)
    cluster.play(20.0)
    async with played(cluster) as url, chromium.page(f"{url}/console") as page:
        await page.until(STARTED)
        await page.run(KEEP_DRAWING)
        for view in VIEWS:
            async with page.traced(CATEGORIES) as events:
                await show(page, view)
            assert await page.run("document.querySelectorAll('*').length") < MOST_ELEMENTS, view
            cpu_ms = frames_of(events).cpu
            assert len(cpu_ms) > MANY_FRAMES, view
            assert np.percentile(cpu_ms, 99) < SCRIPT_LIMIT_MS, view
        await page.call("HeapProfiler.collectGarbage")
        assert await page.run("performance.memory.usedJSHeapSize") < MOST_HEAP_BYTES
        assert page.errors == []
