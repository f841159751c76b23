"""Isolate every test: no network beyond loopback, no caches or accelerate config of the user, one thread per
process."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from fsdp_tune.core.devices import available_cores
from tests import ranks, session, warm
from tests.cuda import build
from tests.cuda.devices import require
from tests.leaks import leaves_nothing
from tests.times import UNKNOWN_SECONDS, Times, read_costs

__all__ = ["leaves_nothing"]  # pytest finds fixtures by their names here

session.begin()  # before pytest starts further processes, which belong to it

# No deadline: a busy machine makes any example slow, and a hang is seen without one.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("searching", print_blob=True, deadline=None)
# a change is judged by its own faults, not by the day's luck
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
# Nor by constants of the modules that a process happens to have imported, for which each process parses all
# of the package.
providers.is_local_module_file = lambda _path: False

# `nohup pytest`, `pytest &` in a script: what is ignored here stays so in the commands
for _number in (
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else lambda *_: None)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; several ranks share few cores
os.environ["TORCH_DIST_USE_NCCL2"] = "0"  # as ranks have it; read when torch is imported
os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported; children inherit it
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HOME"] = str(session.folder() / "home" / "huggingface")
if sys.platform == "linux":
    warm.install(lambda: ranks.connect("cpu"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden files again instead of comparing; the commit says why",
    )
    parser.addoption("--write-times", action="store_true", help="write what each test file costs into docs/")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Times(config))
    if (
        config.getoption("numprocesses", None)
        and not hasattr(config, "workerinput")
        and config.args == config.getini("testpaths")
    ):
        build.start()  # all tests will run, and otherwise both processes would wait for it


@pytest.hookimpl(optionalhook=True)  # of a plugin that `scripts/test-gpu` may lack
def pytest_xdist_auto_num_workers() -> int:
    """Three processes for two cores: tests wait for processes, files and time limits. Eight at most: the
    ranks have one server."""
    return min(8, max(3, available_cores()))


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Import a share of the test modules before all are collected: else every process compiles the same ones
    at the same time."""
    own = getattr(session.config, "workerinput", None)
    if own is None or session.config.args != session.config.getini("testpaths"):
        return
    files = sorted((REPOSITORY / "tests").rglob("test_*.py"))
    for path in files[int(own["workerid"].removeprefix("gw")) :: own["workercount"]]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # its collection reports that
            importlib.import_module(".".join(path.relative_to(REPOSITORY).with_suffix("").parts))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest: at the end, a long file would keep one process busy and the
    other idle.

    Before them come traces, which fork: some builds of torch refuse a backward pass in a fork once the
    process has had one.
    """
    seconds = {name: cost.seconds for name, cost in read_costs().items()}
    traces = REPOSITORY / "tests" / "planner"

    def order(item: pytest.Item) -> tuple[bool, float, str]:
        name = item.path.relative_to(REPOSITORY).as_posix()
        return not item.path.is_relative_to(traces), -seconds.get(name, UNKNOWN_SECONDS), name

    items.sort(key=order)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Spare the garbage collector the imported stack: half a million objects that every full collection would
    visit."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Where ranks compute: `cpu`, and also `cuda`, an emulated GPU for each rank, in tests with a mark of
    `tests.cuda.devices`."""
    device: str = getattr(request, "param", "cpu")
    require(device)
    return device


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches and default configurations of the person who runs the tests are neither read nor written."""
    home = session.folder() / "home"
    home.mkdir(exist_ok=True)
    for name, folder in {
        "HOME": "",
        "XDG_CACHE_HOME": "cache",
        "XDG_STATE_HOME": "state",
        "HF_HOME": "huggingface",
    }.items():
        monkeypatch.setenv(name, str(home / folder))


@pytest.fixture(autouse=True)
def warm_or_cold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fast tests fork the commands that they start from a process that has imported the stack
    (`tests/warm.py`); slow ones start Python."""
    if request.node.get_closest_marker("cold") or request.node.get_closest_marker("slow"):
        monkeypatch.setattr(warm, "connect", None)


@pytest.fixture(autouse=True)
def loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test immediately if it connects to the network, naming the address."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        # that sends nothing
        if self.family in (socket.AF_INET, socket.AF_INET6) and self.type != socket.SOCK_DGRAM:
            host = address[0] if isinstance(address, tuple) else address
            if host not in ("127.0.0.1", "::1", "localhost", "0.0.0.0", socket.gethostname()):
                raise AssertionError(f"a test reached for the network: {address}")
        connect(self, address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", guarded)
