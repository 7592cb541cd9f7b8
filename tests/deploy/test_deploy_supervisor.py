"""The supervisor, with real processes small enough to start at once."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import redis

from deploy.local.children import Child, StartFailed
from deploy.local.plan import ClusterPaths, ProcessRole, ProcessSpec, placed, processes
from deploy.local.supervisor import STOP_GRACE_S, STOP_STAGE_GRACE_S, Supervisor
from springtide.config import load_config
from tests.support.waiting import until

SLEEP = "import time; time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
NOTES_ITS_END = """
import signal, sys, time
def end(*_):
    with open(sys.argv[1], 'a') as file:
        file.write(sys.argv[2] + '\\n')
    sys.exit()
signal.signal(signal.SIGTERM, end)
print('armed', flush=True)
time.sleep(600)
"""


def spec(name: str, program: str, *arguments: str, role: ProcessRole = "store") -> ProcessSpec:
    return ProcessSpec(name, role, name, (sys.executable, "-c", program, *arguments))


READS = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.stdin.read()); import time; time.sleep(600)"


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    async with Supervisor(lambda name: tmp_path / f"{name}.log", lambda child, change: None) as running:
        yield running


async def started(supervisor: Supervisor, *specs: ProcessSpec) -> list[Child]:
    supervisor.start(specs)
    await until(lambda: all(child.pid for child in supervisor.children))
    return supervisor.children


async def test_a_killed_process_is_started_again(supervisor: Supervisor) -> None:
    [child] = await started(supervisor, spec("a", SLEEP))
    child.mark_ready()
    before = child.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    await until(lambda: child.pid not in (before, None))
    assert not child.ready


async def test_a_process_reads_what_it_is_to_be_told_and_nobody_sees_it(supervisor: Supervisor, tmp_path: Path) -> None:
    told, secret = tmp_path / "told", replace(spec("a", READS, str(tmp_path / "told")), stdin=b"a secret")
    [child] = await started(supervisor, secret)
    for _ in range(2):  # also when it is started again
        await until(lambda: told.exists() and told.read_text() == "a secret")
        told.unlink()
        child.mark_ready()
        child.signal(signal.SIGKILL)
    assert "a secret" not in repr(secret)


async def test_valkey_comes_back_with_what_it_was_told_to_who_has_its_password(supervisor: Supervisor, tmp_path: Path) -> None:
    config = placed(load_config(environ={}), tmp_path)
    [child] = await started(supervisor, processes(config, ClusterPaths(tmp_path), embedded_valkey=True)[0])
    with redis.Redis.from_url(str(config.redis_url)) as client, redis.Redis.from_url(f"unix://{tmp_path}/valkey.sock") as stranger:

        def told(wanted: bytes | None) -> bool:
            with suppress(redis.ConnectionError):
                return client.get("key") == wanted
            return False

        await until(lambda: told(None))
        with pytest.raises(redis.AuthenticationError):
            stranger.ping()
        client.set("key", "value")
        assert client.execute_command("WAITAOF", 1, 0, 5000)[0] == 1, "its file has it when it is killed"
        child.mark_ready()
        child.signal(signal.SIGKILL)
        await until(lambda: not child.ready and told(b"value"))
        with pytest.raises(redis.AuthenticationError):
            stranger.ping()


async def test_a_process_that_never_becomes_ready_ends_the_start_and_its_log_says_why(supervisor: Supervisor) -> None:
    supervisor.start([spec("good", SLEEP), spec("bad", "raise SystemExit('no such model')")])
    with pytest.raises(StartFailed, match="bad exited with 1 and was not ready once in 2 starts") as failure:
        await supervisor.watch()
    assert "no such model" in failure.value.log.read_text()


async def test_a_process_that_cannot_be_started_again_yet_is_tried_until_it_can(tmp_path: Path) -> None:
    """As when its log cannot be opened."""
    logs, said = tmp_path / "logs", list[str]()
    logs.mkdir()
    async with Supervisor(lambda name: logs / f"{name}.log", lambda child, change: said.append(change)) as supervisor:
        [child] = await started(supervisor, spec("a", SLEEP))
        watching = asyncio.create_task(supervisor.watch())
        child.mark_ready()
        logs.rename(tmp_path / "elsewhere")
        child.signal(signal.SIGKILL)
        await until(lambda: watching.done() or sum("could not be started" in change for change in said) >= 2)
        assert not watching.done() and child.pid is None and not child.ready
        logs.mkdir()
        await until(lambda: child.pid is not None)
        watching.cancel()


async def test_a_process_that_can_never_be_started_ends_the_start(tmp_path: Path) -> None:
    async with Supervisor(lambda name: tmp_path / "nowhere" / name, lambda child, change: None) as supervisor:
        supervisor.start([spec("a", SLEEP)])
        with pytest.raises(StartFailed, match=r"a could not be started \(.*No such file.*\) and was not ready once in 2 starts"):
            await supervisor.watch()


async def test_processes_stop_in_the_order_of_who_needs_whom(supervisor: Supervisor, tmp_path: Path) -> None:
    order = tmp_path / "order"
    roles: list[ProcessRole] = ["valkey", "store", "decode", "conductor", "gateway"]
    await started(supervisor, *(spec(role, NOTES_ITS_END, str(order), role, role=role) for role in roles))
    await until(lambda: all("armed" in (tmp_path / f"{role}.log").read_text() for role in roles))
    await supervisor.shut_down()
    assert order.read_text().split() == ["gateway", "conductor", "decode", "store", "valkey"]


async def test_a_conductor_decides_until_the_gateway_beside_it_has_drained(tmp_path: Path) -> None:
    """And for the gateways of other machines."""
    ends, drain_s = tmp_path / "ends", 2 * STOP_STAGE_GRACE_S
    slow = NOTES_ITS_END.replace("    with open", "    time.sleep(float(sys.argv[3]))\n    with open")
    async with Supervisor(lambda name: tmp_path / f"{name}.log", lambda child, change: None, drain_s) as supervisor:
        gateway = replace(spec("gateway", slow, str(ends), "gateway", str(drain_s), role="gateway"), drains=True)
        await started(supervisor, spec("conductor", NOTES_ITS_END, str(ends), "conductor", role="conductor"), gateway)
        await until(lambda: all("armed" in (tmp_path / f"{name}.log").read_text() for name in ("gateway", "conductor")))
    assert ends.read_text().split() == ["gateway", "conductor"]


async def test_who_has_others_end_is_given_the_time_for_it(supervisor: Supervisor, tmp_path: Path) -> None:
    """The placer's nodes need Valkey until they have left."""
    ends = tmp_path / "ends"
    slow = NOTES_ITS_END.replace("    with open", "    time.sleep(2 * float(sys.argv[3]))\n    with open")
    placer = spec("placer", slow, str(ends), "placer", str(STOP_STAGE_GRACE_S), role="placer")
    valkey = spec("valkey", NOTES_ITS_END, str(ends), "valkey", role="valkey")
    await started(supervisor, placer, valkey)
    await until(lambda: all("armed" in (tmp_path / f"{name}.log").read_text() for name in ("placer", "valkey")))
    await supervisor.shut_down()
    assert ends.read_text().split() == ["placer", "valkey"]


