"""Model directories whose weights are in unusual files, all of which transformers reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.model.families import FAMILIES

SINGLE, INDEX, SHARDS = (
    "model.safetensors",
    "model.safetensors.index.json",
    ("a.safetensors", "b.safetensors"),
)


def save_two_shards(folder: Path) -> Path:
    """Save a small model in two shards and an index, with the second half of the tensors in the second
    one."""
    folder.mkdir(exist_ok=True)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**FAMILIES["llama"])).save_pretrained(folder)
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    for file, half in zip(SHARDS, halves, strict=True):
        save_file({name: tensors[name] for name in half}, folder / file, metadata={"format": "pt"})
    write_index(folder, {name: file for file, half in zip(SHARDS, halves, strict=True) for name in half})
    return folder


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def index_of(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def newer_single_file(folder: Path) -> None:
    save_file(
        {name: value + 1 for file in SHARDS for name, value in load_file(folder / file).items()},
        folder / SINGLE,
        metadata={"format": "pt"},
    )


def single_file_and_no_shards(folder: Path) -> None:
    newer_single_file(folder)
    for file in SHARDS:
        (folder / file).unlink()


def named_in_config(folder: Path) -> None:
    newer_single_file(folder)
    (folder / SINGLE).rename(folder / "own.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "own.safetensors"}))


def shards_in_a_folder(folder: Path) -> None:
    (folder / "sub").mkdir()
    for file in SHARDS:
        (folder / file).rename(folder / "sub" / file)
    write_index(folder, {name: f"sub/{file}" for name, file in index_of(folder).items()})


def index_with_more_names(folder: Path) -> None:
    write_index(folder, index_of(folder) | {"model.layers.0.self_attn.rotary_emb.inv_freq": SHARDS[0]})


def index_with_fewer_names(folder: Path) -> None:
    write_index(folder, {name: file for name, file in index_of(folder).items() if "norm" not in name})


def copies_in_the_first_shard(folder: Path) -> None:
    """At other offsets; the index names the first shard for all tensors."""
    first, second = (load_file(folder / file) for file in SHARDS)
    save_file({**first, **second}, folder / SHARDS[0], metadata={"format": "pt"})
    write_index(folder, dict.fromkeys([*first, *second], SHARDS[0]))


SOUND: list[Callable[[Path], None]] = [
    *(newer_single_file, single_file_and_no_shards, named_in_config, shards_in_a_folder),
    *(index_with_more_names, index_with_fewer_names, copies_in_the_first_shard),
]
