"""`compare RUN http://…` of a run that was trained, whose rows are the prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.check.comparison.small_server import Planted, serving
from tests.cli.conftest import Cli, document


@pytest.mark.slow
@pytest.mark.e2e
def test_run_is_compared_with_a_server_of_its_model(cli: Cli, tmp_path: Path) -> None:
    keys = {"training.max_steps": 2, "launch.num_processes": 1, "launch.device": "cpu", "output_dir": "run", "merge.dtype": "fp32"}
    trained = cli("train", "--config", "gpt2_smoke", *(part for key, value in keys.items() for part in ("--set", f"{key}={value}")))
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
