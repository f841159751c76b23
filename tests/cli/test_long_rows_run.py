"""A run with `model.rope_scaling`: resumed, refused with another factor, merged, and evaluated by transformers with the same loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli, document
from tests.model.families import FAMILIES

RECIPE: dict[str, Any] = {
    "model": {
        "from_config": FAMILIES["llama"] | {"vocab_size": 328, "max_position_embeddings": 16},
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "tokenizer": "builtin:arithmetic",
    },
    "data": {"train": [{"path": "builtin:arithmetic", "max_rows": 64}], "eval": {"rows": 8}, "max_length": 64, "packing": True},
    "precision": {"mixed_precision": "no"},
    "training": {"max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2, "report_to": []},
    "merge": {"dtype": "fp32"},
    "launch": {"device": "cpu", "num_processes": 2},
    "output_dir": "run",
}


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.ranks
def test_merged_model_has_the_scaling_and_the_loss_of_the_run(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(json.dumps(RECIPE))
    trained = cli("train", "--config", "recipe.yaml", "--json")
    assert trained.returncode == 0, trained.stderr
    assert "positions-never-trained" not in trained.stdout
    merged = Path(document(trained)["merged"]) / "config.json"
    config = json.loads(merged.read_text())
    assert config["max_position_embeddings"] == 64
    assert (
        config["rope_parameters"] | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
        == config["rope_parameters"]
    )

    changed = cli("train", "--config", "recipe.yaml", "--resume", "auto", "--set", "model.rope_scaling.factor=8", "--json")
    assert (changed.returncode, [error["code"] for error in document(changed)["errors"]]) == (2, ["resume-refused"])

    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = [line["eval_loss"] for line in logged if "eval_loss" in line][-1]
    (found,) = document(cli("evaluate", "run", "--json"))["sets"].values()
    assert found["loss"]["value"] == pytest.approx(expected, rel=1e-6)

    del config["rope_parameters"]
    merged.write_text(json.dumps(config))
    (other,) = document(cli("evaluate", "run", "--json"))["sets"].values()
    assert other["loss"]["value"] != pytest.approx(expected, rel=1e-6), "a config.json without the scaling is another model"
