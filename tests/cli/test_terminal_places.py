"""A problem with the model that a key of the recipe causes is reported with the line of that key, by every
command that finds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Cli, document

RECIPE = """\
model:
  from_config: {model_type: gpt2, n_positions: 64, n_layer: 2, n_embd: 32, n_head: 2}
  tokenizer: builtin:arithmetic
data:
  train: [{path: builtin:arithmetic}]
  max_length: 128
launch: {device: cpu, num_processes: 2}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "verb",
    ["train", *(pytest.param(verb, marks=pytest.mark.slow) for verb in ("validate", "plan", "rehearse"))],
)
def test_model_error_has_line_of_its_key(verb: str, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    done = cli(verb, "--config", "recipe.yaml", "--json")
    assert done.returncode == 2, done.stderr
    found = [(error["code"], error["file"], error["line"]) for error in document(done)["errors"]]
    assert found == [("max-length-beyond-positions", "recipe.yaml", 6)]
