"""Shared fixtures of a session: ranks, data, models, references, and runs that others resume from."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fsdp_tune.data.store import RowStore
from fsdp_tune.run.directory import RunDir
from tests.parity import reference, runs
from tests.parity.architectures import make_model
from tests.parity.cases import Case
from tests.parity.compare import Spread, spread
from tests.parity.peft_adapters import make_adapter, round_to_nf4
from tests.parity.store import GLOBAL_BATCH_SIZE, make_store
from tests.ranks import Ranks, shared_ranks
from tests.session import folder as session_folder
from tests.session import made_once

PRECISION = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SETTINGS = reference.LoopSettings(
    steps=runs.STEPS, global_batch_size=GLOBAL_BATCH_SIZE, learning_rate=3e-3, warmup_steps=3, weight_decay=0.1, max_grad_norm=1.0
)

Worker = Callable[[str], dict[str, Any]]


class Bench:
    """Runs on real ranks. Those on a GPU share models, rows and references with `on_cpu`."""

    def __init__(self, folder: Path, on_ranks: Ranks, device: str = "cpu", on_cpu: Bench | None = None) -> None:
        self.folder, self.on_ranks, self.device = folder, on_ranks, device
        self.files = on_cpu.files if on_cpu else folder
        self.store = on_cpu.store if on_cpu else made_once(f"{folder.name}/store", make_store)
        self._references: dict[tuple[object, ...], reference.Trajectory] = on_cpu._references if on_cpu else {}
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
    ) -> reference.Trajectory:
        """The trajectory of one device, from a model directory that is the architecture's own unless given.

        `changes`: other settings of the loop.
        """
        changes = {name: value for name, value in changes.items() if value != getattr(SETTINGS, name)}
        key = (architecture, packed, precision, model, skipped, adapter, *sorted(changes.items()))
        if key not in self._references:
            settings = dataclasses.replace(
                SETTINGS, packed=packed, compute_dtype=PRECISION[precision], skipped=skipped, adapter=adapter, **changes
            )
            suffix = "-packed" if packed else ""
            rows, evals = RowStore(self.store / f"train{suffix}"), RowStore(self.store / f"eval{suffix}")
            self._references[key] = reference.train(settings, model or self.model(architecture), rows, evals)
        return self._references[key]

    def adapter(self, case: Case) -> Path:
        """A PEFT adapter for the case's model, made by PEFT alone, whose B is not zero: AdamW's first update of a zero B is its sign."""
        digest = hashlib.sha256(repr(case.lora).encode()).hexdigest()[:16]
        name = f"{self.files.name}/adapters/{case.architecture}-{digest}"
        return made_once(name, lambda folder: make_adapter(self.model(case.architecture), dict(case.lora), folder))

    def model_in_4_bits(self, architecture: str, scales: str) -> Path:
        """The architecture's model with the values that its weights have in 4 bits."""
        name = f"{self.files.name}/models/{architecture}-nf4-{scales}"
        return made_once(name, lambda folder: round_to_nf4(self.model(architecture), scales, folder))

    def run(self, case: Case) -> RunDir:
        """The finished run of a case; each case runs once a session."""
        if case not in self._runs:
            digest = hashlib.sha256(repr(case).encode()).hexdigest()[:16]
            path = made_once(f"{self.folder.name}/{digest}", lambda folder: self.fresh_run(case, folder=folder))
            self._runs[case] = RunDir(path)
        return self._runs[case]

    def fresh_run(self, case: Case, worker: Worker | None = None, folder: Path | None = None) -> RunDir:
        run = self.prepared_run(case, folder)
        runs.train(self.on_ranks, run, case.ranks, worker or (runs.run_with_kernels if case.kernels else None))
        return run

    def prepared_run(self, case: Case, folder: Path | None = None) -> RunDir:
        """The run directory of a case, ready to train; in a new folder unless given."""
        recipe = case.recipe(str(self.model(case.architecture)))
        if case.lora:
            keys = {key: list(value) if isinstance(value, tuple) else value for key, value in case.lora}
            recipe["lora"] = keys | {"adapter": str(self.adapter(case))}
        if case.nf4 is not None:
            recipe["quantization"] = {"scales": case.nf4}
        run = self.written_run(recipe, packed=case.packed, folder=folder)
        if case.resumed != "no":
            runs.resume_from(run, self.run(case.donor()))
        return run

    def written_run(self, changes: dict[str, Any], store: Path | None = None, folder: Path | None = None, **of_store: Any) -> RunDir:
        """A new run directory on this bench's device, and on its rows unless given others."""
        changes = runs.merged(changes, {"launch": {"device": self.device}})
        return runs.write_run(folder or self.new_folder(), changes, store or self.store, **of_store)


def spread_of(case: Case, bench: Bench) -> Spread:
    """How far a case scatters around one device in fp32."""
    return spread(runs.trajectory(bench.run(case)), bench.reference(case.architecture, packed=case.packed))


def of_bf16(case: Case, bench: Bench) -> Spread:
    """How far one device scatters that computes in bf16 and keeps everything in fp32."""
    alone = bench.reference(case.architecture, packed=case.packed, precision="bf16")
    return spread(alone, bench.reference(case.architecture, packed=case.packed))


def bits(case: Case, bench: Bench) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, to be compared exactly."""
    return [(line["loss"], line["grad_norm"]) for line in runs.loss_lines(bench.run(case))]


@functools.cache
def shared_bench(device: str = "cpu") -> Bench:
    """The bench of this process for a device. Its models, rows and runs are the session's."""
    return Bench(session_folder() / f"bench-{device}", shared_ranks(device), device, None if device == "cpu" else shared_bench())
