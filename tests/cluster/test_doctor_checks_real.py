"""`doctor` on two machines, which are network namespaces: each planted fault is named with its machine, and
clean machines raise no alarm.

A fault of files is a mount that only the second machine sees.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fsdp_tune.core.errors import ExitCode
from fsdp_tune.data.read.file_access import EOS, PAD, builtin_tokenizer
from tests.conftest import REPOSITORY
from tests.launch.namespaces import (
    ADDRESSES,
    HOSTS,
    INTERFACE,
    NAMES,
    ip,
    marks_of_machines,
    on_machine,
    two_namespaces,
)

pytestmark = marks_of_machines()
LIMIT_SECONDS = 250.0
CLEAN_RUNS = int(os.environ.get("FSDP_TUNE_TEST_CLEAN_RUNS", "3"))
STOPPED_SECONDS, RUNNING_SECONDS = 0.16, 0.04
"""Of a throttled rank. Other processes may leave a healthy one half of a core, which must not be confused
with it."""


def write_model(folder: Path, seed: int) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=builtin_tokenizer("builtin:arithmetic"), eos_token=EOS, pad_token=PAD
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    LlamaForCausalLM(config).save_pretrained(folder / "model")  # pyright: ignore[reportUnknownMemberType]
    tokenizer.save_pretrained(folder / "tokenizer")  # pyright: ignore[reportUnknownMemberType]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both machines see, and in `other` what the second one sees instead of a part of it."""
    root = tmp_path_factory.mktemp("disk")
    for folder, seed in ((root, 0), (root / "other", 1)):
        write_model(folder, seed)
        for name in ("data", "runs"):
            (folder / name).mkdir()
    rows = [
        json.dumps({"prompt": f"{number} and {number} are", "completion": f" {2 * number}"})
        for number in range(500)
    ]
    (root / "data" / "rows.jsonl").write_text("\n".join(rows))
    tokenizer = root / "other" / "tokenizer" / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"model_max_length": 7}))
    (root / "other" / "empty").mkdir()
    site = root / "other" / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import time\nplain = time.time\ntime.time = lambda: plain() - 40.0\n"
    )
    version, metadata = torch_files()
    (root / "other" / "version.py").write_text(version.read_text().replace(torch.__version__, "2.99.0"))
    installed = f"Version: {importlib.metadata.version('torch')}\n"
    assert installed in metadata.read_text()
    (root / "other" / "METADATA").write_text(metadata.read_text().replace(installed, "Version: 2.99.0\n"))
    return root


def torch_files() -> tuple[Path, Path]:
    """Return the two files in which an installed torch has its version."""
    listed = importlib.metadata.distribution("torch").files or []
    metadata = next(Path(str(each.locate())) for each in listed if each.name == "METADATA")
    return Path(torch.__file__).parent / "version.py", metadata


