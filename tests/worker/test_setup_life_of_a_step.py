"""docs/development/life-of-a-step.md: what the trainer overrides, in the order of the calls in a run, and its
observers."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from transformers import Trainer

from fsdp_tune.worker.step_observer import StepObserver
from fsdp_tune.worker.trainer import FsdpTrainer
from tests.parity import runs
from tests.parity.store import make_store
from tests.ranks import Ranks

ROW = re.compile(r"^\| `(\w+)` \| .* \| `([\w./]+)` \|$", re.MULTILINE)
MOST_WORDS = 1_000
CHANGES: dict[str, Any] = {
    "model": {
        "from_config": {
            "model_type": "gpt2",
            "vocab_size": 257,
            "n_positions": 64,
            "n_embd": 32,
            "n_layer": 1,
            "n_head": 2,
        }
    },
    "training": {
        "max_steps": 4,
        "save_steps": 2,
        "eval_steps": 2,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "load_best_model_at_end": True,
    },
    "launch": {"num_processes": 1},
}
"""Every override that is called at all is called in the resumed half of this run."""


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs" / "development" / "life-of-a-step.md").read_text(encoding="utf-8")


def section(page: str, heading: str) -> list[str]:
    """Methods or callbacks of a section's table, in its order."""
    return [name for name, _ in ROW.findall(page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0])]


def overrides() -> list[str]:
    """Methods that FsdpTrainer and its bases below Trainer define, and that Trainer has."""
    ours = [kind for kind in FsdpTrainer.__mro__ if not issubclass(Trainer, kind)]
    found = {
        name
        for kind in ours
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and hasattr(Trainer, name)
    }
    return sorted(found - {"__init__"})


def test_page_is_short_and_names_files_that_exist(page: str, repository: Path) -> None:
    assert len(page.split()) <= MOST_WORDS
    paths = set(re.findall(r"`((?:[\w-]+/)+[\w-]*(?:\.py)?)`", page)) - {"fsdp_tune/"}
    assert {
        path
        for path in paths
        if not any((root / path).exists() for root in (repository, repository / "fsdp_tune"))
    } == set()


def test_page_has_every_override_once(page: str) -> None:
    headings = ("Before the first step", "A step", "After the last step", "Never called in a run")
    assert sorted(name for heading in headings for name in section(page, heading)) == overrides()


def leaves(kind: type) -> Iterator[type]:
    """Subclasses that have none themselves, protocols aside."""
    inner = [each for each in kind.__subclasses__() if not getattr(each, "_is_protocol", False)]
    for each in inner:
        yield from leaves(each)
    if not inner:
        yield kind


def test_page_has_every_observer_with_its_file(page: str) -> None:
    importlib.import_module("fsdp_tune.worker.setup")  # and with it the modules of all observers
    kinds = [kind for kind in leaves(StepObserver) if kind.__module__.startswith("fsdp_tune.")]
    found = {
        kind.__name__: f"{kind.__module__.removeprefix('fsdp_tune.').replace('.', '/')}.py" for kind in kinds
    }
    assert dict(ROW.findall(page.partition("\n## Observers\n")[2])) == found


def traced_worker(path: str) -> dict[str, Any]:
    """On a rank: the worker. Its outcome has the overrides in the order of their calls in `train()`, and the
    observers."""
    calls: list[str] = []
    observers: list[str] = []

    def traced(name: str) -> Any:
        original = getattr(FsdpTrainer, name)

        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(self, *args, **kwargs)

        return patch.object(FsdpTrainer, name, call)

    train = FsdpTrainer.train

    def from_here(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.clear()
        observers.extend(type(each).__name__ for each in self.observers)
        return train(self, *args, **kwargs)

    patches = [*map(traced, overrides()), patch.object(FsdpTrainer, "train", from_here)]
    for each in patches:
        each.start()
    try:
        return runs.run_worker(path) | {"calls": calls, "observers": observers}
    finally:
        for each in patches:
            each.stop()


@pytest.mark.ranks
def test_tables_are_in_the_order_of_a_run(page: str, tmp_path: Path, on_ranks: Ranks) -> None:
    store = make_store(tmp_path / "rows")
    first = runs.write_run(tmp_path / "first", CHANGES, store)
    runs.train(on_ranks, first, 1)
    resumed = runs.write_run(tmp_path / "resumed", CHANGES, store)
    runs.resume_from(resumed, first, 2)
    [outcome] = runs.train(on_ranks, resumed, 1, traced_worker)
    order = list(dict.fromkeys(outcome["calls"]))
    assert order == [
        *section(page, "Before the first step"),
        *section(page, "A step"),
        *section(page, "After the last step"),
    ]
    one_step = outcome["calls"][outcome["calls"].index("get_batch_samples") :]
    assert [name for name in one_step if name == "training_step"] == ["training_step"] * 4, (
        "two steps of two micro-batches"
    )
    listed = section(page, "Observers")
    assert [name for name in listed if name in outcome["observers"]] == outcome["observers"]
