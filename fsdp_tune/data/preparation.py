"""Prepare data once, before any rank starts: rows → token ids → sets in the cache, with an account of the
trained tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdp_tune.core.command import Bar
from fsdp_tune.core.errors import FsdpTuneError, Notice, Where, usage_error
from fsdp_tune.core.user_cache import COMPILED, default_cache_directory
from fsdp_tune.data.account import decoded_row, rows_renamed, spread_indices
from fsdp_tune.data.bad_rows import refuse_bad_share
from fsdp_tune.data.build import BAD_ROWS_NAME, build_store
from fsdp_tune.data.cache import STORES, built, content_key, record_use
from fsdp_tune.data.counted_stream import counted_units, short_stream, streamed_files
from fsdp_tune.data.inputs import TRAIN, Input, open_inputs
from fsdp_tune.data.read.file_access import FileDigests
from fsdp_tune.data.report import DataReport, DecodedExample, ReportedExample
from fsdp_tune.data.row_order import Attempt, RowOrder, continued, row_order
from fsdp_tune.data.row_record import RowRecord
from fsdp_tune.data.skipped_rows import NamedRow, PreparedFiles, SkippedRow, removed_rows, resolved_rows
from fsdp_tune.data.store import EVALUATION_HASHES, RowStore
from fsdp_tune.data.stream.units import unstamped_files
from fsdp_tune.data.tokenise.encoder_protocol import Encoder
from fsdp_tune.recipe.fsdp_arguments import compiles
from fsdp_tune.recipe.rules.training import measured_metrics
from fsdp_tune.recipe.schema.data_section import DataSource
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value
from fsdp_tune.run.directory import RunDir, checkpoint_step
from fsdp_tune.run.launch_files import ResumeRequest
from fsdp_tune.run.manifest import Manifest
from fsdp_tune.run.records import Document

SAMPLE_ROWS = 1000
"""Rows of each streamed source that are prepared before the ranks start, to check and show them."""
DATA_FORMAT = 12
"""Incremented when the same input would give other rows or another layout, so that old caches are not
used."""
ACCOUNT_FORMAT = 2
"""Incremented when the account of the same rows would differ. It is not part of the key that a resumed run
must have."""


@dataclass(frozen=True, slots=True)
class Prepared(Document):
    """The prepared data of a run; RUN/data.json. Paths are sets of a store, for `RowStore`."""

    key: str
    """Digest of all that determines the training rows: source bytes, settings, tokenizer. A resumed run must
    have the same key."""
    path: str
    train: str
    evals: dict[str, str]
    """Eval sets by label."""
    train_rows: int
    vocabulary_size: int
    pad_token_id: int
    report: DataReport
    notices: list[dict[str, Any]]
    reused: bool = False
    """Whether the data were found in the cache."""
    stamps: dict[str, str] = field(default_factory=dict[str, str])
    """Of each file of a stream, whose training rows are read while the run trains; `train` has those of its
    beginning. A source without files has a digest of its rows."""
    unit_rows: dict[str, int] = field(default_factory=dict[str, int])
    """Rows of each unit of a stream by its name, unless its rows cannot be counted before they are read."""
    skipped: tuple[SkippedRow, ...] = ()
    """Rows that the run leaves out (`--skip-rows`)."""
    files: tuple[str, ...] = ()
    """Names of the source files, if they were others when the store was built."""
    attempts: tuple[Attempt, ...] = ()
    """The starts of the run with another global batch than before, up to this one; empty before it starts."""

    @property
    def is_stream(self) -> bool:
        return self.report.stream_sample_rows is not None

    def store(self, path: str | None = None, skipped: Sequence[SkippedRow] = ()) -> RowStore:
        """Open a set, the training set by default, without the `skipped` rows."""
        return RowStore(path or self.train, [each.origin for each in skipped], self.files)

    def training_store(self) -> RowStore:
        """Open the training rows; of a stream, those of its beginning, none left out."""
        return self.store(skipped=() if self.is_stream else self.skipped)

    def continued(self, global_batch_size: int, step: int, record: RowRecord | None = None) -> Prepared:
        """Return the data of a start after `step` steps with this global batch.

        A row that was left out from a later step on is left out from `step` on.
        `record`: of the checkpoint from which it starts; None: the attempts that these data have.
        """
        before = {each.origin: each.step for each in (record.skipped or () if record is not None else ())}
        skipped = tuple(
            replace(each, step=before.get(each.origin, min(each.step, step))) for each in self.skipped
        )
        attempts = self.attempts if record is None else record.attempts
        return replace(self, skipped=skipped, attempts=continued(attempts, step, global_batch_size))

    def record(self, recipe: Recipe) -> RowRecord:
        """Return what the checkpoints of a start with these data have."""
        seed = recipe.training.seed if recipe.training.data_seed is None else recipe.training.data_seed
        repeats = tuple(source.repeats for source in recipe.data.train) if recipe.data.streaming else None
        return RowRecord(self.attempts, self.skipped, self.key, seed, recipe.data.shuffle, repeats)

    def order(self, recipe: Recipe, store: RowStore) -> RowOrder:
        """Return the global batches of `training_store`, which is not a stream's."""
        return row_order(recipe, store.lengths, self.attempts, removed_rows(store, self.skipped))

    def without(
        self, recipe: Recipe, named: Sequence[NamedRow], earlier: Sequence[SkippedRow], step: int
    ) -> Prepared:
        """Return the data of a run that leaves out the `named` rows from `step` on, and those that it has
        left out `earlier`.

        Raises: usage error with the line of each name that is not a training row, and if too few rows remain.
        """
        if not named and not earlier:
            return self
        files = streamed_files(recipe, self.unit_rows) if self.is_stream else PreparedFiles(self.store())
        changed = replace(self, skipped=resolved_rows(named, earlier, files, step))
        if not self.is_stream:
            left = self.train_rows - sum(len(rows) for _, rows in removed_rows(self.store(), changed.skipped))
            if left < recipe.global_batch_size:
                message = (
                    f"{left:,} rows remain without those that are skipped, and one step takes "
                    f"{recipe.global_batch_size:,}"
                )
                raise usage_error(
                    "too-few-rows", message, hint="skip fewer rows, or lower `training.global_batch_size`"
                )
        return changed

    def as_notices(self) -> list[Notice]:
        return [*self._unstamped(), *self._stored_notices()]

    def _unstamped(self) -> list[Notice]:
        if not (names := unstamped_files(self.stamps)):
            return []
        message = (
            f"{names[0]}{f' and {len(names) - 1} more files have' if len(names) > 1 else ' has'} neither "
            "an ETag nor a time"
        )
        return [
            Notice(
                "data-without-stamp", f"{message}: only a change of size would be noticed", Where(names[0])
            )
        ]

    def _stored_notices(self) -> list[Notice]:
        return [Notice(notice["code"], notice["message"], hint=notice["hint"]) for notice in self.notices]


