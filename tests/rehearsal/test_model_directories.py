"""A merged directory is compared with the checkpoint that it was made of, without code of the merge."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from fsdp_tune.core.tensors.peft_names import PREFIX
from fsdp_tune.data.store import RowStore
from fsdp_tune.model.adapters.nf4 import SCALE_DTYPE, dequantise, quantise
from fsdp_tune.rehearsal.parity import model_directories
from fsdp_tune.rehearsal.parity.plain_loop import evaluate
from fsdp_tune.run.base_model import BaseModel
from fsdp_tune.run.directory import SHARD_FOLDER, RunDir
from tests.data.support import prepared, write_jsonl
from tests.merge.checkpoints import save_dcp

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
}
STEP = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "base"
    assert model_directories.write_model(CONFIG, str(folder)) == {"folder": str(folder)}
    return folder


@pytest.fixture
def run(tmp_path: Path, base: Path) -> RunDir:
    """A run with its rows, whose checkpoint and merged model are the base."""
    made = RunDir(tmp_path / "run")
    made.checkpoint(STEP).mkdir(parents=True)
    shutil.copytree(base, made.merged)
    tokenizer().save_pretrained(made.merged)
    made.model.mkdir()
    shutil.copy(base / "config.json", made.model)
    weights = load_file(base / "model.safetensors")
    save_file(weights, made.checkpoint(STEP) / "model.safetensors")
    found = prepared(tmp_path, write_jsonl(tmp_path / "rows.jsonl", [{"text": "abc"}, {"text": "defghi"}]))
    made.data_json.write_text(json.dumps({"train": found.train, "evals": {"held out": found.train}}))
    made.recipe_json.write_text(json.dumps({"precision": {"mixed_precision": "no"}}))
    return made


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))


def test_written_model_is_the_same_each_time(base: Path, tmp_path: Path) -> None:
    """The base of an adapter is written by each of two rehearsals."""
    model_directories.write_model(CONFIG, str(tmp_path / "again"))
    one, other = (folder / "model.safetensors" for folder in (base, tmp_path / "again"))
    assert one.read_bytes() == other.read_bytes()


def test_merged_model_of_a_checkpoint_has_its_logits(run: RunDir) -> None:
    found = model_directories.reload(run, STEP)
    assert found == {
        "rows": 2,
        "logits_equal": True,
        "logits_difference": 0.0,
        "eval_loss": None,
        "run_eval_loss": None,
        "tolerance": model_directories.FP32_TOLERANCE,
    }
    weights = load_file(run.checkpoint(STEP) / "model.safetensors")
    weights["model.norm.weight"][3] += 0.01
    save_file(weights, run.checkpoint(STEP) / "model.safetensors")
    found = model_directories.reload(run, STEP)
    assert not found["logits_equal"]
    assert 0.0 < float(str(found["logits_difference"])) < 0.1


def test_eval_loss_of_the_merged_model_is_computed_where_the_run_has_one(run: RunDir) -> None:
    lines = [{"step": 2, "eval_loss": 9.0}, {"step": 4, "eval_loss": 5.5}, {"step": 4, "loss": 1.0}]
    run.metrics_jsonl.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run.recipe_json.write_text(json.dumps({"precision": {"mixed_precision": "bf16"}}))
    found = model_directories.reload(run, STEP)
    store = RowStore(json.loads(run.data_json.read_text())["train"])
    model = AutoModelForCausalLM.from_pretrained(run.merged).eval()
    assert found["eval_loss"] == evaluate(model, torch.float32, [store])
    assert found["run_eval_loss"] == 5.5, "the last one"
    assert found["tolerance"] == model_directories.HALF_TOLERANCE


def test_checkpoint_without_a_tensor_of_the_model_is_not_compared(run: RunDir) -> None:
    weights = load_file(run.checkpoint(STEP) / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, run.checkpoint(STEP) / "model.safetensors")
    with pytest.raises(AssertionError, match=r"model\.norm\.weight"):
        model_directories.reload(run, STEP)
    save_file(weights | {"model.more": torch.zeros(2)}, run.checkpoint(STEP) / "model.safetensors")
    with pytest.raises(AssertionError, match=r"model\.more"):
        model_directories.reload(run, STEP)


def test_sharded_checkpoint_is_read_by_torch(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    save_dcp({"model": tensors, "other": {"c": torch.ones(1)}}, tmp_path / SHARD_FOLDER)
    found = model_directories.checkpoint_tensors(tmp_path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("scales", [None, "bf16"])
def test_adapter_is_merged_into_the_base_that_it_was_trained_on(run: RunDir, base: Path, scales: Any) -> None:
    """With `quantization.load` that is the base in 4 bits, and not the one of the files."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    weight = "model.layers.0.mlp.up_proj.weight"
    if scales is not None:
        model.get_parameter(weight).data = dequantise(
            *quantise(model.get_parameter(weight), SCALE_DTYPE[scales]), torch.float32
        )
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["up_proj"], base_model_name_or_path=str(base))
    torch.manual_seed(1)
    adapted: Any = get_peft_model(model, config)
    trained = {name: torch.randn_like(p) for name, p in adapted.named_parameters() if p.requires_grad}
    adapted.load_state_dict(trained, strict=False)
    save_file(
        {name.removeprefix(PREFIX): value for name, value in trained.items()},
        run.checkpoint(STEP) / "model.safetensors",
    )
    BaseModel(str(base), nf4_weights=(weight,) if scales else (), nf4_scales=scales).write(run.base_json)
    values = {name: value for name, value in asdict(config).items() if isinstance(value, str | int | list)}
    values |= {"target_modules": ["up_proj"], "peft_type": "LORA"}
    (run.model / "adapter_config.json").write_text(json.dumps(values))
    adapted.merge_and_unload().save_pretrained(run.merged)
    found = model_directories.reload(run, STEP)
    assert found["logits_equal"], found
    BaseModel(
        str(base), nf4_weights=() if scales else (weight,), nf4_scales=None if scales else "fp32"
    ).write(run.base_json)
    found = model_directories.reload(run, STEP)
    assert not found["logits_equal"], "the base is another one"


@pytest.mark.parametrize("request_of", ["config", "run"])
def test_script_prints_one_document_and_what_libraries_print_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request_of: str
) -> None:
    calls: list[object] = []

    def answer(*given: object) -> dict[str, object]:
        print("a library prints this")
        calls.append(given)
        return {"folder": "there"}

    monkeypatch.setattr(model_directories, "write_model", answer)
    monkeypatch.setattr(model_directories, "reload", answer)
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    requests = {"config": {"config": {"a": 1}, "folder": "x"}, "run": {"run": str(tmp_path), "step": "4"}}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(requests[request_of])))
    model_directories.main()
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"folder": "there"}
    assert printed.err == "a library prints this\n"
    assert calls == [1, ({"a": 1}, "x") if request_of == "config" else (RunDir(tmp_path), 4)]
