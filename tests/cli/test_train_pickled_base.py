"""A base of several modalities in files of `torch.save`: trained on two ranks, and merged with all tensors that its class lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.cli.conftest import Cli
from tests.cli.small_runs import LORA
from tests.merge.checkpoints import merged_tensors, same_bits
from tests.merge.published import LAYOUTS

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.ranks]


def write_base(folder: Path) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
    """Write Qwen3.5 in two shards, with parts that its class lacks in other layouts and types. Returns its tensors, and these parts."""
    base = LAYOUTS["qwen3_5 + visual + mtp"](folder)
    state = load_file(folder / "model.safetensors")
    for number, name in enumerate(sorted(base.carried)):
        value = state[name].bfloat16() if number % 3 == 1 else state[name]
        state[name] = value.t().contiguous().t() if value.ndim == 2 and number % 2 else value
    names = sorted(state)
    weight_map = {name: f"pytorch_model-{1 + number % 2:05d}-of-00002.bin" for number, name in enumerate(names)}
    for file in set(weight_map.values()):
        torch.save({name: state[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return state, base.carried


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_extra_tensors_of_a_pickled_base_are_in_the_merged_model_byte_for_byte(kind: str, cli: Cli, tmp_path: Path) -> None:
    state, extras = write_base(tmp_path / "base")
    changes: dict[str, Any] = {"training": LORA["training"] | {"max_steps": 2}, "output_dir": str(tmp_path / "run")}
    changes["model"] = LORA["model"] | {"name_or_path": str(tmp_path / "base")}
    recipe = {key: value for key, value in LORA.items() if key != "lora" or kind == "lora"} | changes
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    done = cli("train", "--config", str(tmp_path / "recipe.yaml"))
    assert done.returncode == 0, done.stderr
    output = tmp_path / "run" / "merged"
    merged = merged_tensors(output)
    assert merged.keys() == state.keys()
    assert [name for name in extras if not same_bits(merged[name], state[name])] == []
    assert [name for name in state.keys() - extras if not torch.equal(merged[name], state[name])]
    named = json.loads((output / "config.json").read_text())["architectures"][0]
    assert named == "Qwen3_5ForConditionalGeneration"
    for model in (AutoModelForCausalLM, getattr(transformers, named)):
        _, report = model.from_pretrained(output, output_loading_info=True)
        assert {key: names for key, names in report.items() if names and key != "unexpected_keys"} == {}
        assert all(str(name).startswith(("mtp.", "model.visual.")) for name in report["unexpected_keys"])