class Doctor:
    """The command of one machine."""

    def __init__(self, number: int, disk: Path, fault: Fault, *words: str) -> None:
        settings = {
            "launch.num_machines": 2,
            "launch.num_processes": 2,
            "launch.main_process_ip": ADDRESSES[0],
            "launch.device": "cpu",
            "launch.num_cpu_threads_per_process": 1,
            "model.from_config": None,
            "model.name_or_path": str(disk / "model"),
            "model.tokenizer": str(disk / "tokenizer"),
            "data.train": [{"path": str(disk / "data" / "rows.jsonl")}],
            "data.eval": None,
            "data.cache_dir": str(disk / f"cache-{number}"),
            "output_dir": str(disk / "runs" / "run"),
        } | (fault.keys if number else {})
        arguments = [
            word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")
        ]
        command = [
            sys.executable,
            "-m",
            "fsdp_tune",
            "doctor",
            "--config",
            "gpt2_smoke",
            *arguments,
            "--machine-rank",
            str(number),
            *words,
        ]
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        if number:
            mounts = [["mount", "--bind", *map(str, pair)] for pair in fault.mounts(disk)]
            mounts += [["mount", "-o", "remount,ro,bind", str(path)] for path in fault.read_only(disk)]
            command = [
                "sh",
                "-c",
                "\n".join(["set -e", *map(shlex.join, mounts), 'exec "$@"']),
                "sh",
                *command,
            ]
            env |= fault.environment(disk)
        self.process = subprocess.Popen(
            on_machine(number, command),
            cwd=disk,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )

    def end(self) -> tuple[int, str, str]:
        """Return exit code, stdout and stderr."""
        out, err = self.process.communicate(timeout=LIMIT_SECONDS)
        return self.process.returncode, out, err

    def throttle(self) -> None:
        """Let the ranks of this machine run for a fifth of the time, until the command ends."""
        while self.process.poll() is None:
            for number, seconds in ((signal.SIGSTOP, STOPPED_SECONDS), (signal.SIGCONT, RUNNING_SECONDS)):
                for each in self._ranks():
                    with suppress(psutil.NoSuchProcess):
                        each.send_signal(number)
                time.sleep(seconds)

    def _ranks(self) -> Iterator[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            for each in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    if "fsdp_tune.worker.doctor" in each.cmdline() and "RANK" in each.environ():
                        yield each


Paths = Callable[[Path], Sequence[Any]]


@dataclass(frozen=True)
class Fault:
    """What is wrong with the second machine, and what both commands say about it."""

    check: str
    state: str
    words: tuple[str, ...]
    mounts: Paths = lambda _: ()
    """On the second machine only: pairs of what is seen, and where."""
    read_only: Paths = lambda _: ()
    environment: Callable[[Path], dict[str, str]] = lambda _: {}
    keys: dict[str, Any] = field(default_factory=dict[str, Any])
    on_wire: Callable[[], None] = lambda: None
    is_throttled: bool = False


def replaced(*names: str) -> Paths:
    return lambda disk: [(disk / "other" / name, disk / name) for name in names]


def emptied(name: str) -> Paths:
    return lambda disk: [(disk / "other" / "empty", disk / name)]


def slow_link() -> None:
    words = [
        "qdisc",
        "add",
        "dev",
        INTERFACE,
        "root",
        "tbf",
        "rate",
        "100mbit",
        "burst",
        "64kb",
        "latency",
        "400ms",
    ]
    subprocess.run(["tc", "-n", NAMES[1], *words], check=True)


def add_interface(*, mtu: int = 1500) -> None:
    ip("-n", NAMES[1], "link", "add", "other", "type", "veth", "peer", "name", "veth-other")
    ip("-n", NAMES[1], "addr", "add", "10.92.0.1/24", "dev", "other")
    for name in ("other", "veth-other"):
        ip("-n", NAMES[1], "link", "set", name, "mtu", str(mtu), "up")


FAULTS = {
    "throttled rank": Fault(
        "matrix product", "warn", (f"rank 1 on {HOSTS[1]} takes ", "products in a row"), is_throttled=True
    ),
    "read-only directory": Fault(
        "output directory",
        "fail",
        (f"rank 1 on {HOSTS[1]} cannot write in ", "Read-only file system"),
        mounts=lambda disk: [(disk / "runs", disk / "runs")],
        read_only=lambda disk: [disk / "runs"],
    ),
    "other disk": Fault(
        "output directory", "fail", ("sees the files of 1 of 2 ranks in ",), replaced("runs")
    ),
    "other torch": Fault(
        "versions",
        "fail",
        (f"rank 1 on {HOSTS[1]} has torch 2.99.0",),
        mounts=lambda disk: list(
            zip((disk / "other" / "version.py", disk / "other" / "METADATA"), torch_files(), strict=True)
        ),
    ),
    "missing data": Fault("inputs", "fail", (f"{HOSTS[1]}: ", "rows.jsonl` does not exist"), emptied("data")),
    "missing weights": Fault("inputs", "fail", (f"{HOSTS[1]}: there are no weights in ",), emptied("model")),
    "other weights": Fault(
        "inputs",
        "fail",
        (f"the files of `model` on {HOSTS[1]} are not those on {HOSTS[0]}",),
        replaced("model"),
    ),
    "other tokenizer": Fault(
        "inputs",
        "fail",
        (f"the files of `tokenizer` on {HOSTS[1]} are not those on {HOSTS[0]}",),
        replaced("tokenizer"),
    ),
    "slow link": Fault(
        "links", "warn", (f"{HOSTS[1]} to {HOSTS[0]}: ", "interfaces have 10,000 Mbit/s"), on_wire=slow_link
    ),
    "clock": Fault(
        "clocks",
        "warn",
        (f"the clock of {HOSTS[1]} is -40.0 s from that of {HOSTS[0]}",),
        environment=lambda disk: {"PYTHONPATH": f"{disk / 'other' / 'site'}:{REPOSITORY}"},
    ),
    "other interfaces": Fault(
        "network",
        "warn",
        (f"{HOSTS[1]} has the interfaces other (", f"{HOSTS[0]} has wire ("),
        on_wire=add_interface,
    ),
    "other packets": Fault(
        "network",
        "warn",
        ("wire (10,000 Mbit/s, MTU 1400)",),
        on_wire=lambda: ip("-n", NAMES[1], "link", "set", INTERFACE, "mtu", "1400"),
    ),
    "loopback": Fault(
        "network",
        "warn",
        (f"gloo on {HOSTS[1]} uses `lo`",),
        environment=lambda _: {"GLOO_SOCKET_IFNAME": "lo"},
    ),
    "other variables": Fault(
        "settings",
        "fail",
        (f"({HOSTS[1]})", "NCCL_IB_DISABLE 1 instead of (unset)"),
        environment=lambda _: {"NCCL_IB_DISABLE": "1"},
    ),
    "other recipe": Fault(
        "settings",
        "fail",
        (f"({HOSTS[1]})", "another value of `data.max_length`"),
        keys={"data.max_length": 24},
    ),
    "other number of ranks": Fault(
        "ranks", "fail", ("the machines started 3 ranks together",), keys={"launch.num_processes": 4}
    ),
}


@pytest.fixture
def machines() -> Iterator[list[Doctor]]:
    """The commands that a test started."""
    started: list[Doctor] = []
    with two_namespaces():
        try:
            yield started
        finally:
            for each in started:
                each.process.kill()
                each.process.wait()


def examine(disk: Path, machines: list[Doctor], fault: Fault, *words: str) -> list[tuple[int, str, str]]:
    """Run the command on both machines and return how each ended."""
    machines += [Doctor(number, disk, fault, *words) for number in (1, 0)]
    second, first = machines[-2:]
    if fault.is_throttled:
        second.throttle()
    ended = [each.end() for each in (first, second)]
    assert list((disk / "runs").iterdir()) == [], "nothing is left"
    assert list((disk / "other" / "runs").iterdir()) == [], "nothing is left"
    return ended


@pytest.mark.parametrize("name", FAULTS)
def test_fault_of_one_machine_is_named_on_both_and_raises_no_other_alarm(
    disk: Path, machines: list[Doctor], name: str
) -> None:
    fault = FAULTS[name]
    fault.on_wire()
    for code, out, err in examine(disk, machines, fault, "--json"):
        answer = json.loads(out)
        unfit = [check for check in answer["checks"] if check["state"] != "ok"]
        assert [(check["name"], check["state"]) for check in unfit] == [(fault.check, fault.state)], (
            unfit,
            err,
        )
        assert all(words in unfit[0]["finding"] for words in fault.words), unfit
        assert unfit[0]["fix"]
        assert answer["state"] == fault.state
        assert code == (ExitCode.FAILED if fault.state == "fail" else ExitCode.OK), err


def test_screen_of_each_machine_shows_failure_and_hint(disk: Path, machines: list[Doctor]) -> None:
    for code, out, err in examine(disk, machines, FAULTS["read-only directory"]):
        assert code == ExitCode.FAILED
        shown = out + err
        assert (
            f"error: output directory: rank 1 on {HOSTS[1]} cannot write in {disk / 'runs'}: "
            "Read-only file system" in shown
        )
        assert "hint: change the permission or the mount" in shown
        assert "warn" not in shown


HEALTHY = Fault("", "ok", ())


@pytest.mark.parametrize("number", range(CLEAN_RUNS))
def test_clean_machines_raise_no_alarm(disk: Path, machines: list[Doctor], number: int) -> None:
    began = time.monotonic()
    for code, out, err in examine(disk, machines, HEALTHY, "--json"):
        answer = json.loads(out)
        assert [check for check in answer["checks"] if check["state"] != "ok"] == [], err
        assert (code, answer["state"], answer.get("notices", [])) == (ExitCode.OK, "ok", [])
    print(f"run {number}: {time.monotonic() - began:.1f} s")
