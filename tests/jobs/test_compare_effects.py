"""Each key that is declared without effect on rows and numbers is changed, and no stage of a comparison
differs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch

from fsdp_tune.comparison.side_processes import ObservingChild
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.jobs.compare_answer import CompareAnswer
from fsdp_tune.recipe.schema.key_effects import DATA, NUMBERS, RESULT
from fsdp_tune.recipe.schema.keys import all_keys, effect_of
from fsdp_tune.recipe.schema.training_fields import PASSED_EFFECTS, TRAINING_FIELDS
from tests.jobs.pairs import compare_recipes, write_sides
from tests.jobs.sides import in_process

pytestmark = pytest.mark.slow
LEAST_TRIED = 60


def other_values(annotation: Any) -> Iterator[str]:
    """Yield values of a type as `--set` takes them; the default is among them."""
    if annotation is bool:
        yield from ("true", "false")
    elif get_origin(annotation) is Literal:
        yield from (str(value) for value in get_args(annotation))
    elif annotation is int:
        yield from ("1", "2", "4")
    elif annotation is float:
        yield "0.5"
    else:
        for inner in get_args(annotation):
            yield from other_values(inner)


def values_of(name: str) -> list[str]:
    key = next((key for key in all_keys() if key.name == name), None)
    if key is not None:
        return list(dict.fromkeys(other_values(key.field.annotation)))
    kinds = TRAINING_FIELDS.fields[name.removeprefix("training.")].types
    return [
        value
        for kind, values in {"bool": ["true", "false"], "int": ["1", "2"], "float": ["0.5"]}.items()
        if kind in kinds
        for value in values
    ]


def test_key_without_effect_on_numbers_changes_no_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [key.name for key in all_keys()] + [f"training.{name}" for name in PASSED_EFFECTS]
    free = [name for name in dict.fromkeys(names) if not effect_of(name).affects & (DATA | NUMBERS | RESULT)]
    monkeypatch.setattr(ObservingChild, "computed", in_process)
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    write_sides(tmp_path)
    found: dict[str, CompareAnswer] = {}
    for name in free:
        for value in values_of(name):
            try:
                answer = compare_recipes("eval.yaml", f"{name}={value}", *(("training.global_batch_size=4",)))
            except FsdpTuneError:  # a value that this recipe or this machine does not allow
                continue
            if answer.keys:
                found[f"{name}={value}"] = answer
    different = {
        name: (answer.verdict, answer.first, answer.unsettled)
        for name, answer in found.items()
        if answer.verdict != "equal"
    }
    assert different == {}
    assert len(found) >= LEAST_TRIED
