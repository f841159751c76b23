"""The files of a model's weights are found in the order of transformers, and a tensor that two of them hold
is noticed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers.modeling_utils import _get_resolved_checkpoint_files

from fsdp_tune.core.tensors.weight_files import (
    INDEX,
    PICKLED,
    PICKLED_INDEX,
    SINGLE,
    HeldTwice,
    UnusableIndexError,
    WeightList,
    find_weight_list,
    read_index,
)

NAMED = "own.safetensors"
FILES: dict[str, str] = {
    SINGLE: "",
    INDEX: json.dumps(
        {"metadata": {}, "weight_map": {"a": "part-2.safetensors", "b": "sub/part-1.safetensors"}}
    ),
    PICKLED: "",
    PICKLED_INDEX: json.dumps({"metadata": {}, "weight_map": {"a": "part.bin"}}),
    NAMED: "",
}


def found_in(files: Mapping[str, str]) -> WeightList | None:
    return find_weight_list(
        lambda name: name in files, lambda name: files[name].encode() if name in files else None
    )


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("named", [None, NAMED, INDEX])
def test_files_are_those_that_transformers_reads(first: int, named: str | None, tmp_path: Path) -> None:
    names = (SINGLE, INDEX, PICKLED, PICKLED_INDEX)[first:]
    files = {name: FILES[name] for name in (*names, *(() if named is None else (named,)))}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    theirs, _ = _get_resolved_checkpoint_files(
        tmp_path, None, None, None, None, is_remote_code=False, transformers_explicit_filename=named
    )
    found = found_in(files | {"config.json": json.dumps({"transformers_weights": named} if named else {})})
    assert found is not None
    assert [str(tmp_path / name) for name in found.files] == theirs
    assert found.is_pickled == (first > 1 and named is None)


def test_directory_without_weights_has_none() -> None:
    assert found_in({"config.json": "{}"}) is None


HELD = {"1.safetensors": {"a", "b"}, "2.safetensors": {"b", "c"}}


@pytest.mark.parametrize("listed", [None, "1.safetensors", "2.safetensors", "3.safetensors"])
def test_index_decides_which_file_holds_a_tensor_that_two_files_have(listed: str | None) -> None:
    """Whatever it lists for the others, which are where they are."""
    index = {"a": "2.safetensors", "d": "1.safetensors"} | ({"b": listed} if listed else {})
    held = WeightList(INDEX, index).holders(HELD)
    assert (held.files["a"], held.files["c"], held.absent) == ("1.safetensors", "2.safetensors", ("d",))
    is_decided = listed in HELD
    assert held.twice == (HeldTwice("b", ("1.safetensors", "2.safetensors"), listed if is_decided else None),)
    assert held.files["b"] == (listed if is_decided else "2.safetensors")


@pytest.mark.parametrize(
    ("document", "leaves"),
    [
        ({"a": "../x.safetensors"}, True),
        ({"a": "/x.safetensors"}, True),
        ({"a": 3}, True),
        ({"a\n": "x.safetensors"}, False),
        ([], False),
        ({}, False),
    ],
)
def test_unusable_index_is_refused(document: Any, leaves: bool) -> None:
    with pytest.raises(UnusableIndexError) as caught:
        read_index(json.dumps({"weight_map": document}).encode())
    assert (caught.value.file, caught.value.leaves_directory) == (INDEX, leaves)


@pytest.mark.parametrize(("name", "leaves"), [("../x.safetensors", True), ("weights.pt", False), (3, False)])
def test_unusable_name_in_config_is_refused(name: object, leaves: bool) -> None:
    with pytest.raises(UnusableIndexError) as caught:
        found_in({"config.json": json.dumps({"transformers_weights": name})})
    assert (caught.value.file, caught.value.leaves_directory) == ("config.json", leaves)