async def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(supervisor: Supervisor, tmp_path: Path) -> None:
    [child] = await started(supervisor, spec("deaf", DEAF))
    await until(lambda: "deaf" in (tmp_path / "deaf.log").read_text())
    pid = child.pid
    assert pid is not None
    async with asyncio.timeout(STOP_GRACE_S + 2):
        await supervisor.shut_down()
    assert not alive(pid)


async def test_stopping_does_not_wait_for_a_restart_that_is_due(supervisor: Supervisor) -> None:
    [child] = await started(supervisor, spec("crashing", "raise SystemExit(1)"))
    child.mark_ready()
    await until(lambda: child.pid is None)
    await supervisor.shut_down()
    assert child.pid is None


PARENT = """
import asyncio, sys
from pathlib import Path
from deploy.local.plan import ClusterPaths, ProcessSpec, placed, processes, resolve
from deploy.local.supervisor import Supervisor
from springtide.config import load_config

async def main():
    run_dir = Path(sys.argv[1])
    config = placed(resolve(load_config(overrides={'server.port': 0, 'server.grpc_port': 0}, environ={})), run_dir)
    valkey = processes(config, ClusterPaths(run_dir), embedded_valkey=True)[0]
    sleeper = ProcessSpec('sleeper', 'store', 'sleeper', (sys.executable, '-c', 'import time; time.sleep(600)'))
    async with Supervisor(lambda name: run_dir / f'{name}.log', lambda child, change: None) as supervisor:
        supervisor.start([valkey, sleeper])
        while not all(child.pid for child in supervisor.children):
            await asyncio.sleep(0.01)
        print(*(child.pid for child in supervisor.children), flush=True)
        await supervisor.watch()

asyncio.run(main())
"""


def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(children) == 2
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 2
    while any(alive(child) for child in children):
        assert time.monotonic() < deadline


def test_a_child_whose_supervisor_died_before_it_ran_ends_at_once() -> None:
    wrapper = Path(sys.modules["deploy.local.exec_child"].__file__ or "")
    somebody_else = 1
    ended = subprocess.run([sys.executable, "-I", "-S", wrapper, str(somebody_else), "/bin/sleep", "60"], capture_output=True, timeout=10)
    assert b"supervisor is gone" in ended.stderr
