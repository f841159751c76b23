"""Build a store: tokenise every row into the pool, then write the index of each set."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from fsdp_tune.core.atomic import DISK, write_file
from fsdp_tune.core.command import Bar
from fsdp_tune.core.devices import available_cores
from fsdp_tune.core.errors import FsdpTuneError, usage_error
from fsdp_tune.data.account import rows_named, set_account, source_accounts
from fsdp_tune.data.account_checks import data_notices, refuse_empty_set, refuse_nothing
from fsdp_tune.data.bad_rows import BadRows
from fsdp_tune.data.duplicates import repeated
from fsdp_tune.data.format.row_account import KeyUse, key_account
from fsdp_tune.data.format.row_notes import RowNotes
from fsdp_tune.data.inputs import TRAIN, Input, raw_rows
from fsdp_tune.data.read.file_access import Stamp
from fsdp_tune.data.read.row_files import BadRow
from fsdp_tune.data.report import BeginTokens, DataReport, EndTokens, InputAccount, SetAccount, SplitRows
from fsdp_tune.data.sets import Cut, Examples, cut, held_out, is_weighted, mixed, packed
from fsdp_tune.data.store import EVALUATION_HASHES, Int32, Int64, Mask, UInt64, mapped
from fsdp_tune.data.tokenise.encoder_protocol import Encoder
from fsdp_tune.data.tokenise.rows import RawRow, Tokenised, Tokeniser, tokenise
from fsdp_tune.recipe.resolve import MOST_PROCESSES
from fsdp_tune.recipe.schema.recipe import Recipe

BAD_ROWS_NAME = "bad_rows.jsonl"


class StoreWriter:
    """Write a store into a directory that the caller stages. Examples are appended in the order of the
    calls."""

    def __init__(self, stage: Path) -> None:
        self.stage = stage
        with ExitStack() as opened:
            self._tokens: IO[bytes] = opened.enter_context(DISK.open(stage / "tokens.int32"))
            self._trained: IO[bytes] = opened.enter_context(DISK.open(stage / "trained.uint8"))
            self._files = opened.pop_all()
        self._offsets: list[Int64] = [np.zeros(1, np.int64)]
        self._origins: list[Int64] = []
        self.tokens = 0

    def add(self, tokens: Int32, trained: Mask, lengths: Int64, origins: Int64) -> None:
        """Append examples that are concatenated in `tokens`; `origins` is [examples, 2]."""
        assert len(tokens) == len(trained) == int(lengths.sum())
        assert origins.shape == (len(lengths), 2)
        DISK.write(self._tokens, np.ascontiguousarray(tokens, "<i4").data)
        DISK.write(self._trained, np.ascontiguousarray(trained, np.uint8).data)
        self._offsets.append(self.tokens + np.cumsum(lengths))
        self._origins.append(origins)
        self.tokens += len(tokens)

    def close(self) -> None:
        self._files.close()

    def finish_pool(self) -> None:
        """Write the index of the pool. Call it after the last example and before the first set."""
        self.close()
        self._write(self.stage / "examples.int64", np.concatenate(self._offsets))
        self._write(
            self.stage / "origins.int64",
            np.concatenate(self._origins) if self._origins else np.zeros((0, 2), np.int64),
        )

    def add_set(self, name: str, segments: Int64, rows: Int64) -> None:
        """Write one set. `segments` is [m, 2], start and length in tokens; `rows` is [r + 1], offsets into
        segments."""
        DISK.mkdir(self.stage / name)
        self._write(self.stage / name / "segments.int64", segments)
        self._write(self.stage / name / "rows.int64", rows)

    def add_evaluation_hashes(self, hashes: UInt64) -> None:
        """Write the hashes of evaluation rows, which a stream compares with its rows."""
        with DISK.open(self.stage / EVALUATION_HASHES) as file:
            DISK.write(file, np.ascontiguousarray(np.unique(hashes), "<u8").data)

    def trained(self) -> Mask:
        """Return the trained flags of the complete pool."""
        return mapped(self.stage / "trained.uint8", np.uint8)

    def _write(self, path: Path, values: Int64) -> None:
        with DISK.open(path) as file:
            DISK.write(file, np.ascontiguousarray(values, "<i8").data)


@dataclass(slots=True)
class TokenisedRows:
    """The tokenised rows of all sources, and the findings about them."""

    lengths: list[Int64] = field(default_factory=list[Int64])
    supervised: list[Int64] = field(default_factory=list[Int64])
    sources: list[Int64] = field(default_factory=list[Int64])
    hashes: list[Any] = field(default_factory=list[Any])
    token_hashes: list[Any] = field(default_factory=list[Any])
    origins: list[Int64] = field(default_factory=list[Int64])
    bad: list[tuple[int, BadRow]] = field(default_factory=list[tuple[int, BadRow]])
    """(number of the file, bad row), in the order of the files."""
    untrained: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    counts: Counter[str] = field(default_factory=Counter[str])
    keys: Counter[tuple[int, KeyUse]] = field(default_factory=Counter[tuple[int, KeyUse]])
    """Rows of each source by the use of a key."""
    notes: RowNotes = field(default_factory=RowNotes)

    def add(self, chunk: Tokenised) -> None:
        for name in ("lengths", "supervised", "sources", "hashes", "token_hashes", "origins"):
            getattr(self, name).append(getattr(chunk, name))
        self.bad += chunk.bad
        self.untrained += chunk.untrained
        self.counts += chunk.counts
        self.keys.update(chunk.keys)
        self.notes.merge(chunk.notes)

    def examples(self) -> Examples:
        if not self.lengths:
            none = np.zeros(0, np.int64)
            return Examples(
                none, none, none, none, none.astype(np.uint64), none.astype(np.uint64), none.reshape(0, 2)
            )
        lengths = np.concatenate(self.lengths)
        return Examples(
            starts=np.cumsum(lengths) - lengths,
            lengths=lengths,
            supervised=np.concatenate(self.supervised),
            sources=np.concatenate(self.sources),
            hashes=np.concatenate(self.hashes),
            token_hashes=np.concatenate(self.token_hashes),
            origins=np.concatenate(self.origins),
        )


def build_store(
    stage: Path,
    recipe: Recipe,
    encoder: Encoder,
    inputs: Sequence[Input],
    stamps: Sequence[Sequence[Stamp]],
    progress: Bar | None,
) -> dict[str, object]:
    """Fill `stage` and return the facts for its manifest: `files`, `sets` (folder by name), `report`,
    `notices`.

    `stamps` are those of each input's files before they were hashed. A file that changed since would be
    stored under the wrong key.
    """
    names = [name for opened in inputs for name in opened.source.names]
    writer = StoreWriter(stage)
    try:
        found = _tokenise_all(recipe, encoder, inputs, writer, progress)
    finally:
        writer.close()
    if list(stamps) != [opened.source.stamps() for opened in inputs]:
        raise usage_error(
            "data-changing",
            "a data file was written to while it was read",
            hint="run again when the file is complete",
        )
    counts = found.counts
    bad = BadRows(
        found.bad, names, counts["rows"], counts["unencoded"], counts["bad_unencoded"], counts["unreadable"]
    )
    if wrong := bad.problems(recipe.data):
        raise FsdpTuneError(*wrong)
    _write_bad_rows(stage, found.bad, names)
    examples = found.examples()
    if recipe.data.streaming and len({opened.set_name for opened in inputs}) > 1:
        is_train = np.array([opened.set_name == TRAIN for opened in inputs])
        writer.add_evaluation_hashes(examples.hashes[~is_train[examples.sources]])
    refuse_nothing(examples, names, rows=found.counts["rows"], bad=len(found.bad), untrained=found.untrained)
    writer.finish_pool()
    index = _index(recipe, inputs, examples, writer, names)
    report = _report(inputs, found, examples, index, names, encoder)
    notices = data_notices(recipe, inputs, report, bad_rows_name=BAD_ROWS_NAME)
    return {"files": names, "sets": index.folders, "report": report.as_dict(), "notices": notices}


def _tokenise_all(
    recipe: Recipe, encoder: Encoder, inputs: Sequence[Input], writer: StoreWriter, progress: Bar | None
) -> TokenisedRows:
    found = TokenisedRows()

    def good_rows() -> Iterator[RawRow]:
        for row in raw_rows(inputs):
            if isinstance(row, RawRow):
                yield row
            else:
                found.bad.append(row)
                found.counts.update(rows=1, unreadable=1)

    tokeniser = Tokeniser(encoder, tuple(opened.settings for opened in inputs))
    hopeless = recipe.data.on_bad_row == "error"
    for chunk in tokenise(
        good_rows(), tokeniser, _processes(recipe), check_only=lambda: hopeless and bool(found.bad)
    ):
        found.add(chunk)
        writer.add(chunk.tokens, chunk.trained, chunk.lengths, chunk.origins)
        if progress is not None:
            progress.advance(chunk.counts["rows"])
    found.bad.sort(key=lambda bad: (bad[0], bad[1].number))
    return found


def _processes(recipe: Recipe) -> int:
    wanted = recipe.data.num_proc
    return min(MOST_PROCESSES, available_cores()) if wanted == "auto" else wanted


def _write_bad_rows(stage: Path, bad: Sequence[tuple[int, BadRow]], names: Sequence[str]) -> None:
    """Write the skipped rows, one per line, so that the user can inspect and fix them."""
    if bad:
        lines = [
            json.dumps(
                {"file": names[file], "row": row.number, "column": row.column, "reason": row.reason},
                ensure_ascii=False,
            )
            for file, row in bad
        ]
        write_file(stage / BAD_ROWS_NAME, "\n".join(lines) + "\n")


@dataclass(slots=True)
class Index:
    """The sets of a store, as written."""

    folders: dict[str, str] = field(default_factory=dict[str, str])
    """Folder of each set by its name."""
    accounts: dict[str, SetAccount] = field(default_factory=dict[str, SetAccount])
    """Account of each set by its name."""
    sources: dict[str, list[InputAccount]] = field(default_factory=dict[str, list[InputAccount]])
    """Accounts of all sources within each set."""
    dropped_duplicates: int = 0
    """Number of examples that `data.drop_duplicates` leaves out."""


def _index(
    recipe: Recipe, inputs: Sequence[Input], examples: Examples, writer: StoreWriter, names: Sequence[str]
) -> Index:
    """Write every set, training first."""
    data = recipe.data
    trained = writer.trained()
    index = Index()
    training: Examples | None = None
    sets = _sets(recipe, inputs, examples)
    for number, (name, available) in enumerate(sets.items()):
        in_train = name == TRAIN
        chosen = available
        if training is None:
            is_repeated = repeated(available.origins, available.token_hashes)
            if data.drop_duplicates and not isinstance(data.eval, list):
                is_repeated |= _is_held_out_too(available, sets)
            copies = {
                "dropped_duplicates" if data.drop_duplicates else "repeated": _origins(available, is_repeated)
            }
            if data.drop_duplicates:
                available = available.take(~is_repeated)
                index.dropped_duplicates = int(np.count_nonzero(is_repeated))
            training = chosen = _mixture(recipe, inputs, available, trained, names)
        else:
            copies = {"also_trained": _origins(available, _also_trained(available, training))}
        packing = data.packing if in_train or data.eval_packing is None else data.eval_packing
        pieces = _cut(recipe, inputs, chosen, trained, names)
        pieces, rows = packed(
            pieces, trained, data.max_length, packing=packing, strategy=data.packing_strategy
        )
        if len(rows.rows) == 1 and not in_train and len(sets) > 2 and not isinstance(data.eval, list):
            continue  # one of several sources without a held-out row that can be used
        refuse_empty_set(
            name, len(rows.rows) - 1, len(chosen), data.max_length, drops=len(pieces.dropped) > 0
        )
        index.folders[name] = TRAIN if in_train else f"eval-{number:03d}"
        writer.add_set(index.folders[name], rows.segments, rows.rows)
        account = set_account(pieces, rows, names, data.max_length)
        index.accounts[name] = account.model_copy(
            update={what: rows_named(origins, names) for what, origins in copies.items()}
        )
        index.sources[name] = source_accounts(len(inputs), available, chosen, pieces)
    if len(sets) > 1 and len(index.folders) == 1:
        refuse_empty_set(
            "held out",
            0,
            sum(len(each) for name, each in sets.items() if name != TRAIN),
            data.max_length,
            drops=any(opened.overlong == "drop" for opened in inputs),
        )
    return index


def _origins(examples: Examples, chosen: npt.NDArray[np.bool_] | Int64) -> Int64:
    """Return [k, 2] origins of the rows of the chosen examples; a row may be several examples."""
    return np.unique(examples.origins[chosen], axis=0)


def _is_held_out_too(training: Examples, sets: dict[str, Examples]) -> Any:
    """Return True for each training example whose row has the tokens and targets of a held-out row.

    A split holds out rows by their content, which another file or format may write differently.
    """
    held_out_rows = [part.token_hashes for name, part in sets.items() if name != TRAIN]
    return np.isin(training.token_hashes, np.concatenate(held_out_rows)) if held_out_rows else False


def _also_trained(examples: Examples, training: Examples) -> npt.NDArray[np.bool_]:
    """Return True for each example whose row has the content, or the tokens and targets, of a training
    row."""
    return np.isin(examples.hashes, training.hashes) | np.isin(examples.token_hashes, training.token_hashes)


def _sets(recipe: Recipe, inputs: Sequence[Input], examples: Examples) -> dict[str, Examples]:
    """Return the examples of each set by its name, `train` first."""
    set_of_source = np.array([opened.set_name for opened in inputs])[examples.sources]
    by_name = {opened.set_name: examples.take(set_of_source == opened.set_name) for opened in inputs}
    if recipe.data.eval is None or isinstance(recipe.data.eval, list):
        return by_name
    train = by_name[TRAIN]
    out = held_out(train.hashes, recipe.data.eval)
    if not out.any() or out.all():
        raise usage_error(
            "empty-split",
            f"`data.eval` holds out {np.count_nonzero(out):,} of {len(train):,} rows",
            hint="take another `fraction`, or a number of `rows`",
        )
    parts = {
        label: train.take(out & (train.sources == source))
        for source, label in enumerate(recipe.data.eval_labels)
    }
    return {TRAIN: train.take(~out), **{label: part for label, part in parts.items() if len(part)}}


def _mixture(
    recipe: Recipe, inputs: Sequence[Input], train: Examples, trained: Mask, names: Sequence[str]
) -> Examples:
    entries = [opened for opened in inputs if opened.set_name == TRAIN]
    mixture, weights = recipe.data.mixture, [opened.entry.weight for opened in entries]
    if not is_weighted(weights, mixture):
        return train
    sizes = np.bincount(train.sources, minlength=len(entries)).tolist()
    tokens = None
    if mixture.weight_by == "tokens":
        pieces = _cut(recipe, inputs, train, trained, names)
        tokens = [
            int(count) for count in np.bincount(pieces.sources, pieces.segments[:, 1], minlength=len(entries))
        ]
    empty = next(
        (opened for opened, amount in zip(entries, tokens or sizes, strict=True) if not amount), None
    )
    if empty is not None:
        message = f"`{empty.entry.path}` has no row left to train on, so no share of it can be drawn"
        raise usage_error(
            "no-rows", message, hint="remove the entry from `data.train`, or give it other rows"
        )
    return train.take(mixed(train.sources, sizes, weights, mixture, tokens))


def _cut(
    recipe: Recipe, inputs: Sequence[Input], examples: Examples, trained: Mask, names: Sequence[str]
) -> Cut:
    return cut(examples, [opened.overlong for opened in inputs], recipe.data.max_length, trained, names)


def _report(
    inputs: Sequence[Input],
    found: TokenisedRows,
    examples: Examples,
    index: Index,
    names: Sequence[str],
    encoder: Encoder,
) -> DataReport:
    """Return the account of the complete store."""
    counts = found.counts
    bad = np.array([(file, row.number) for file, row in found.bad], np.int64).reshape(-1, 2)
    untrained = np.array(found.untrained, np.int64).reshape(-1, 2)
    has_bos = encoder.bos_id is not None and encoder.bos_id != encoder.eos_id
    return DataReport(
        rows_read=counts["rows"],
        rows_bad=rows_named(bad, names),
        rows_untrained=rows_named(untrained, names),
        rows_kept=len(examples) - index.dropped_duplicates,
        rows_split=SplitRows(counts["split_rows"], counts["split_examples"]),
        inputs=tuple(
            index.sources[opened.set_name][number].model_copy(
                update=_described(opened) | {"keys": key_account(found.keys, number)}
            )
            for number, opened in enumerate(inputs)
        ),
        sets=index.accounts,
        eos=EndTokens(
            encoder.eos_token, counts["eos_supervised"], len(examples), counts["eos_appended_to_chat"]
        ),
        bos=BeginTokens(counts["bos_once"], counts["bos_more"], len(examples)) if has_bos else None,
        bos_repeated_in_text=counts["bos_repeated_in_text"],
        bos_missing_in_chat=counts["bos_missing_in_chat"],
        joined_without_space=counts["no_space"],
        notes=found.notes.report(names),
    )


def _described(opened: Input) -> dict[str, str | int | None]:
    """Return the fields of `InputAccount` that do not depend on the rows."""
    settings = opened.settings
    prompt = None
    if settings.format == "alpaca":
        prompt = "the chat template" if settings.template is not None else "Stanford's two prompts"
    return {
        "set": opened.set_name,
        "path": opened.entry.path,
        "label": opened.entry.label,
        "files": len(opened.source.names),
        "format": settings.format,
        "loss_on": settings.loss_on,
        "alpaca_prompt": prompt,
    }
