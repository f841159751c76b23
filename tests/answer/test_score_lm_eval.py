"""lm_eval on a merged model: the same answers and likelihoods, row by row, as `evaluate` has."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RECIPE = """
model:
  from_config: {model_type: llama, vocab_size: 384, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4}
  config_overrides: {max_position_embeddings: 512}
  tokenizer: builtin:arithmetic
data:
  train: [{path: rows.jsonl, max_rows: 8, rename_columns: {question: prompt, answer: completion}}]
  append_eos: true
  max_length: 512
training: {global_batch_size: 8, per_device_train_batch_size: 8, max_steps: 120, learning_rate: 6.0e-3, warmup_steps: 10, report_to: []}
precision: {mixed_precision: no}
launch: {device: cpu, num_processes: 1}
output_dir: run
"""  # noqa: E501
TASKS = {
    "answers.yaml": """
task: answers
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer.split('####')[-1].strip()}}"
generation_kwargs: {until: ["<|endoftext|>"], do_sample: false, max_gen_toks: 200}
filter_list: [{name: answer, filter: [{function: regex, regex_pattern: "#### (.*)"}, {function: take_first}]}]
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "likelihoods.yaml": """
task: likelihoods
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false}]
""",
}
LM_EVAL = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager

found = lm_eval.simple_evaluate(
    model="hf", model_args="pretrained=run/merged,dtype=float32", tasks=["answers", "likelihoods"], device="cpu", batch_size=4,
    task_manager=TaskManager(include_path="tasks"), bootstrap_iters=0, log_samples=True,
)
samples = found["samples"]
json.dump({
    "exact_match": found["results"]["answers"]["exact_match,answer"],
    "answers": {each["doc_id"]: each["resps"][0][0] for each in samples["answers"]},
    "likelihoods": {each["doc_id"]: each["resps"][0][0][0] for each in samples["likelihoods"]},
}, open("lm_eval.json", "w"))
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval (`pip install fsdp-tune[eval]`)"
)
def test_lm_eval_agrees_row_by_row(repository: Path, tmp_path: Path) -> None:
    data = next(
        (
            path
            for parent in repository.parents
            if (path := parent / "shared/data/gsm8k/train.jsonl").is_file()
        ),
        None,
    )
    if data is None:
        pytest.skip("needs GSM8K in ../shared/data")
    rows = [line for line in data.read_text(encoding="utf-8").splitlines() if len(line) < 330][:12]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    # lm_eval scores no EOS
    (tmp_path / "without_eos.yaml").write_text(RECIPE.replace("append_eos: true", "append_eos: false"))
    (tmp_path / "tasks").mkdir()
    for name, text in TASKS.items():
        (tmp_path / "tasks" / name).write_text(text)
    fsdp_tune = ("-m", "fsdp_tune")
    run(tmp_path, *fsdp_tune, "train", "recipe.yaml")
    exact = ("--metric", "exact_match", "--answer", "#### (.*)", "--max-new-tokens", "200")
    found = run(
        tmp_path,
        *fsdp_tune,
        "evaluate",
        "run/merged",
        "--config",
        "recipe.yaml",
        "--data",
        "rows.jsonl",
        *exact,
        "--out",
        "answers.jsonl",
    )
    run(
        tmp_path,
        *fsdp_tune,
        "evaluate",
        "run/merged",
        "--config",
        "without_eos.yaml",
        "--data",
        "rows.jsonl",
        "--out",
        "likelihoods.jsonl",
    )
    run(tmp_path, "-c", LM_EVAL)
    other = json.loads((tmp_path / "lm_eval.json").read_text())
    value = found["sets"]["rows.jsonl"]["metric"]["value"]
    assert 0.0 < value < 1.0, "eight of the twelve rows are trained"
    assert other["exact_match"] == value
    for number, (answer, likelihood) in enumerate(
        zip(lines(tmp_path / "answers.jsonl"), lines(tmp_path / "likelihoods.jsonl"), strict=True)
    ):
        assert other["answers"][str(number)].strip() == answer["prediction"].strip()
        assert -other["likelihoods"][str(number)] == pytest.approx(likelihood["total"], rel=1e-5)


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, *arguments, *(["--json"] if arguments[0] == "-m" else [])]
    done = subprocess.run(
        command, cwd=folder, env=os.environ, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if arguments[0] == "-m" else {}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
