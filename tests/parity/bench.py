"""Shared fixtures of a session: ranks, data, models, references, and runs that others resume from."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fsdp_tune.data.store import RowStore
from fsdp_tune.rehearsal.parity import plain_loop
from fsdp_tune.run.directory import RunDir
from tests.parity import runs
from tests.parity.architectures import make_model
from tests.parity.cases import Case
from tests.parity.compare import Spread, deviation, spread
from tests.parity.peft_adapters import make_adapter, round_to_nf4
from tests.parity.store import GLOBAL_BATCH_SIZE, make_store
from tests.ranks import Ranks, shared_ranks
from tests.session import folder as session_folder
from tests.session import made_once

PRECISION = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SETTINGS = plain_loop.LoopSettings(
    steps=runs.STEPS,
    global_batch_size=GLOBAL_BATCH_SIZE,
    learning_rate=3e-3,
    warmup_steps=3,
    weight_decay=0.1,
    max_grad_norm=1.0,
)

Worker = Callable[[str], dict[str, Any]]


class Bench:
    """Runs on real ranks. Those on a GPU share models, rows and references with `on_cpu`."""

    def __init__(
        self, folder: Path, on_ranks: Ranks, device: str = "cpu", on_cpu: Bench | None = None
    ) -> None:
        self.folder, self.on_ranks, self.device = folder, on_ranks, device
        self.files = on_cpu.files if on_cpu else folder
        self.store = on_cpu.store if on_cpu else made_once(f"{folder.name}/store", make_store)
        self._references: dict[str, plain_loop.Trajectory] = on_cpu._references if on_cpu else {}
        self._runs: dict[Case, RunDir] = {}
        self._count = 0

    def model(self, architecture: str, vocabulary: int | None = None) -> Path:
        name = f"{self.files.name}/models/{architecture}-{vocabulary}"
        return made_once(name, lambda folder: make_model(architecture, folder, vocabulary=vocabulary))

    def new_folder(self) -> Path:
        self._count += 1
        return self.folder / f"run-{os.getpid()}-{self._count}"

    def reference(
        self,
        architecture: str = "llama",
        *,
        packed: bool = False,
        precision: str = "no",
        model: Path | None = None,
        skipped: frozenset[int] = frozenset(),
        adapter: Path | None = None,
        **changes: Any,
    ) -> plain_loop.Trajectory:
        """The trajectory of one device, from a model directory that is the architecture's own unless given.

        `changes`: other settings of the loop. Each trajectory is computed once a session.
        """
        changes = {name: value for name, value in changes.items() if value != getattr(SETTINGS, name)}
        key = (architecture, packed, precision, model, sorted(skipped), adapter, *sorted(changes.items()))

        def train(path: Path) -> None:
            settings = dataclasses.replace(
                SETTINGS,
                packed=packed,
                compute_dtype=PRECISION[precision],
                skipped=skipped,
                adapter=adapter,
                **changes,
            )
            suffix = "-packed" if packed else ""
            rows, evals = RowStore(self.store / f"train{suffix}"), RowStore(self.store / f"eval{suffix}")
            trajectory = plain_loop.train(settings, model or self.model(architecture), rows, evals)
            path.write_bytes(pickle.dumps(trajectory))

        name = _digest(key)
        if name not in self._references:
            path = made_once(f"{self.files.name}/references/{name}", train)
            self._references[name] = pickle.loads(path.read_bytes())
        return self._references[name]

    def reference_of(self, case: Case, **settings: Any) -> plain_loop.Trajectory:
        """The trajectory of one device that a case's run must follow. `settings`: of `reference`."""
        training = dict(case.training)
        optimizer = training.get("optim", "adamw")
        given: dict[str, Any] = {
            "packed": case.packed,
            "steps": case.steps,
            "adapter": self.adapter(case) if case.lora else None,
            "model": self.model_in_4_bits(case.architecture, case.nf4) if case.nf4 else None,
            "groups": case.groups,
            "quantised": case.quantised,
            "optimizer": optimizer if optimizer in ("muon", "adafactor") else "adamw",
            "label_smoothing": training.get("label_smoothing_factor", 0.0),
            "dft": training.get("loss") == "dft",
        }
        return self.reference(case.architecture, **(given | settings))

    def adapter(self, case: Case) -> Path:
        """A PEFT adapter for the case's model, made by PEFT alone, whose B is not zero: AdamW's first update
        of a zero B is its sign."""
        name = f"{self.files.name}/adapters/{case.architecture}-{_digest(case.lora)}"
        return made_once(
            name, lambda folder: make_adapter(self.model(case.architecture), dict(case.lora), folder)
        )

    def model_in_4_bits(self, architecture: str, scales: str) -> Path:
        """The architecture's model with the values that its weights have in 4 bits."""
        name = f"{self.files.name}/models/{architecture}-nf4-{scales}"
        return made_once(name, lambda folder: round_to_nf4(self.model(architecture), scales, folder))

    def run(self, case: Case) -> RunDir:
        """The finished run of a case; each case runs once a session."""
        if case not in self._runs:
            path = made_once(
                f"{self.folder.name}/{_digest(case)}", lambda folder: self.fresh_run(case, folder=folder)
            )
            self._runs[case] = RunDir(path)
        return self._runs[case]

    def fresh_run(self, case: Case, worker: Worker | None = None, folder: Path | None = None) -> RunDir:
        run = self.prepared_run(case, folder)
        runs.train(
            self.on_ranks, run, case.ranks, worker or (runs.run_with_kernels if case.kernels else None)
        )
        return run

    def prepared_run(self, case: Case, folder: Path | None = None) -> RunDir:
        """The run directory of a case, ready to train; in a new folder unless given."""
        recipe = case.recipe(str(self.model(case.architecture)))
        if case.lora:
            keys = {key: list(value) if isinstance(value, tuple) else value for key, value in case.lora}
            recipe["lora"] = keys | {"adapter": str(self.adapter(case))}
        if case.nf4 is not None:
            recipe["quantization"] = {"scales": case.nf4}
        if case.quantised is not None:
            values, group_size = case.quantised
            recipe["quantization"] = {"train": values, "group_size": group_size}
        run = self.written_run(recipe, packed=case.packed, folder=folder)
        if case.resumed != "no":
            runs.resume_from(run, self.run(case.donor()), case.saved_step)
        return run

    def written_run(
        self, changes: dict[str, Any], store: Path | None = None, folder: Path | None = None, **of_store: Any
    ) -> RunDir:
        """A new run directory on this bench's device, and on its rows unless given others."""
        changes = runs.merged(changes, {"launch": {"device": self.device}})
        return runs.write_run(folder or self.new_folder(), changes, store or self.store, **of_store)


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def spread_of(case: Case, bench: Bench) -> Spread:
    """How far a case scatters around one device in fp32."""
    return spread(runs.trajectory(bench.run(case)), bench.reference_of(case))


