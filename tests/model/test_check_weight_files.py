"""`validate` reports weights that are missing, pointers or cut off, without reading them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.loading import check_weight_files as check_weight_files_module
from fsdp_tune.model.loading.check_weight_files import check_weight_files
from fsdp_tune.model.loading.construct import build_full
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.loading.weight_slices import find_weight_files, read_tensors
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 135000000\n"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["llama"]))
    return tmp_path


def problems(base: Path, **sections: Any) -> list[tuple[str, str]]:
    found = check_weight_files(recipe_of({"name_or_path": str(base)}, **sections))
    return [(problem.code, Path(str(problem.where.source)).name) for problem in found]


def write_shards(base: Path, names: list[str], there: list[str]) -> None:
    (base / INDEX).write_text(
        json.dumps({"weight_map": {f"w{number}": name for number, name in enumerate(names)}})
    )
    for number, name in enumerate(names):
        if name in there:
            save_file({f"w{number}": torch.zeros(2)}, base / name)


def test_sound_files_have_no_problem(base: Path) -> None:
    save_file({"w": torch.zeros(2)}, base / SINGLE)
    assert problems(base) == []
    (base / SINGLE).unlink()
    write_shards(base, ["a.safetensors", "b.safetensors"], ["a.safetensors", "b.safetensors"])
    assert problems(base) == []


@pytest.mark.parametrize("name", [SINGLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_pointer_of_git_lfs_is_reported(name: str, base: Path) -> None:
    (base / name).write_bytes(POINTER)
    assert problems(base) == [("model-weights-pointer", name)]


def test_file_that_cannot_be_read_is_reported(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(base, ["a.safetensors", "b.safetensors"], ["a.safetensors", "b.safetensors"])
    original = check_weight_files_module._first_bytes

    def refuse(file: Path) -> bytes:
        if file.name == "b.safetensors":
            raise PermissionError(13, "Permission denied", str(file))
        return original(file)

    monkeypatch.setattr(check_weight_files_module, "_first_bytes", refuse)
    assert problems(base) == [("model-weights-unreadable", "b.safetensors")]


def test_pointer_among_shards_is_reported(base: Path) -> None:
    write_shards(base, ["a.safetensors", "b.safetensors"], ["a.safetensors"])
    (base / "b.safetensors").write_bytes(POINTER)
    assert problems(base) == [("model-weights-pointer", "b.safetensors")]


def test_absent_shard_is_reported(base: Path) -> None:
    write_shards(base, [f"{number}.safetensors" for number in range(6)], ["1.safetensors"])
    [problem] = check_weight_files(recipe_of({"name_or_path": str(base)}))
    assert (problem.code, problem.where.source) == ("model-weights-missing", str(base / INDEX))
    assert (
        "6 files of weights, and 5 are not there: `0.safetensors`, `2.safetensors`, `3.safetensors`, …"
        in problem.message
    )


@pytest.mark.parametrize("content", [b"", b"<html>", b"<!DOCTYPE html><html>", b"\xff" * 64, b"\0" * 8])
def test_file_that_is_not_weights_is_reported(content: bytes, base: Path) -> None:
    (base / SINGLE).write_bytes(content)
    assert problems(base) == [("model-weights-damaged", SINGLE)]


def test_file_cut_inside_its_header_is_reported(base: Path) -> None:
    save_file({"w": torch.zeros(2)}, base / SINGLE)
    (base / SINGLE).write_bytes((base / SINGLE).read_bytes()[:40])
    assert problems(base) == [("model-weights-damaged", SINGLE)]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}'])
def test_damaged_index_is_reported(text: str, base: Path) -> None:
    (base / INDEX).write_text(text)
    assert problems(base) == [("model-weights-damaged", INDEX)]


def test_index_that_leads_out_of_the_directory_is_reported(base: Path) -> None:
    save_file({"w0": torch.zeros(2)}, base.parent / "outside.safetensors")
    write_shards(base, ["../outside.safetensors"], [])
    assert problems(base) == [("model-weights-damaged", INDEX)]
    with pytest.raises(FsdpTuneError, match="not a file in this directory"):
        find_weight_files(recipe_of({"name_or_path": str(base)}))


def test_file_that_config_json_names_and_that_is_not_there_is_reported(base: Path) -> None:
    save_file({"w": torch.zeros(2)}, base / SINGLE)
    (base / "config.json").write_text(
        json.dumps(FAMILIES["llama"] | {"transformers_weights": "own.safetensors"})
    )
    assert problems(base) == [("model-weights-missing", "config.json")]
    (base / "config.json").write_text(
        json.dumps(FAMILIES["llama"] | {"transformers_weights": "own.safetensors.index.json"})
    )
    assert problems(base) == [("model-weights-damaged", "config.json")]


def test_configuration_alone_has_no_problem(base: Path) -> None:
    """It can be planned."""
    assert problems(base) == []


def test_pointer_in_place_of_an_adapter_is_reported(base: Path, tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, base / SINGLE)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(POINTER)
    assert problems(base, lora={"r": 4, "adapter": str(adapter)}) == [
        ("model-weights-pointer", "adapter_model.safetensors")
    ]


def test_inspection_has_the_problems_of_weight_files(base: Path) -> None:
    (base / SINGLE).write_bytes(POINTER)
    document = find_facts(
        recipe_of({"name_or_path": str(base)}, data={"train": [{"path": "x"}], "max_length": 64})
    )
    assert [problem.code for problem in document.problems] == ["model-weights-pointer"]


def test_codes_of_a_file_are_not_kept_for_a_later_load(base: Path) -> None:
    """A process that loads twice would mix two bases, and ranks would hold codes while they train."""
    recipe = recipe_of({"name_or_path": str(base)})
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**FAMILIES["llama"])).save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": -1}
    (base / "config.json").write_text(json.dumps(config))
    others = load_file(base / SINGLE)
    name = "model.layers.0.mlp.up_proj.weight"
    out, inputs = others.pop(name).shape
    owner = name.removesuffix("weight")
    codes = {
        f"{owner}qweight": torch.randint(1 << 30, (inputs // 8, out)).int(),
        f"{owner}qzeros": torch.zeros(1, out // 8).int(),
    }

    def read() -> torch.Tensor:
        files, target = find_weight_files(recipe), torch.empty(out, inputs)
        assert files is not None
        read_tensors({name: target}, files)
        return target

    for load in (read, lambda: build_full(recipe).get_parameter(name).detach()):
        values: list[torch.Tensor] = []
        for scale in (1, 2):
            save_file(
                {**others, **codes, f"{owner}scales": torch.full((1, out), scale).half()},
                base / SINGLE,
                {"format": "pt"},
            )
            values.append(load().float())
        assert torch.equal(values[1], 2 * values[0])
