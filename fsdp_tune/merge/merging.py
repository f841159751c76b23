"""The steps of a merge, in order: choose, read the table of contents, plan, copy, check, publish."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_tune.core.atomic import staged_directory
from fsdp_tune.core.command import Bar, MergeCheck, OpenBar
from fsdp_tune.core.errors import FailedError, Notice, Problem, Where, failed_error, usage_error
from fsdp_tune.merge import output_directory as place
from fsdp_tune.merge.config_and_tokenizer import Companions
from fsdp_tune.merge.copy.write import THREADS, Written, write_tensors
from fsdp_tune.merge.copy_plan import Copy, plan_copy
from fsdp_tune.merge.integrity import check_bytes_on_disk, check_headers
from fsdp_tune.merge.load_check import Child, compare_parameters, load_and_run
from fsdp_tune.merge.lora.adapt import Adapter, adapt
from fsdp_tune.merge.lora.base_under_adapter import AdapterOptions
from fsdp_tune.merge.manifest_check import ManifestCheck
from fsdp_tune.merge.merge_options import MergeAnswer, MergedAdapter, MergeOptions
from fsdp_tune.merge.merge_record import Facts, write_record
from fsdp_tune.merge.merge_settings import MergeSettings, settle
from fsdp_tune.merge.output_directory import write_companions
from fsdp_tune.merge.quantised import (
    QuantisedModel,
    check_quantised,
    check_quantised_target,
    rounding_notices,
)
from fsdp_tune.merge.read.contents import Contents, read_contents, weights_below
from fsdp_tune.merge.source import NAMED, CheckpointChoice, Selection, select_checkpoint
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import MERGE_RECORD
from fsdp_tune.run.written_files import merge_record, require_unchanged_output

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class MergeResult:
    """`reason`: why this checkpoint was chosen; `dtype`: torch name of the dtype of most parameters, and
    `dtypes` the number of tensors of each; sizes are bytes of tensors."""

    output: Path
    source: Path | str
    """A directory, or the URL that it was downloaded from."""
    step: int | None
    reason: str
    dtype: str
    dtypes: dict[str, int]
    files: tuple[str, ...]
    tensors: int
    parameters: int
    size_bytes: int
    seconds: float
    verified: MergeCheck
    adapter: Adapter | None = None
    notices: tuple[Notice, ...] = field(default=())
    to_quantise: tuple[Recipe, int] | None = None
    """Recipe and largest file in bytes, if the quantised model is to be written too."""
    quantised: QuantisedModel | None = None
    is_new: bool = True
    """False: an earlier merge wrote the model, and only its quantised form was missing."""

    @property
    def is_choice(self) -> bool:
        """Whether there were other checkpoints to merge."""
        return self.reason != NAMED

    def as_dict(self) -> dict[str, Any]:
        """Return the document of `merge-checkpoint --json`."""
        return MergeAnswer(
            merged=str(self.output),
            source=str(self.source),
            step=self.step,
            reason=self.reason,
            dtype=self.dtype,
            dtypes=self.dtypes,
            files=list(self.files),
            tensors=self.tensors,
            parameters=self.parameters,
            size_bytes=self.size_bytes,
            seconds=round(self.seconds, 3),
            verified=self.verified,
            adapter=MergedAdapter(**self.adapter.as_dict()) if self.adapter is not None else None,
            quantised=self.quantised.as_answer() if self.quantised is not None else None,
        ).as_dict()


def merge_checkpoint(
    source: Path, options: MergeOptions, progress: OpenBar | None = None, *, origin: str | None = None
) -> MergeResult:
    """Merge a checkpoint into a model directory that is complete or absent. `origin`: the URL that `source`
    was downloaded from.

    Raises: usage error for contradictory options; FailedError for a damaged source, an output that cannot be
    written, and weights that are not finite.
    """
    started, show = time.monotonic(), progress or _no_progress
    selection = _selected(source, options)
    exports, settings = options.adapter is True, _settle(selection, options)
    if (merged := _merged_before(selection, settings, options)) is not None:
        return merged
    base = Path(options.base) if options.base is not None and Path(options.base).is_dir() else None
    target = place.check_output(settings.output, selection, base)
    with place.writing_to(target):
        leftovers = place.bring_back(target)
    place.check_target(target, overwrite=options.overwrite)
    with ExitStack() as stack:
        contents = read_contents(stack, selection, allow_incomplete=options.allow_incomplete)
        asked = AdapterOptions(exports, settings.base_weights, options.adapter_config, options.base)
        contents, companions, adapter = adapt(stack, contents, selection, asked)
        _check_base_weights(options, adapter)
        if adapter is not None:
            place.check_output(settings.output, selection, adapter.base)
        copy = plan_copy(stack, contents, selection, companions, settings, adapter, options.base)
        layout, tied = copy.layout, copy.tied
        with place.writing_to(target):
            place.check_space(target, layout, companions)
            leftovers += place.clear_leftovers(target)
            written, checked = _write(copy, contents, target, options, show, origin)
    notices = [
        *(*selection.notices, *contents.notices, *leftovers, *tied.notices, *copy.notices, *checked),
        *_non_finite_notices(written),
        *(_notices_of_a_model(selection, settings, target, companions) if not exports else ()),
    ]
    return MergeResult(
        output=target,
        source=origin or selection.weights[0].checkpoint,
        step=selection.weights[0].step,
        reason=selection.reason,
        dtype=layout.main_dtype.name,
        dtypes=_by_frequency(placed.dtype.name for placed in layout.tensors.values()),
        files=tuple(
            sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file())
        ),
        tensors=len(layout.tensors),
        parameters=layout.total_parameters,
        size_bytes=layout.total_size_bytes,
        seconds=time.monotonic() - started,
        verified=settings.verify,
        adapter=adapter,
        notices=tuple(notices),
        to_quantise=(settings.recipe, settings.max_shard_bytes)
        if settings.quantise and settings.recipe is not None
        else None,
    )


def _write(
    copy: Copy, contents: Contents, target: Path, options: MergeOptions, show: OpenBar, origin: str | None
) -> tuple[Written, list[Notice]]:
    """Write the output next to `target`, check it, and put it in its place. Raises: FailedError if a check
    fails."""
    companions, layout, adapter = copy.companions, copy.layout, copy.adapter
    replace = options.overwrite and target.exists()
    with (
        place.stage_owned(target),
        staged_directory(target, replace=replace, last=MERGE_RECORD) as stage,
    ):
        written, compared = _copy(copy, stage, show)
        if written.non_finite and not options.allow_nonfinite:
            _refuse_non_finite(written, copy.settings, target)
        changes = copy.tied.config_changes | dict(adapter.config_changes if adapter is not None else {})
        write_companions(stage, companions, layout, changes, adapter)
        loaded = _verify(copy, stage, written, show, allow_nonfinite=options.allow_nonfinite)
        facts = Facts(
            copy.selection,
            copy.settings,
            companions,
            layout,
            written,
            copy.left_out,
            contents.left_out,
            copy.base_tensors,
            adapter,
            origin,
        )
        write_record(stage, target.name, facts)
    return written, [*compared, *loaded]


def _selected(source: Path, options: MergeOptions) -> Selection:
    choice = CheckpointChoice(options.step, options.best, options.average, options.allow_incomplete)
    return select_checkpoint(weights_below(source), choice)


def _notices_of_a_model(
    selection: Selection, settings: MergeSettings, target: Path, companions: Companions
) -> list[Notice]:
    rounded = [] if settings.quantise else rounding_notices(settings.recipe, target, selection.run)
    return [*_missing(companions), *rounded]


def _settle(selection: Selection, options: MergeOptions) -> MergeSettings:
    """Return the settings. Raises: usage error, also if the quantised model cannot be written."""
    settings = settle(selection, options)
    if settings.quantise:
        check_quantised(settings.recipe, settings.dtype)
    # by the recipe's key, a directory in the way must not keep the merged model from being written
    if options.quantise:
        check_quantised_target(settings.output, overwrite=options.overwrite)
    return settings


def _merged_before(
    selection: Selection, settings: MergeSettings, options: MergeOptions
) -> MergeResult | None:
    """Return the merge that is there already and lacks only its quantised model; None if it has to be
    written, also of a step that was trained again since.

    Raises: FailedError if its files have changed since.
    """
    if not settings.quantise or options.overwrite or options.base is not None or settings.recipe is None:
        return None
    try:
        record = merge_record(settings.output)
        steps, dtype, tensors = record["steps"], record["dtype_option"], list(record["tensors"].values())
        verified, checkpoints = record["verified"], record.get("checkpoints")
    except (KeyError, TypeError, AttributeError):
        return None
    if steps != [weights.step for weights in selection.weights] or dtype != settings.dtype or not tensors:
        return None
    manifests = [weights.manifest for weights in selection.weights]
    identities = [manifest.identity for manifest in manifests if manifest is not None]
    if checkpoints and identities != checkpoints:  # earlier versions recorded none
        return None
    require_unchanged_output(settings.output)
    weights = [path for path in settings.output.glob("*.safetensors") if path.is_file()]
    parameters_of = Counter[str]()
    for each in tensors:
        parameters_of[each["dtype"]] += math.prod(each["shape"])
    return MergeResult(
        output=settings.output,
        source=selection.weights[0].checkpoint,
        step=selection.weights[0].step,
        reason=f"{settings.output} has it already",
        dtype=parameters_of.most_common(1)[0][0],
        dtypes=_by_frequency(each["dtype"] for each in tensors),
        files=tuple(sorted(record["files"])),
        tensors=len(tensors),
        parameters=parameters_of.total(),
        size_bytes=sum(path.stat().st_size for path in weights),
        seconds=0.0,
        verified=verified,
        notices=selection.notices,
        to_quantise=(settings.recipe, settings.max_shard_bytes),
        is_new=False,
    )


def _by_frequency(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())


def _check_base_weights(options: MergeOptions, adapter: Adapter | None) -> None:
    """Refuse the option where it would have no effect. Raises: usage error."""
    if options.base_weights is not None and (adapter is None or adapter.base_weights is None):
        raise usage_error(
            "merge-4-bits",
            f"`--base-weights {options.base_weights}`: the adapter was not trained on weights in 4 "
            "bits, or the source does not record it",
            hint="leave the option out, or pass the run itself: RUN or RUN/checkpoint-N",
        )


def _copy(copy: Copy, stage: Path, show: OpenBar) -> tuple[Written, list[Notice]]:
    """Copy the tensors while the manifest's digests and the names of the parameters are checked. Raises:
    FailedError if any differs."""
    read_back = copy.settings.verify != "none"
    with ExitStack() as stack:
        folder = copy.companions.folder
        child = (
            stack.enter_context(Child("names", folder))
            if folder is not None and copy.needs_parameter_list
            else None
        )
        check = stack.enter_context(
            ManifestCheck(copy.selection.weights, THREADS, copy.layout.total_size_bytes)
        )
        bar = stack.enter_context(show("merging", copy.layout.total_size_bytes, "bytes"))

        def advance(count: int) -> None:
            bar.advance(count)
            check.advance(count)

        with _naming_rotation(copy.selection):
            try:
                written = write_tensors(
                    copy.sources, copy.layout, stage, read_back=read_back, advance=advance
                )
            except FailedError:
                check.finish()  # a file that differs from what was saved explains other errors in it
                raise
            check.finish()
        notices = (
            compare_parameters(child.answer(), copy.shapes, copy.tied.left_out, folder)
            if child is not None and folder is not None
            else []
        )
    return written, notices


@contextmanager
def _naming_rotation(selection: Selection) -> Iterator[None]:
    """Report a checkpoint that its run deleted during the merge as that, and not as damaged files."""
    try:
        yield
    except FailedError as error:
        gone = next((item.checkpoint for item in selection.weights if not item.checkpoint.is_dir()), None)
        if selection.run is None or gone is None:
            raise
        raise failed_error(
            "merge-rotated-away",
            f"{gone.name} was deleted while it was being merged; a training run keeps its newest "
            "`training.save_total_limit` checkpoints",
            where=Where(str(gone)),
            ways_out=(
                f"`fsdp-tune merge-checkpoint {selection.run.path}` merges the newest checkpoint",
                "wait until the run has ended, or give it a larger `training.save_total_limit`",
            ),
        ) from error


def _verify(
    copy: Copy, stage: Path, written: Written, show: OpenBar, *, allow_nonfinite: bool
) -> list[Notice]:
    """Verify the output. quick: parse headers and index. full: also re-read all bytes and load the model with
    transformers."""
    if copy.settings.verify != "none":
        check_headers(stage, copy.layout)
    if copy.settings.verify != "full":
        return []
    with show("reading back", copy.layout.total_size_bytes, "bytes") as bar:
        check_bytes_on_disk(stage, copy.layout, written.digests, bar.advance)
    if copy.adapter is not None and copy.adapter.is_exported:
        return [Notice("merge-not-loaded", "the adapter was not loaded: without its base it is not a model")]
    if copy.companions.config is None:
        return [Notice("merge-not-loaded", "the output was not loaded, since it has no config")]
    return load_and_run(stage, copy.base_tensors.carried, allow_nonfinite=allow_nonfinite)


def _refuse_non_finite(written: Written, settings: MergeSettings, target: Path) -> None:
    """Raise a FailedError with counts for the first tensors; a model that diverged has NaN everywhere."""
    where = Where(str(target))
    overflow = "merge with `--dtype keep`" + (" or `--dtype bf16`" if settings.dtype == "fp16" else "")
    found = sorted(written.non_finite.items())
    problems = [
        Problem(
            "merge-non-finite",
            f"`{name}` has values that are not finite: {counts}",
            where,
            overflow
            if counts.overflow
            else "merge an earlier checkpoint with `--step N`, or keep the values with `--allow-nonfinite`",
        )
        for name, counts in found[:_SHOWN]
    ]
    if len(found) > _SHOWN:
        problems.append(
            Problem(
                "merge-non-finite",
                f"{len(found) - _SHOWN:,} more tensors have values that are not finite",
                where,
            )
        )
    raise FailedError(*problems)


def _non_finite_notices(written: Written) -> Iterator[Notice]:
    for name, counts in sorted(written.non_finite.items()):
        yield Notice("merge-non-finite", f"`{name}` has values that are not finite: {counts}")


def _missing(companions: Companions) -> Iterator[Notice]:
    if companions.missing:
        what = " and ".join(companions.missing)
        yield Notice(
            "merge-bare",
            f"the output lacks {what}: the source has none",
            hint=f"pass `--base MODEL` to take {'it' if len(companions.missing) == 1 else 'them'} from "
            "the model that was trained",
        )


@contextmanager
def _no_progress(label: str, total: int | None, unit: str) -> Iterator[Bar]:  # noqa: ARG001  the shape of OpenBar
    yield _Silent()


class _Silent:
    def advance(self, n: int = 1) -> None:
        """Show nothing."""
