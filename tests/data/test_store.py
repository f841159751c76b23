from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from fsdp_tune.core.errors import FailedError
from fsdp_tune.data.build import StoreWriter
from fsdp_tune.data.collate import collate, cumulative_lengths, padded_width
from fsdp_tune.data.store import IGNORE_INDEX, STORE_KIND, Row, RowStore
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest, digest_file, list_files


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Three examples (10 11 12 | 20 21 | 30 31 32 33) in two chunks; `train` packs the third and the
    first."""
    folder = tmp_path / "store"
    folder.mkdir()
    writer = StoreWriter(folder)
    add = [
        ([10, 11, 12, 20, 21], [0, 1, 1, 1, 1], [3, 2], [[0, 7], [0, 9]]),
        ([30, 31, 32, 33], [1, 1, 0, 1], [4], [[1, 1]]),
    ]
    for tokens, trained, lengths, origins in add:
        writer.add(
            np.array(tokens, np.int32), np.array(trained, np.uint8), np.array(lengths), np.array(origins)
        )
    writer.finish_pool()
    writer.add_set("train", np.array([[5, 4], [0, 3], [3, 2]]), np.array([0, 2, 3]))
    files = {name: digest_file(folder / name) for name in list_files(folder)}
    (folder / MANIFEST_NAME).write_text(
        Manifest(STORE_KIND, files, {"files": ["a.jsonl", "b.jsonl"]}).to_json()
    )
    return folder


def test_packed_row_concatenates_examples_and_masks_first_tokens(store: Path) -> None:
    row = RowStore(store / "train")[0]
    assert row.input_ids.tolist() == [30, 31, 32, 33, 10, 11, 12]
    assert row.labels.tolist() == [-100, 31, -100, 33, -100, 11, 12]
    assert row.lengths == (4, 3)
    assert row.input_ids.dtype == row.labels.dtype == np.int32


def test_store_returns_row_lengths_and_origins(store: Path) -> None:
    rows = RowStore(store / "train")
    assert len(rows) == 2
    assert rows.lengths.tolist() == [7, 2]
    assert rows.origins(0) == [("b.jsonl", 1), ("a.jsonl", 7)]
    assert rows.origins(1) == [("a.jsonl", 9)]
    with pytest.raises(IndexError):
        rows[2]


def test_files_of_rows_are_those_of_their_segments(store: Path) -> None:
    files, tokens = RowStore(store / "train").files_of([1, 0])
    assert list(zip(files.tolist(), tokens.tolist(), strict=True)) == [(0, 2), (1, 4), (0, 3)]


def test_store_pickles_as_its_path(store: Path) -> None:
    packed = pickle.dumps(RowStore(store / "train"))
    assert len(packed) < 500
    assert pickle.loads(packed)[1].input_ids.tolist() == [20, 21]


def test_files_match_the_documented_layout(store: Path) -> None:
    assert np.fromfile(store / "tokens.int32", "<i4").tolist() == [10, 11, 12, 20, 21, 30, 31, 32, 33]
    assert np.fromfile(store / "trained.uint8", np.uint8).tolist() == [0, 1, 1, 1, 1, 1, 1, 0, 1]
    assert np.fromfile(store / "examples.int64", "<i8").tolist() == [0, 3, 5, 9]
    assert np.fromfile(store / "origins.int64", "<i8").tolist() == [0, 7, 0, 9, 1, 1]
    assert np.fromfile(store / "train" / "rows.int64", "<i8").tolist() == [0, 2, 3]


def test_missing_or_incomplete_store_is_refused_with_a_hint(store: Path) -> None:
    (store / MANIFEST_NAME).unlink()
    with pytest.raises(FailedError, match="no prepared data"):
        RowStore(store / "train")
    (store / MANIFEST_NAME).write_text("{")
    with pytest.raises(FailedError, match=r"prepared data at .* cannot be read"):
        RowStore(store / "train")
    shutil.rmtree(store)
    with pytest.raises(FailedError) as caught:
        RowStore(store / "train")
    assert "data.cache_dir" in (caught.value.problems[0].hint or "")


def row(*lengths: int, trained: bool = True) -> Row:
    size = sum(lengths)
    ids = np.arange(1, size + 1, dtype=np.int32)
    labels = ids.copy() if trained else np.full(size, IGNORE_INDEX, np.int32)
    return Row(ids, labels, lengths, 0)


def test_batch_width_is_longest_row_rounded_up() -> None:
    batch = collate([row(5), row(9)], pad_token_id=0, multiple_of=8)
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].shape == (2, 16)
    assert batch["input_ids"][0].tolist() == [1, 2, 3, 4, 5, *[0] * 11]
    assert batch["labels"][0].tolist() == [1, 2, 3, 4, 5, *[IGNORE_INDEX] * 11]
    assert batch["input_ids"].dtype == batch["labels"].dtype == np.int64


def test_width_never_exceeds_max_length() -> None:
    assert padded_width([row(9)], 8) == 16
    assert padded_width([row(9)], 8, max_length=10) == 10


def test_padding_is_not_trained_even_when_it_is_the_end_of_sequence() -> None:
    eos = 9
    ids = np.array([1, 2, eos], np.int32)
    batch = collate([Row(ids, ids, (3,), 0)], pad_token_id=eos, multiple_of=8)
    assert batch["labels"][0].tolist() == [1, 2, eos, *[IGNORE_INDEX] * 5]


def test_positions_restart_in_each_example_and_in_the_padding() -> None:
    batch = collate([row(3, 1, 2), row(4)], pad_token_id=0, multiple_of=8)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 0, 1], [0, 1, 2, 3, 0, 1, 2, 3]]
    assert batch["position_ids"].shape == batch["input_ids"].shape


def test_cumulative_lengths_cover_the_flattened_batch() -> None:
    assert cumulative_lengths([row(3, 1, 2), row(4)], 8).tolist() == [0, 3, 4, 6, 8, 12, 16]
    assert cumulative_lengths([row(8)], 8).dtype == np.int32


def test_empty_batch_is_one_padding_row() -> None:
    batch = collate([], pad_token_id=3, multiple_of=8)
    assert batch["input_ids"].tolist() == [[3] * 8]
    assert batch["labels"].tolist() == [[IGNORE_INDEX] * 8]


def test_packed_positions_are_separate_sequences_to_transformers() -> None:
    """transformers finds the examples of a packed row by the jumps of its position ids; ours must be read
    that way."""
    torch = pytest.importorskip("torch")
    from transformers.masking_utils import find_packed_sequence_indices

    batch = collate([row(3, 1, 2), row(4)], pad_token_id=0, multiple_of=8)
    found = find_packed_sequence_indices(torch.from_numpy(batch["position_ids"]))
    assert found is not None
    assert found.tolist() == [[0, 0, 0, 1, 2, 2, 3, 3], [0, 0, 0, 0, 1, 1, 1, 1]]
