"""What an older stack reads of an export: bases that transformers 4 wrote, changed facts, adapters.

`scripts/test --suite exports` names the interpreter.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.architectures.tiny import config_of, make_model
from tests.data.test_tokenizer import write_base as write_tokenizer
from tests.evidence import Results
from tests.exports.case import IDS, TEXT, Job, differences, load_with, train_and_export
from tests.exports.older import describe
from tests.exports.page import page

PYTHON = os.environ.get("FSDP_TUNE_OLDER_PYTHON")
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)
older_stack = pytest.mark.skipif(
    PYTHON is None, reason="scripts/test --suite exports runs it with the other environment"
)
GENERATION = {
    "bos_token_id": 1,
    "eos_token_id": [2, 5],
    "temperature": 0.7,
    "top_k": 20,
    "do_sample": True,
    "transformers_version": "4.51.3",
}
LINEAR = {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}


def old_base(folder: Path, name: str, **fields: Any) -> Path:
    """Write a model directory as transformers 4 does: its fields in config.json, and its classes in
    tokenizer_config.json."""
    base = make_model(config_of(name) | {"vocab_size": 300, "max_position_embeddings": 128}, folder)
    write_tokenizer(base)
    path = base / "config.json"
    config = {
        key: value
        for key, value in json.loads(path.read_text()).items()
        if key not in ("rope_parameters", "dtype")
    }
    path.write_text(
        json.dumps(config | {"torch_dtype": "float32", "transformers_version": "4.51.3", **fields})
    )
    (base / "generation_config.json").write_text(json.dumps(GENERATION))
    return base


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "unchanged": ("llama", LINEAR, {}),
    "two frequencies": ("gemma3_text", {"rope_theta": 1e6, "rope_local_base_freq": 20000.0}, {}),
    "part of the dimensions": ("phi", {"rope_theta": 30000.0, "partial_rotary_factor": 0.5}, {}),
    "scaled": ("llama", {"rope_theta": 5e5}, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    "scaled in one type of layers": (
        "gemma3_text",
        {"rope_theta": 1e6},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "other tokens": ("qwen3", {"rope_theta": 1e6}, {"tokens": {"eos": "<|endoftext|>"}}),
    "added tokens": ("llama", LINEAR, {"tokens": {"add": ["<new>"]}, "resize_embeddings": True}),
}


@pytest.mark.slow
@older_stack
@pytest.mark.parametrize("case", CASES)
def test_older_stack_reads_what_was_trained(case: str, tmp_path: Path) -> None:
    name, fields, changes = CASES[case]
    merged = train_and_export(old_base(tmp_path / "base", name, **fields), tmp_path / "full", **changes)
    jobs = [Job("full", merged)]
    if not changes:
        jobs.append(
            Job(
                "adapter",
                tmp_path / "base",
                train_and_export(tmp_path / "base", tmp_path / "adapter", lora=True),
            )
        )
    for job, old in zip(jobs, load_with(Path(str(PYTHON)), jobs, tmp_path), strict=True):
        new = describe(str(job.folder), str(job.adapter) if job.adapter else None, IDS, TEXT)
        assert differences(new, old) == [], job.name
        assert new["generation"]["temperature"] == 0.7


def test_differences_are_described() -> None:
    one = {"logits": [1.0, 2.0], "generation": {"top_k": None, "temperature": 0.5}, "tokens": {"ids": [1]}}
    assert differences(one, one | {"generation": {"top_k": 50, "temperature": 0.5}}) == []
    other = {"logits": [1.0, 2.1], "generation": {"top_k": 20, "temperature": 0.5}, "tokens": {"ids": [2]}}
    assert differences(one, other) == [
        "logits differ by 5.0e-02",
        "generation setting `top_k`: None and 20",
        "ids of the tokenizer: [1] and [2]",
    ]
    assert differences(one, {"error": "KeyError: x"}) == ["older: KeyError: x"]


ABOUT = {"new": "5", "old": "4", "not_run": []}


def test_page_has_results_and_reasons() -> None:
    rows = [
        {"architecture": "a", "full": [], "adapter": ["logits | differ"], "not_tried": {}},
        {"architecture": "apertus", "full": ["logits differ by 5.0e-04"], "adapter": None, "not_tried": {}},
        {"architecture": "b", "full": None, "adapter": None, "not_tried": {"full": "why"}},
    ]
    text = page(Results(ABOUT, rows))
    assert "The adapter alone of `a`: logits | differ." in text
    assert "No adapter could be made for `apertus`." in text
    assert "No tiny model could be made of `b`." in text
    assert "1 of 2 merged models are equal in both, and 0 adapters; 1 architectures were not tried" in text
    assert "| `apertus` | logits differ by 5.0e-04 | transformers 4 keeps" in text
    assert "which were not run: `c`." in page(Results(ABOUT | {"not_run": ["c"]}, rows[:1]))
