"""The weights that a run starts from are recorded at its first start and kept when it is resumed."""

from __future__ import annotations

from pathlib import Path

from fsdp_tune.recipe.schema.sections import Model
from fsdp_tune.run.base_model import identify_weights, weights_at_start
from fsdp_tune.run.records import Environment


def test_weights_of_a_directory_are_told_apart_by_their_content(tmp_path: Path) -> None:
    assert identify_weights(None, None) is None
    assert identify_weights(str(tmp_path), None) is None  # a run has its weights in checkpoints
    (tmp_path / "model.safetensors").write_bytes(b"one")
    first = identify_weights(str(tmp_path), None)
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert first is not None
    assert identify_weights(str(tmp_path), None) != first


def test_resumed_run_keeps_what_its_first_start_recorded(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"one")
    model, record = Model(name_or_path=str(tmp_path)), tmp_path / "environment.json"
    first = weights_at_start(None, model)
    Environment(base=first).write(record)
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert weights_at_start(record, model) == first
    assert weights_at_start(None, model) != first
    Environment().write(record)  # of an earlier version
    assert weights_at_start(record, model) == weights_at_start(None, model)
