"""The demo as users run it: `merged/` equals gathering the model and `save_pretrained`."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.merge.checkpoints import SHARDS, merged_tensors, same_bits

DEMO = (
    "--set",
    "training.max_steps=4",
    "--set",
    "training.save_steps=2",
    "--set",
    "training.logging_steps=2",
)


@pytest.mark.slow
@pytest.mark.parametrize("state_dict_type", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_demo_merge_equals_save_pretrained_of_gathered_model(state_dict_type, tmp_path):
    command = [sys.executable, "-m", "fsdp_tune", "train", "--config", "gpt2_smoke", *DEMO]
    command += ["--set", f"output_dir={tmp_path}/run", "--set", f"fsdp.state_dict_type={state_dict_type}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run, model = (
        Path(tmp_path, "run"),
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "run" / "model")),
    )
    if state_dict_type == "SHARDED_STATE_DICT":  # gathered by torch's own reader, in one process
        # tied: the embedding
        state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load({"model": state}, checkpoint_id=run / "checkpoint-4" / SHARDS, no_dist=True)
    else:
        state = load_file(run / "checkpoint-4" / "model.safetensors")
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (set(missing) <= {"lm_head.weight"}, unexpected) == (True, [])
    model.tie_weights()
    model.save_pretrained(tmp_path / "reference")
    ours, theirs = merged_tensors(run / "merged"), merged_tensors(tmp_path / "reference")
    assert ours.keys() == theirs.keys()
    assert all(same_bits(ours[name], theirs[name]) for name in theirs)
    loaded, report = AutoModelForCausalLM.from_pretrained(run / "merged", output_loading_info=True)
    assert not any(report.values())
    assert loaded.config.tie_word_embeddings == model.config.tie_word_embeddings
