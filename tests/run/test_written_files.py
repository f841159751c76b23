"""Files that differ from what was written are refused by name before they are used."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import xxhash

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.run.directory import MERGE_RECORD, RunDir
from fsdp_tune.run.manifest import MANIFEST_NAME, digest_data, digest_file
from fsdp_tune.run.written_files import model_files, record_model_files, require_unchanged_output, seal_record

MODEL = {
    "config.json": b'{"n_head": 4}',
    "tokenizer.json": b'{"model": {}}',
    "base_layout.json": b'{"version": 1}',
}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.model.mkdir(parents=True)
    for name, content in MODEL.items():
        (run.model / name).write_bytes(content)
    record_model_files(run.model)
    return run


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A merged model of one file of weights, with a record like that of a merge."""
    folder = tmp_path / "merged"
    folder.mkdir()
    weights = bytes(range(64)) * 4
    entry = {"dtype": "F32", "shape": [64], "data_offsets": [0, len(weights)]}
    text = json.dumps({"__metadata__": {"format": "pt"}, "w": entry}).encode()
    header = len(text).to_bytes(8, "little") + text
    (folder / "model.safetensors").write_bytes(header + weights)
    for name, content in (("config.json", b'{"n_head": 4}'), ("README.md", b"# card")):
        (folder / name).write_bytes(content)
    config = digest_file(folder / "config.json")
    record = {
        "files": ["README.md", "config.json", MERGE_RECORD, "model.safetensors"],
        "headers": {
            "model.safetensors": {
                "size_bytes": len(header) + len(weights),
                "digest": digest_data(header).digest,
            }
        },
        "contents": {"config.json": {"size_bytes": config.size_bytes, "digest": config.digest}},
        "tensors": {"w": {"file": "model.safetensors", "digest": xxhash.xxh3_128(weights).hexdigest()}},
    }
    (folder / MERGE_RECORD).write_text(json.dumps(seal_record(record)))
    return folder


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", [*MODEL, MANIFEST_NAME])
def test_flipped_bit_in_a_file_of_the_model_is_refused_by_name(name: str, run: RunDir) -> None:
    assert model_files(run) == run.model
    flip(run.model / name, -4)
    with pytest.raises(FsdpTuneError) as caught:
        model_files(run)
    (problem,) = caught.value.problems
    assert (problem.code, problem.where.source) == ("file-changed", str(run.model / name))
    assert f"`rm {run.model / MANIFEST_NAME}`" in problem.ways_out[1]


def test_files_that_a_user_changed_are_used_without_the_manifest(run: RunDir) -> None:
    flip(run.model / "config.json", 5)
    (run.model / MANIFEST_NAME).unlink()
    assert model_files(run) == run.model


def test_comparing_the_files_of_a_model_takes_less_than_a_tenth_of_a_second(run: RunDir) -> None:
    (run.model / "tokenizer.json").write_bytes(bytes(20 << 20))  # that of a vocabulary of 256,000 tokens
    record_model_files(run.model)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        model_files(run)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.1


@pytest.mark.parametrize(
    ("name", "at"),
    [("config.json", 5), ("model.safetensors", 3), ("model.safetensors", 40), ("model.safetensors", -9)],
)
def test_flipped_bit_in_a_merged_model_is_refused_by_name(name: str, at: int, output: Path) -> None:
    require_unchanged_output(output)
    flip(output / name, at)
    with pytest.raises(FsdpTuneError) as caught:
        require_unchanged_output(output)
    assert [problem.where.source for problem in caught.value.problems] == [str(output / name)]


def test_record_of_a_merge_that_changed_is_refused(output: Path) -> None:
    path = output / MERGE_RECORD
    path.write_text(path.read_text().replace('"w"', '"v"'))
    with pytest.raises(FsdpTuneError, match="its values are not those that were written"):
        require_unchanged_output(output)


def test_card_may_change_and_a_missing_file_is_named(output: Path) -> None:
    (output / "README.md").write_text("# mine")
    require_unchanged_output(output)
    (output / "config.json").unlink()
    with pytest.raises(FsdpTuneError, match="missing"):
        require_unchanged_output(output)


def test_directory_without_a_record_is_used_as_it_is(output: Path) -> None:
    flip(output / "config.json", 5)
    (output / MERGE_RECORD).unlink()
    require_unchanged_output(output)
