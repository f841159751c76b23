"""Starts what `gpu_day.py` measures: the real worker on one rank, or a loop by hand, each in a process of its
own.

What every run imports is imported once, before CUDA is touched, and each run is a fork of that: it begins
after a second instead of eight. Where CUDA does not survive the fork (a library asked for it while it was
imported), runs are fresh interpreters. A run that is out of memory, crashes or hangs ends alone, and its
message and the lines that it has written are its row.

Weights are drawn on the GPU, because a host takes half a minute to draw eight billion. No run saves: the copy
of the last step would lock as many bytes of host memory as weights and optimizer have, 48 to 96 GB of an 8B
model, and write them to the disk.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

POLL_SECONDS = 0.02
PROBE_SECONDS = 90.0
STACKS_SECONDS = 1.0
LAST_WORDS = 400
"""Characters of a log that a reason holds."""
MESSAGE_LINES = 40
"""Last lines of a log that the message of a failed row holds."""
LEAST_SECONDS = 5.0
"""With less time left no run begins."""


class TimeIsUp(Exception):
    """The part has no time left. The message tells what was cut."""


def example_lengths(tokens: int, examples: int) -> list[int]:
    """Of a row that is full: `examples` of unequal length."""
    parts = np.arange(1, examples + 1)
    lengths = (tokens * parts // parts.sum()).tolist()
    return [*lengths[:-1], tokens - sum(lengths[:-1])]


def write_rows(folder: Path, tokens: int, rows: int, vocabulary: int, examples: int = 1) -> Path:
    """A store of prepared rows, all of `tokens` tokens: each example counts up in steps of its own, which a
    model can learn."""
    from fsdp_tune.data.build import StoreWriter
    from fsdp_tune.data.store import STORE_KIND
    from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest, digest_file, list_files

    store = folder / f"rows-{tokens}-{rows}-{vocabulary}-{examples}"
    if store.exists():
        return store
    store.mkdir(parents=True)
    draw = np.random.default_rng(0)
    lengths = np.array(example_lengths(tokens, examples) * rows, np.int64)
    texts = [
        (draw.integers(vocabulary) + draw.integers(1, 4) * np.arange(length)) % vocabulary
        for length in lengths
    ]
    writer = StoreWriter(store)
    count = len(lengths)
    origins = np.stack([np.zeros(count, np.int64), np.arange(1, count + 1)], axis=1)
    writer.add(np.concatenate(texts).astype(np.int32), np.ones(tokens * rows, np.uint8), lengths, origins)
    writer.finish_pool()
    writer.add_set(
        "train", np.stack([np.cumsum(lengths) - lengths, lengths], axis=1), np.arange(0, count + 1, examples)
    )
    files = {name: digest_file(store / name) for name in list_files(store)}
    (store / MANIFEST_NAME).write_text(
        Manifest(STORE_KIND, files, {"files": ["made"]}).to_json(), encoding="utf-8"
    )
    return store


def resolved(tree: dict[str, Any], file: Path, device_name: str) -> Any:
    """The recipe of a tree of keys, read and checked like a user's file. FsdpTuneError where it is
    refused."""
    from fsdp_tune.core.devices import Machine, available_cores
    from fsdp_tune.recipe.read.loader import load_recipe
    from fsdp_tune.recipe.resolve import resolve

    file.write_text(json.dumps(tree), encoding="utf-8")  # JSON is YAML
    machine = Machine("cuda", 1, available_cores(), device_name)
    return resolve(load_recipe(str(file)).recipe, machine, cwd=file.parent).recipe


def write_run(recipe: Any, folder: Path, store: Path, vocabulary: int) -> None:
    """What a rank reads of a run directory."""
    from fsdp_tune.data.preparation import Prepared
    from fsdp_tune.data.report import DataReport
    from fsdp_tune.run.directory import RunDir
    from fsdp_tune.run.launch_files import ResumeRequest

    run = RunDir(folder)
    run.logs.mkdir(parents=True)
    ResumeRequest(saves=False).write(run.resume_json)
    run.recipe_json.write_text(recipe.model_dump_json(by_alias=True), encoding="utf-8")
    rows = len(np.fromfile(store / "train" / "rows.int64", "<i8")) - 1
    where: dict[str, Any] = {"key": "made", "path": str(store), "train": str(store / "train"), "evals": {}}
    Prepared(
        **where, train_rows=rows, vocabulary_size=vocabulary, pad_token_id=0, report=DataReport(), notices=[]
    ).write(run.data_json)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended."""

    reason: str | None = None
    """None: as it should."""
    was_killed: bool = False
    """Its time was up."""