def prepare(
    recipe: Recipe,
    encoder: Encoder,
    *,
    progress: Bar | None = None,
    check_rows: bool = True,
    verify: bool = False,
    run: Path | None = None,
) -> Prepared:
    """Return the prepared data, from the cache or built. Raises: usage error for any problem of the data,
    with file and line.

    With `check_rows`, fewer rows than the global batch of the (resolved) recipe are an error too. `verify`
    hashes the files of all sources, and of the cached data, instead of those that changed since their last
    hash. `run` is the run that will read the data.
    """
    assert recipe.data.cache_dir is not None, "the recipe is resolved"
    cache_dir = Path(recipe.data.cache_dir)
    digests = FileDigests(cache_dir, verify=verify)
    inputs = open_inputs(recipe, encoder)
    file_stamps: dict[str, str] = {}
    unit_rows: dict[str, int] = {}
    source_rows: list[int | None] = []
    if recipe.data.streaming:
        file_stamps, unit_rows, source_rows = counted_units(recipe, inputs, cache_dir)
        inputs = [_head_of(opened) if opened.set_name == TRAIN else opened for opened in inputs]
        check_rows = False
    stamps = [opened.source.stamps() for opened in inputs]
    training_key, key = _keys(recipe, encoder, inputs, digests, file_stamps)
    path = cache_dir / STORES / key

    def build(stage: Path) -> dict[str, object]:
        return build_store(stage, recipe, encoder, inputs, stamps, progress)

    manifest, reused = built(path, build, digests)  # damaged data are built again
    record_use(path, recipe=recipe.name or "", run=run)
    if run is not None and compiles(recipe):
        record_use(default_cache_directory() / COMPILED, recipe=recipe.name or "", run=run)
    prepared = replace(
        _prepared(path, training_key, manifest, encoder, inputs, reused=reused),
        stamps=file_stamps,
        unit_rows=unit_rows,
    )
    if recipe.data.streaming:
        report = prepared.report.model_copy(update={"stream_sample_rows": SAMPLE_ROWS})
        prepared = replace(
            prepared, report=report, notices=[*prepared.notices, *short_stream(recipe, source_rows, report)]
        )
    bad, rows = prepared.report.rows_bad.rows, prepared.report.rows_read
    refuse_bad_share(
        bad, rows, recipe.data.max_bad_share, hint=f"fix those that {path / BAD_ROWS_NAME} lists"
    )
    if check_rows:
        _refuse_few_rows(recipe, prepared)
        _refuse_unmeasured(recipe, prepared)
    return prepared


