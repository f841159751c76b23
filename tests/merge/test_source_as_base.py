"""A merged model has the names and shapes of the base's files, and transformers 5 reads the trained weights
in them, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from fsdp_tune.core.tensors.dtypes import DTYPES
from fsdp_tune.merge.copy import gather, write
from fsdp_tune.merge.copy.as_base import _is_inside
from fsdp_tune.merge.read.reader import SourceTensor
from fsdp_tune.run.base_model import Piece
from tests.architectures.tiny import config_of, known, make_model
from tests.data.test_tokenizer import write_base as write_tokenizer
from tests.exports.case import write_run
from tests.merge.checkpoints import SHARDS, finish_checkpoint, merged_tensors, same_bits, save_on_ranks
from tests.model.families import FAMILIES

ROWS = 300
IDS = torch.tensor([[5, 17, 40, 3, 99, 101, 7, 64]])
FAST = ("mixtral", "gpt_neox", *known("granitemoe", "jamba", "sarvam_moe", "hrm_text"))
SLOW = ("llama", "gpt_oss", "qwen2_moe", *known("phimoe", "qwen3_moe", "olmoe", "aria_text", "deepseek_v3"))
"""The layouts of their files are compared in tests/model/test_saved_layout.py."""


def base_of(family: str, folder: Path, **changes: Any) -> Path:
    fields = FAMILIES[family] if family in FAMILIES else config_of(family) | {"output_router_logits": False}
    make_model(fields | {"vocab_size": ROWS} | changes, folder)
    write_tokenizer(folder)
    return folder


def assert_exported_as_base(merged: Path, base: Path, trained: dict[str, torch.Tensor]) -> None:
    stored, found = merged_tensors(base), merged_tensors(merged)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()
    }
    model, report = AutoModelForCausalLM.from_pretrained(merged, dtype="auto", output_loading_info=True)
    assert not any(report.values())
    expected = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    expected.load_state_dict(trained)
    assert all(same_bits(tensor, trained[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(IDS, use_cache=False).logits, expected(IDS, use_cache=False).logits)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "family", [*FAST, *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW)]
)
def test_merged_model_has_names_and_shapes_of_the_base(family: str, merge: Any, tmp_path: Path) -> None:
    base = base_of(family, tmp_path / "base")
    run, trained = write_run(base, tmp_path)
    assert_exported_as_base(merge(run, dtype="keep").output, base, trained)


@pytest.mark.parametrize(
    ("shape", "is_whole"), [((4, 6, 3), True), ((4, 5, 3), False), ((4, 6, 2), False), ((6, 3), False)]
)
def test_piece_that_a_parameter_does_not_hold_is_not_read(shape: tuple[int, ...], is_whole: bool) -> None:
    piece = Piece("experts", start=(3, 2, 0), axes=(1, 2), sizes=(4, 3), position=(0, 0))
    parameter = SourceTensor("experts", DTYPES["float32"], shape, chunks=(), files=None)  # type: ignore[arg-type]  # nothing is read
    assert _is_inside(piece, parameter) == is_whole


@pytest.mark.parametrize(("ranks", "dimension"), [(3, 0), (5, 1), (2, 2)])
def test_experts_are_gathered_from_the_parts_of_all_ranks(
    ranks: int, dimension: int, merge: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    for module in (gather, write):
        monkeypatch.setattr(module, "BUFFER_BYTES", 4096)
    base = base_of("mixtral", tmp_path / "base")
    run, trained = write_run(base, tmp_path)

    def state_of(_: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (ranks,))
        return {
            "model": {
                name: distribute_tensor(t, mesh, [Shard(min(dimension, t.ndim - 1))])
                for name, t in trained.items()
            }
        }

    save_on_ranks(ranks, run / "checkpoint-2" / SHARDS, state_of)
    finish_checkpoint(run / "checkpoint-2", 2)
    assert_exported_as_base(merge(run, step=2, dtype="keep", verify="full").output, base, trained)


def test_base_with_the_names_of_the_model_keeps_them(merge: Any, tmp_path: Path) -> None:
    base = base_of("mixtral", tmp_path / "base")
    own = AutoModelForCausalLM.from_pretrained(base).state_dict()
    save_file(
        {name: tensor.contiguous() for name, tensor in own.items()},
        base / "model.safetensors",
        {"format": "pt"},
    )
    run, trained = write_run(base, tmp_path)
    assert_exported_as_base(merge(run, dtype="keep").output, base, trained)


def test_run_without_a_base_is_exported_as_save_pretrained_writes(merge: Any, tmp_path: Path) -> None:
    fields = tmp_path / "config.json"
    fields.write_text(json.dumps(FAMILIES["mixtral"] | {"vocab_size": ROWS}))
    base = base_of("mixtral", tmp_path / "base")
    run, trained = write_run(base, tmp_path, name_or_path=None, from_config=str(fields), tokenizer=str(base))
    assert_exported_as_base(merge(run, dtype="keep").output, base, trained)


def test_average_shards_and_dtype_apply_to_single_experts(merge: Any, tmp_path: Path) -> None:
    base = base_of("mixtral", tmp_path / "base")
    run, trained = write_run(base, tmp_path)
    save_on_ranks(
        1,
        run / "checkpoint-2" / SHARDS,
        lambda _: {"model": {name: 3 * tensor for name, tensor in trained.items()}},
    )
    finish_checkpoint(run / "checkpoint-2", 2)
    output = merge(run, average="1,2", dtype="bf16", max_shard_bytes=40_000, verify="full").output
    found = merged_tensors(output)
    assert found.keys() == merged_tensors(base).keys()
    assert len(list(output.glob("model-*.safetensors"))) > 2
    expert = trained["model.layers.1.mlp.experts.gate_up_proj"][2]
    assert torch.equal(
        found["model.layers.1.block_sparse_moe.experts.2.w3.weight"], (2 * expert[48:]).bfloat16()
    )


def test_run_without_a_record_of_the_base_is_merged_with_the_names_of_the_model(
    merge: Any, tmp_path: Path
) -> None:
    run, trained = write_run(base_of("mixtral", tmp_path / "base"), tmp_path)
    (run / "model" / "base_layout.json").unlink()
    assert merged_tensors(merge(run, dtype="keep").output).keys() == trained.keys()


def test_tied_head_of_another_name_is_left_out(merge: Any, tmp_path: Path) -> None:
    base = base_of("gpt_neox", tmp_path / "base", tie_word_embeddings=True)
    run, trained = write_run(base, tmp_path)
    output = merge(run, dtype="keep").output
    assert_exported_as_base(output, base, trained)
    assert json.loads((output / "merge.json").read_bytes())["tied"] == {
        "embed_out.weight": "gpt_neox.embed_in.weight"
    }


ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "a head of an older name, trained in full": (
        "gpt_neox",
        {"target_modules": ["query_key_value"], "modules_to_save": ["lm_head"]},
    ),
    "a head of an older name": ("gpt_neox", {"target_modules": ["query_key_value", "lm_head"]}),
    "experts of an older name": (
        "granitemoe",
        {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    "experts apart": (
        "phimoe",
        {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
}


# Without the record, a base that has no experts of the name in the adapter is refused.
ADAPTED = [(case, True) for case in ADAPTERS] + [
    (case, False) for case in ADAPTERS if case != "experts of an older name"
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("case", "has_record"), ADAPTED)
def test_adapter_is_added_to_what_has_another_name_in_the_base(
    case: str, has_record: bool, merge: Any, tmp_path: Path
) -> None:
    family, lora = ADAPTERS[case]
    base = base_of(family, tmp_path / "base")
    run, _ = write_run(base, tmp_path, lora={"r": 2, "target_modules": ["q_proj"], **lora})
    adapter = merge(run, adapter=True, output=tmp_path / "adapter").output
    if not has_record:
        (run / "model" / "base_layout.json").unlink()
    merged = merge(run, dtype="keep").output
    assert merged_tensors(merged).keys() == merged_tensors(base).keys()
    with torch.no_grad():
        expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)(
            IDS, use_cache=False
        ).logits
        torch.testing.assert_close(
            AutoModelForCausalLM.from_pretrained(merged)(IDS, use_cache=False).logits, expected
        )