def run_job(job: dict[str, Any], seconds: float, *, forks: bool) -> Ended:
    """Does `job` (see `do`) in a process of its own, which is killed with its children after `seconds`."""
    started = time.monotonic()
    log = Path(job["log"])
    log.parent.mkdir(parents=True, exist_ok=True)
    pid = _fork(job, log) if forks else _spawn(job, log)
    code: int | None = None
    while code is None and time.monotonic() - started < seconds:
        code = _code(pid)
        if code is None:
            time.sleep(POLL_SECONDS)
    if code is None:
        where = _location(Path(job["run"]), pid) if job["kind"] == "worker" else ""
        _kill(pid)
        return Ended(f"killed after {seconds:.0f} s{where}", was_killed=True)
    return Ended() if code == 0 else Ended(_problem_of(job) or f"{_describe(code)}: {_end_of(log)}")


def _describe(code: int) -> str:
    """A SIGKILL is none of ours here: it is that of a kernel that has no host memory left."""
    if code == -signal.SIGKILL:
        return "killed by the kernel (is the host out of memory?)"
    return f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"


def _code(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _kill(pid: int) -> None:
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _location(folder: Path, pid: int) -> str:
    """Return the phase of a running worker and the functions of its main thread, the innermost first."""
    from fsdp_tune.run.directory import RunDir
    from fsdp_tune.run.rank_files import read_heartbeat

    run = RunDir(folder)
    os.kill(pid, signal.SIGUSR2)  # a rank writes the stacks of its threads, the main one last
    time.sleep(STACKS_SECONDS)
    beat, log = read_heartbeat(run, 0), run.rank_log(0)
    phase = "without a heartbeat" if beat is None else f"in phase {beat.phase}, step {beat.step}"
    lines = (
        log.read_text(encoding="utf-8", errors="replace").rpartition("most recent call first")[2].splitlines()
        if log.exists()
        else []
    )
    frames = [line.strip().removeprefix("File ") for line in lines if line.strip().startswith("File ")]
    return f" {phase}: {' < '.join(frames[:6])[:LAST_WORDS] or _end_of(log)}"


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1][-LAST_WORDS:] if lines else "it said nothing"


def _problem_of(job: dict[str, Any]) -> str | None:
    """Of a worker: the problem in its outcome file."""
    if job["kind"] != "worker":
        return None
    from fsdp_tune.run.directory import RunDir

    file = RunDir(Path(job["run"])).rank_outcome(0)
    problem = json.loads(file.read_text(encoding="utf-8")).get("problem") if file.exists() else None
    return str(problem["message"])[:LAST_WORDS] if problem else None


def _fork(job: dict[str, Any], log: Path) -> int:
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid)  # here too: the kill must not come before the child's own call
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        code = do(job)
    except BaseException:  # noqa: BLE001  a child must never return into its parent's code
        os.write(2, traceback.format_exc().encode())  # whatever stands in for sys.stderr
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _spawn(job: dict[str, Any], log: Path) -> int:
    with log.open("ab") as out:
        command = [sys.executable, str(Path(__file__).resolve()), json.dumps(job)]
        return subprocess.Popen(
            command, stdout=out, stderr=out, start_new_session=True, stdin=subprocess.DEVNULL
        ).pid


def warm_up() -> None:
    """Imports what every run imports; touches no device."""
    import fsdp_tune.worker.setup  # noqa: F401
    from fsdp_tune.model.kernels import liger

    if liger.has_liger():
        import liger_kernel.transformers.monkey_patch  # noqa: F401  with the modules of all models that it knows


def do(job: dict[str, Any]) -> int:
    from fsdp_tune.core.parent_death import die_with_parent

    die_with_parent()
    return {"worker": worker, "bare": bare, "ceilings": ceilings, "probe": probe}[job["kind"]](job)


def worker(job: dict[str, Any]) -> int:
    """`python -m fsdp_tune.worker RUN`, as the launcher starts it, with weights that are drawn on the
    device."""
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        **_meeting(),
        **job.get("environment", {}),
    }
    from fsdp_tune.worker import __main__ as entry

    draw_on_the_device()
    return entry.main([job["run"]])


def _meeting() -> dict[str, str]:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe_socket.getsockname()[1])}