def _head_of(opened: Input) -> Input:
    """Return the input of the first rows of a source."""
    return replace(opened, source=replace(opened.source, head=SAMPLE_ROWS))


def _prepared(
    path: Path, key: str, manifest: Manifest, encoder: Encoder, inputs: Sequence[Input], *, reused: bool
) -> Prepared:
    # Names are no content: the data may have been prepared under others.
    named = [{"path": opened.entry.path, "label": opened.entry.label} for opened in inputs]
    before, files = (
        tuple(manifest.facts["files"]),
        tuple(name for opened in inputs for name in opened.source.names),
    )
    moved = {old: new for old, new in zip(before, files, strict=True) if old != new}
    # The keys of the JSON file are sorted; reports list `train` first, then the eval sets in the order of the
    # recipe.
    folders: dict[str, str] = dict(
        sorted(manifest.facts["sets"].items(), key=lambda item: (item[0] != TRAIN, item[1]))
    )
    report = DataReport.model_validate(rows_renamed(manifest.facts["report"], moved))
    example = decoded_rows(RowStore(path / folders[TRAIN], files=files), encoder, 1)[0][0]
    changes = {
        "inputs": tuple(
            account.model_copy(update=names) for account, names in zip(report.inputs, named, strict=True)
        ),
        "sets": {name: report.sets[name] for name in folders},
        "example": ReportedExample(example.where, example.runs),
    }
    return Prepared(
        key=key,
        path=str(path),
        train=str(path / folders[TRAIN]),
        evals={label: str(path / folder) for label, folder in folders.items() if label != TRAIN},
        train_rows=report.sets[TRAIN].rows,
        vocabulary_size=encoder.vocabulary_size,
        pad_token_id=encoder.pad_id,
        report=report.model_copy(update=changes),
        notices=rows_renamed(manifest.facts["notices"], moved),
        reused=reused,
        files=files if moved else (),
    )


def _keys(
    recipe: Recipe,
    encoder: Encoder,
    inputs: Sequence[Input],
    digests: FileDigests,
    file_stamps: Mapping[str, str],
) -> tuple[str, str]:
    """Return the key of the training rows, and that of all sets with their account."""
    training_key = content_key(
        [*_training_content(recipe, encoder, inputs, digests), *([file_stamps] if file_stamps else [])]
    )
    # older stores of streams lack the hashes
    account = [
        ACCOUNT_FORMAT,
        *([EVALUATION_HASHES] if recipe.data.streaming else []),
    ]
    key = content_key(
        [
            training_key,
            recipe.data.eval_packing,
            recipe.data.eval_labels,
            _content(inputs, digests, train=False),
            *account,
        ]
    )
    return training_key, key


