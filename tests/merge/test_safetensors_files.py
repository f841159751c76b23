"""A merge reads the tensors of a base from the files from which transformers, and training, read them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fsdp_tune.core.errors import FailedError
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.merging import merge_checkpoint
from fsdp_tune.merge.read.base import read_base
from tests.model.shards import (
    INDEX,
    SHARDS,
    SOUND,
    index_of,
    save_two_shards,
    shards_in_a_folder,
    write_index,
)

NORM = "model.norm.weight"


@pytest.mark.parametrize("change", SOUND)
def test_base_is_read_as_transformers_reads_it(change: Callable[[Path], None], tmp_path: Path) -> None:
    change(save_two_shards(tmp_path))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    with ExitStack() as stack:
        found = read_base(stack, tmp_path).tensors
        for name, value in theirs.items():
            (chunk,) = found[name].chunks
            raw = found[name].files.read(chunk.place.file, chunk.place.first_byte, value.nbytes)
            assert torch.equal(
                torch.frombuffer(bytearray(raw), dtype=value.dtype).view(value.shape), value
            ), name


@pytest.mark.parametrize("change", SOUND)
def test_directory_of_another_tool_is_merged_as_transformers_reads_it(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    source = save_two_shards(tmp_path / "source")
    change(source)
    theirs = AutoModelForCausalLM.from_pretrained(source).state_dict()
    if "rotary_emb.inv_freq" in (source / INDEX).read_text():
        # of a checkpoint, it may be a part that was not copied
        with pytest.raises(FailedError, match="which no file holds"):
            merge_checkpoint(source, MergeOptions(output=tmp_path / "merged"))
        return
    merge_checkpoint(source, MergeOptions(output=tmp_path / "merged"))
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert [name for name, value in theirs.items() if not torch.equal(ours[name], value)] == []


def test_tensor_that_two_files_hold_and_the_index_does_not_name_is_refused(tmp_path: Path) -> None:
    source = save_two_shards(tmp_path / "source")
    write_index(source, {name: file for name, file in index_of(source).items() if name != NORM})
    for number, file in enumerate(SHARDS):
        save_file({**load_file(source / file), NORM: torch.full((64,), float(number))}, source / file)
    with pytest.raises(FailedError, match=f"`{NORM}` is in both `{SHARDS[0]}` and `{SHARDS[1]}`"):
        merge_checkpoint(source, MergeOptions(output=tmp_path / "merged"))


def test_folder_of_shards_that_is_a_link_to_outside_is_refused(tmp_path: Path) -> None:
    source = save_two_shards(tmp_path / "source")
    shards_in_a_folder(source)
    (source / "sub").rename(tmp_path / "elsewhere")
    (source / "sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FailedError) as caught:
        merge_checkpoint(source, MergeOptions(output=tmp_path / "merged"))
    assert caught.value.problems[0].code == "merge-path-traversal"