def draw_on_the_device() -> None:
    """From now on this process draws the weights of a model on its device, in place of rank 0's host."""
    from fsdp_tune.model.loading import assemble as loading
    from fsdp_tune.worker import setup

    patch.object(loading, "_choose", lambda *_: ("checkpoint", None)).start()  # "the weights come later"
    original: Callable[..., Any] = setup.load

    def load(*arguments: Any, **named: Any) -> Any:
        loaded = original(*arguments, **named)
        draw(loaded.model)
        return loaded

    patch.object(setup, "load", load).start()


def draw(model: Any) -> None:
    """Weights as transformers draws them, in place: matrices normal, norms 1, biases 0. Weights in 4 bits
    have about the same size."""
    import torch
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if name.endswith("weight_scales"):
                local.view(torch.float32).fill_(0.04)
            elif parameter.dtype == torch.uint8:
                local.random_(256)
            elif parameter.ndim >= 2:
                local.normal_(0.0, 0.02)
            else:
                local.fill_(0.0 if name.endswith("bias") else 1.0)


def bare(job: dict[str, Any]) -> int:
    """The loop by hand of `step.py`, alone on the device."""
    os.environ |= {"WORLD_SIZE": "1", **_meeting()}
    import step_ranks

    step_ranks.join(job, 0)
    step_ranks.bare(job, 0)
    return 0


def ceilings(job: dict[str, Any]) -> int:
    """What the device reaches at best: a bf16 product of large matrices, and a copy."""
    import torch

    size = job["size"]
    one, other = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = _median_seconds(lambda: one @ other)
    source = torch.randn(job["copied"], device="cuda")
    target = torch.empty_like(source)
    copy = _median_seconds(lambda: target.copy_(source))
    found = {
        "product_tflops": 2 * size**3 / product / 1e12,
        "copy_gb_s": 2 * source.nbytes / copy / 1e9,
        "size": size,
    }
    Path(job["result"]).write_text(json.dumps(found), encoding="utf-8")
    return 0


def _median_seconds(act: Callable[[], Any], rounds: int = 12) -> float:
    import torch

    seconds: list[float] = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        act()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


def probe(job: dict[str, Any]) -> int:
    """Whether the device answers here, and what it is."""
    import torch

    torch.ones(8, device="cuda").sum().item()
    free, total = torch.cuda.mem_get_info()
    name, capability = torch.cuda.get_device_name(0), list(torch.cuda.get_device_capability(0))
    found = {"name": name, "capability": capability, "free_gib": free / 2**30, "total_gib": total / 2**30}
    found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}  # pyright: ignore[reportAttributeAccessIssue]
    Path(job["result"]).write_text(json.dumps(found), encoding="utf-8")
    return 0