def _training_content(
    recipe: Recipe, encoder: Encoder, inputs: Sequence[Input], digests: FileDigests
) -> list[object]:
    """Return all that determines the training rows. A list of eval sets does not; a held-out split does."""
    data = recipe.data
    settings = data.model_dump(include={"max_length", "packing", "packing_strategy", "mixture", "on_bad_row"})
    if data.streaming:
        settings |= data.model_dump(include={"stream_lanes", "curriculum", "shuffle", "shuffle_buffer_size"})
    split = None if isinstance(data.eval, list) or data.eval is None else data.eval.model_dump()
    # a run of a version without the key has the same training rows, and can be resumed
    if data.drop_duplicates:
        settings |= {"drop_duplicates": True if split is None else "also held out"}
    return [DATA_FORMAT, encoder.digest, settings, split, _content(inputs, digests, train=True)]


def _content(inputs: Sequence[Input], digests: FileDigests, *, train: bool) -> list[object]:
    return [
        [
            opened.set_name,
            opened.overlong,
            _settings(opened),
            opened.columns,
            _entry(opened.entry),
            opened.source.content(digests),
        ]
        for opened in inputs
        if (opened.set_name == TRAIN) == train
    ]


def _settings(opened: Input) -> dict[str, object]:
    """Return the settings that determine tokens. Original column names and keys only occur in messages;
    `_entry` includes the former."""
    return {
        name: value
        for name, value in asdict(opened.settings).items()
        if name not in ("names_in_file", "template_key")
    }


def _entry(entry: DataSource) -> dict[str, object]:
    """Return the fields of an entry that matter besides the bytes of its files. Paths do not: a moved file is
    the same data."""
    return entry.model_dump(include={"name", "split", "columns", "rename_columns", "weight", "max_rows"})


def decoded_rows(store: RowStore, encoder: Encoder, count: int) -> list[list[DecodedExample]]:
    """Return rows spread evenly over a set, each as a list of its decoded examples."""
    return [decoded_row(store, row, encoder) for row in spread_indices(len(store), count)]


def _refuse_few_rows(recipe: Recipe, prepared: Prepared) -> None:
    """Refuse data that do not fill one global batch. Raises: usage error."""
    rows, wanted = prepared.train_rows, recipe.global_batch_size
    if rows < wanted:
        account = prepared.report.sets[TRAIN]
        packing = f", packed from {account.examples:,} examples" if recipe.data.packing else ""
        raise usage_error(
            "too-few-rows",
            f"there are {rows:,} rows to train on{packing} ({prepared.report.rows_read:,} were "
            f"read), and one step takes {wanted:,}",
            hint="lower `training.global_batch_size` or `gradient_accumulation_steps`, use fewer ranks, "
            "or give more data",
        )


def _refuse_unmeasured(recipe: Recipe, prepared: Prepared) -> None:
    """Refuse a best model by a source of which no row is held out: small sources may have none. Raises: usage
    error."""
    metric = training_value(recipe.training, "metric_for_best_model")
    measured = measured_metrics(recipe, prepared.evals)
    if metric is not None and not recipe.best_by_score and metric.removeprefix("eval_") not in measured:
        message = (
            f"`training.metric_for_best_model: {metric}` is not measured: no row of that source is held out"
        )
        raise usage_error(
            "metric-not-measured",
            message,
            hint=f"measured are {', '.join(measured)}; or raise `data.eval.fraction`",
        )


def rows_of_step(data_json: Path, recipe: Recipe, step: int) -> str | None:
    """Describe the rows of a step, counted from 1, of a run; None if its data cannot be read.

    `data_json` and `recipe` are those of a start of the run, from its directory or its `history/`. Steps
    before this start are those of the attempts that it continued.
    """
    try:
        prepared = Prepared.read(data_json)
        if prepared is None or recipe.data.streaming:
            return None
        request = ResumeRequest.read(RunDir(data_json.parent).resume_json)
        if request is not None:  # a restart of the same command may have continued an earlier checkpoint
            size = prepared.attempts[-1].global_batch_size if prepared.attempts else recipe.global_batch_size
            prepared = prepared.continued(size, checkpoint_step(Path(request.resume_from or "")) or 0)
        # Rows that were left out later were trained, and are named.
        store = prepared.store(skipped=[each for each in prepared.skipped if each.step < step])
    except (OSError, ValueError, FsdpTuneError):
        return None
    return store.describe_rows(prepared.order(recipe, store).batch_after(step - 1).tolist())
