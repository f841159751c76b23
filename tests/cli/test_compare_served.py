"""`compare RUN http://…` of a run that was trained, whose rows are the prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import Cli, document
from tests.comparison.small_server import Planted, serving, write_model


@pytest.mark.slow
@pytest.mark.e2e
def test_run_is_compared_with_a_server_of_its_model(cli: Cli, tmp_path: Path) -> None:
    write_model(tmp_path / "base")  # a Llama: the server here loads no other model
    recipe: dict[str, Any] = {
        "model": {"name_or_path": str(tmp_path / "base")},
        "data": {"train": [{"path": "builtin:arithmetic"}], "max_length": 48},
        "training": {"global_batch_size": 8, "per_device_train_batch_size": 8, "max_steps": 2},
        "launch": {"num_processes": 1, "device": "cpu"},
        "merge": {"dtype": "fp32"},
        "output_dir": "run",
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    trained = cli("train", "recipe.yaml")
    assert trained.returncode == 0, trained.stderr
    for scale in (1.0, 1.5):
        with serving(tmp_path / "run" / "merged", Planted("vLLM", echoes=True, scale=scale)) as (url, _):
            done = cli("compare", "run", url, "--max-new-tokens", "4", "--json")
        found = document(done)
        status = {stage["name"]: stage["status"] for stage in found["stages"]}
        assert done.returncode == (0 if scale == 1.0 else 1), done.stderr
        assert found["equal"] is (scale == 1.0)
        assert found["a"]["name"] == "run"
        assert status["prompt_tokens"] == "equal"
        assert status["logprobs"] == ("equal" if scale == 1.0 else "different")
        assert found["served"]["scored_tokens"] > 10