@dataclass(frozen=True, slots=True)
class Measured:
    """Of a worker, finished or not."""

    lines: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Those with a loss."""
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    reason: str | None = None
    """Why it did not finish."""
    message: str | None = None
    """The end of its logs, if it did not finish."""

    def median(self, key: str) -> float | None:
        """Over the lines but the first, whose steps warm up."""
        values = [line[key] for line in self.lines[1:] if line.get(key) is not None]
        return statistics.median(values) if values else None

    def most(self, key: str) -> float | None:
        return max((line[key] for line in self.lines if line.get(key) is not None), default=None)

    def row(self) -> dict[str, Any]:
        """Return the figures of the steps that have ended, and the reason if there are fewer than there
        should be."""
        why = {"reason": self.reason, "message": self.message} if self.reason else {}
        if not self.lines:
            return why
        compiled = [event for event in self.events if event["event"] == "compiled"]
        return {
            "step_seconds": self.median("step_seconds"),
            "tokens_per_second": self.median("tokens_per_second_per_device"),
            "mfu": self.median("mfu"),
            "allocated_gib": self.most("peak_allocated_gib"),
            "reserved_gib": self.most("peak_reserved_gib"),
            "host_gib": self.most("peak_host_gib"),
            "last_loss": self.lines[-1]["loss"],
            "startup": self._startup(),
            **(
                {"compile_seconds": sum(e["seconds"] for e in compiled), "graphs": compiled[-1]["graphs"]}
                if compiled
                else {}
            ),
            **why,
        }

    def _startup(self) -> dict[str, float]:
        """Return the seconds to the end of the first step, by phase; a fork was launched long before."""
        first = next((event for event in self.events if event["event"] == "first_step"), {})
        return {
            phase: round(seconds, 2)
            for phase, seconds in first.get("phase_seconds", {}).items()
            if phase != "launching"
        }


def measured(folder: Path, reason: str | None, log: Path) -> Measured:
    """Read what a worker has written, whether it has finished or not."""
    from fsdp_tune.run.directory import RunDir

    run = RunDir(folder)
    text = run.metrics_jsonl.read_text(encoding="utf-8") if run.metrics_jsonl.exists() else ""
    # a killed one may have cut its last
    every = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    message = None
    if reason is not None:
        logs = [
            file.read_text(encoding="utf-8", errors="replace").splitlines()
            for file in (log, run.rank_log(0))
            if file.exists()
        ]
        message = "\n".join([line for lines in logs for line in lines][-MESSAGE_LINES:])
    return Measured(
        [line for line in every if "loss" in line],
        [line for line in every if "event" in line],
        reason,
        message,
    )


@dataclass
class Runner:
    """Runs recipes one after another on one GPU; `left` returns the seconds that the part has left."""

    folder: Path
    device_name: str
    forks: bool
    left: Callable[[], float] = lambda: float("inf")
    at_most_seconds: float = 75.0
    """For a run: less than a part has, so that one that hangs leaves time for another."""
    count: int = 0

    def __call__(self, tree: dict[str, Any], *, examples: int = 1, rows: int = 64) -> Measured:
        """Return what a run of the recipe measured. Raises: TimeIsUp."""
        from fsdp_tune.core.errors import FsdpTuneError

        self.count += 1
        try:
            recipe = resolved(tree, self.folder / f"recipe-{self.count}.json", self.device_name)
        except FsdpTuneError as error:
            return Measured(reason=f"not available: {error.problems[0].message}")
        config = recipe.model.from_config or json.loads(
            Path(recipe.model.name_or_path, "config.json").read_text(encoding="utf-8")
        )
        vocabulary = int(config["vocab_size"])
        run, log = self.folder / f"run-{self.count}", self.folder / f"run-{self.count}.log"
        write_run(
            recipe,
            run,
            write_rows(self.folder, recipe.data.max_length, rows, vocabulary, examples),
            vocabulary,
        )
        return measured(run, self._ended({"kind": "worker", "run": str(run), "log": str(log)}).reason, log)

    def job(self, kind: str, **details: Any) -> dict[str, Any]:
        """Return what another kind of process wrote, or the reason why it wrote nothing. Raises: TimeIsUp."""
        self.count += 1
        base = self.folder / f"{kind}-{self.count}"
        job = {
            "kind": kind,
            "device": "cuda",
            "result": f"{base}.json",
            "log": f"{base}.log",
            "folder": str(base),
            **details,
        }
        if (reason := self._ended(job).reason) is not None:
            return {"reason": reason}
        return json.loads(Path(job["result"]).read_text(encoding="utf-8"))

    def _ended(self, job: dict[str, Any]) -> Ended:
        """A run that the end of the part cut is not a result: the next call starts with it, and has all of
        the part's time."""
        seconds = min(self.left(), self.at_most_seconds)
        if seconds < LEAST_SECONDS:
            raise TimeIsUp("the time of the part was up")
        ended = run_job(job, seconds, forks=self.forks)
        if ended.was_killed and seconds < self.at_most_seconds:
            raise TimeIsUp(f"the time of the part was up: {ended.reason}")
        return ended


@dataclass
class PlansOnly(Runner):
    """In the place of a `Runner` where only plans are made."""

    forks: bool = False

    def __call__(self, *_: Any, **__: Any) -> Measured:
        return Measured()

    def job(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}


def find_device(folder: Path) -> tuple[dict[str, Any], bool]:
    """The device's facts, and whether runs may be forks. SystemExit where there is no device."""
    reasons: list[str] = []
    for forks in (True, False):
        job = {
            "kind": "probe",
            "result": str(folder / "device.json"),
            "log": str(folder / f"probe-{forks}.log"),
        }
        ended = run_job(job, PROBE_SECONDS, forks=forks)
        if ended.reason is None:
            return json.loads(Path(job["result"]).read_text(encoding="utf-8")), forks
        reasons.append(ended.reason)
    raise SystemExit(
        f"no CUDA device answers ({reasons[-1]}); `python -m tests.cuda scripts/gpu-day …` emulates one"
    )


def main(arguments: Sequence[str]) -> int:
    return do(json.loads(arguments[0]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