def of_bf16(case: Case, bench: Bench) -> Spread:
    """How far one device scatters that computes in bf16 and keeps everything in fp32."""
    return spread(bench.reference_of(case, precision="bf16"), bench.reference_of(case))


def assert_as_near_as_bf16(
    case: Case, bench: Bench, record: Callable[[str, Any], None], section: str, **settings: Any
) -> None:
    """Assert that a run in half precision scatters around fp32 at most twice as far as one device in bf16."""
    true, alone = (bench.reference_of(case, precision=precision, **settings) for precision in ("no", "bf16"))
    skipped = settings.get("skipped", frozenset())
    limit, found = (spread(each, true, skipped=skipped) for each in (alone, runs.trajectory(bench.run(case))))
    record("parity", found.row(section, case, limit))
    assert found.loss <= 2 * limit.loss, (found, limit)
    assert found.grad_norm <= 2 * limit.grad_norm, (found, limit)
    assert found.parameters <= 2 * limit.parameters, (found, limit)


def assert_follows_one_device(
    case: Case, bench: Bench, record: Callable[[str, Any], None], section: str
) -> RunDir:
    """Assert that the run of a case has the trajectory of one device in fp32, and record the deviation.
    Returns the run."""
    run = bench.run(case)
    assert_follows(run, bench.reference_of(case), case, record, section)
    return run


def assert_follows(
    run: RunDir, true: plain_loop.Trajectory, case: Case, record: Callable[[str, Any], None], section: str
) -> None:
    found = deviation(run, true)
    record("parity", found.row(section, case))
    assert found.is_within_fp32, f"{found}; worst is {found.worst_name}"


def bits(case: Case, bench: Bench) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, to be compared exactly."""
    return [(line["loss"], line["grad_norm"]) for line in runs.loss_lines(bench.run(case))]


def shared_bench(device: str = "cpu") -> Bench:
    """The bench of this process for a device. Its models, rows and runs are the session's."""
    return _shared_bench(device)


@functools.cache
def _shared_bench(device: str) -> Bench:  # a default would be another key of the cache, and so another bench
    on_cpu = None if device == "cpu" else shared_bench()
    return Bench(session_folder() / f"bench-{device}", shared_ranks(device), device, on_cpu)
