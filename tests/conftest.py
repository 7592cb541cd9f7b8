from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import closing

import pytest
from hypothesis import settings

from messenger.rdma.ports import rdma_problem
from tests.support.netns import Namespace, Switch, Unavailable
from tests.support.tally import Tally

_INJECTED = "injected faults"
"""The property of a test's report in which its line travels."""
_LONG = (
    "tests/deploy/test_deploy_chart_runs",
    "tests/deploy/test_deploy_docker.py",
    "tests/e2e/test_accounts.py",
    "tests/e2e/test_bfloat16.py",
    "tests/e2e/test_exactness.py",
    "tests/e2e/test_failure.py",
    "tests/e2e/test_joining.py",
    "tests/e2e/test_moves.py",
    "tests/e2e/test_structured_output.py",
    "tests/e2e/test_two_gateways.py",
)
"""Files that take minutes. They come first: of several workers none is to begin one of them when the others are at their ends."""


# Where tests run side by side, a thread more in each is no gain: they wait for one another, and burn the processors while they do.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a process has compiled of the code, the many others that tests start need not compile anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A machine that is busy otherwise is no fault of the code's.
settings.register_profile("springtide", deadline=None)
settings.load_profile("springtide")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("springtide")
    group.addoption("--fault-seeds", type=int, default=4, help="how many seeds the randomised fault tests run with")
    group.addoption("--first-fault-seed", type=int, default=1, help="the first of them; to repeat one, add --fault-seeds=1")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fault_seed" in metafunc.fixturenames:
        first = metafunc.config.getoption("--first-fault-seed")
        metafunc.parametrize("fault_seed", range(first, first + metafunc.config.getoption("--fault-seeds")))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What tests and their imports make is there to the end: nobody is to look through it for garbage again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need an RDMA device are skipped where there is none; `make test-rdma` runs them in a virtual machine that has some."""
    items.sort(key=lambda item: not item.nodeid.startswith(_LONG))
    problem = rdma_problem()
    if problem is not None:
        for item in items:
            if item.get_closest_marker("rdma"):
                item.add_marker(pytest.mark.skip(reason=problem))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    return (yield from _skipped_where_unavailable())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    return (yield from _skipped_where_unavailable())


def _skipped_where_unavailable() -> Generator[None, object, object]:
    """A test, or a fixture of it, need not say what becomes of it where this machine or user cannot have the networks that it wants."""
    try:
        return (yield)
    except Unavailable as why:
        pytest.skip(str(why))


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    with closing(Namespace()) as made:
        yield made


@pytest.fixture(scope="module")
def switch() -> Iterator[Switch]:
    """What namespaces are plugged into that reach each other by their addresses."""
    with closing(Switch()) as made:
        yield made


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """Of this test; its line is printed at the end of the run."""
    tally = Tally()
    yield tally
    line = tally.line(request.node.name)
    print(line)
    request.node.user_properties.append((_INJECTED, line))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    ended = [r for reports in terminalreporter.stats.values() for r in reports if getattr(r, "when", None) == "teardown"]
    lines = [line for report in ended for name, line in report.user_properties if name == _INJECTED]
    if lines:
        terminalreporter.section("injected faults")
        for line in lines:
            terminalreporter.write_line(line)
