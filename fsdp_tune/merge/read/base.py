"""Read a base's tensors, decoded where they are quantised: those under an adapter, and those that a merge
writes as the base has them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fsdp_tune.core.errors import FsdpTuneError, Problem, Where, failed_error, usage_error
from fsdp_tune.core.families import family_of
from fsdp_tune.core.files import read_regular
from fsdp_tune.core.tensors.activation_scales import is_of_activations
from fsdp_tune.core.tensors.dtypes import DTYPES, DType
from fsdp_tune.core.tensors.quantised_formats import find_encodings, settings_of_files
from fsdp_tune.core.tensors.quantised_weight import Encoded, StoredType
from fsdp_tune.core.tensors.weight_files import UnusableIndexError, list_directory
from fsdp_tune.core.values import as_mapping
from fsdp_tune.merge.config_and_tokenizer import CONFIG_NAME, MAX_CONFIG_BYTES, fetch_model, read_folder
from fsdp_tune.merge.read.contents import as_error, missing_parts, read_tensors
from fsdp_tune.merge.read.pickled_files import read_pickled
from fsdp_tune.merge.read.reader import EncodedTensor, SourceFiles, SourceTensor
from fsdp_tune.merge.source import Selection
from fsdp_tune.merge.weight_formats import Format, find_weights
from fsdp_tune.run.base_model import TENSORS_FILE, BaseRecord, describe_base

if TYPE_CHECKING:
    from fsdp_tune.model.model_files import ModelFacts
    from fsdp_tune.recipe.schema.recipe import Recipe


def record_of_base(selection: Selection) -> BaseRecord:
    """Return what a run, or the directory of its exported adapter, records of its base's tensors; an empty
    record if it has none."""
    folder = selection.run.model if selection.run is not None else selection.weights[0].root
    return BaseRecord.read(folder / TENSORS_FILE) or BaseRecord()


class ReadBase(NamedTuple):
    """The tensors of a directory by name, each quantised weight as one; `of_activations`: names of those that
    by their names quantise what layers compute."""

    tensors: dict[str, SourceTensor]
    of_activations: tuple[str, ...]


def read_base(stack: ExitStack, folder: Path) -> ReadBase:
    """Return the tensors of a model directory; `stack` closes its files. Raises: usage error if it has none
    that are read."""
    found = find_weights(folder)
    shards = _pickled_shards(folder) if found is None else ()
    if (found is None or found.format in (Format.PEFT, Format.PEFT_PICKLE)) and not shards:
        raise usage_error(
            "merge-adapter-base",
            "the base holds no weights that can be read (safetensors are)",
            where=Where(str(folder)),
            hint="give a model directory with `model.safetensors`, or its index and parts: `--base MODEL`",
        )
    files = stack.enter_context(SourceFiles(found.root if found is not None else folder.resolve()))
    of_shards = [tensor for shard in shards for tensor in read_pickled(files, shard)[0]]
    tensors = of_shards if found is None else read_tensors(files, found.format, found.file, may_lack=True)[0]
    if missing := missing_parts(files, tensors):
        raise as_error(missing)
    return _decoded({tensor.name: tensor for tensor in tensors}, folder)


def has_weights(folder: Path) -> bool:
    """Return whether a model directory holds weights at all, not only a configuration."""
    return find_weights(folder) is not None or bool(_pickled_shards(folder))


def _pickled_shards(folder: Path) -> tuple[str, ...]:
    """Return the files of an index of pickled weights, which transformers loads one after the other; none
    with files of other folders."""
    try:
        listed = list_directory(folder)
    except UnusableIndexError:
        return ()
    if listed is None or not (listed.is_pickled and listed.has_index):
        return ()
    return listed.files if all("/" not in name and (folder / name).is_file() for name in listed.files) else ()


def _decoded(tensors: Mapping[str, SourceTensor], folder: Path) -> ReadBase:
    """Return the tensors of a plain model. Raises: FailedError for an encoding that no rule reads."""
    config = read_folder(folder).config or {}
    types = {name: StoredType(tensor.dtype.safetensors, tensor.shape) for name, tensor in tensors.items()}
    encodings = find_encodings(
        types, settings_of_files(lambda name: config if name == CONFIG_NAME else _read(folder / name), types)
    )
    if encodings.unread:
        first = encodings.unread[0]
        raise failed_error(
            "merge-adapter-base",
            f"its `{first.name}` {first.why} ({len(encodings.unread):,} such tensors)",
            where=Where(str(folder)),
            hint="give the same model in 16 bits: `--base MODEL`",
        )
    transposed = next((weight for weight in encodings.weights.values() if weight.is_read_in_full), None)
    if transposed is not None and family_of(config.get("model_type")).has_conv1d:
        message = (
            f"its `{transposed.codes}` ({transposed.rule}) is the weight of a Linear, [out, in], and the "
            "model has Conv1D, [in, out]"
        )
        raise failed_error(
            "merge-adapter-base",
            message,
            where=Where(str(folder)),
            hint="give the same model in 16 bits: `--base MODEL`",
        )
    of_weights = encodings.of_weights
    plain = {name: tensor for name, tensor in tensors.items() if name not in of_weights}
    dtype = _dtype_of(config)
    weights = {name: _weight(weight, tensors, dtype) for name, weight in encodings.weights.items()}
    return ReadBase(plain | weights, encodings.of_activations)


def _read(path: Path) -> dict[str, object] | None:
    """Return the object in a JSON file; None without the file. Raises: FailedError if it is damaged."""
    if not path.is_file():
        return None
    try:
        return as_mapping(json.loads(read_regular(path, most_bytes=MAX_CONFIG_BYTES)))
    except (ValueError, RecursionError) as error:
        raise failed_error(
            "merge-adapter-base",
            f"it is not valid JSON: {error}",
            where=Where(str(path)),
            hint="download or copy the file again",
        ) from error


def _dtype_of(config: Mapping[str, object]) -> DType:
    """Return the dtype that a config.json gives the weights that it has quantised."""
    text: object = config.get("text_config")
    names = [
        place.get(key)
        for place in (config, text if isinstance(text, dict) else {})
        for key in ("dtype", "torch_dtype")
    ]
    found = next((DTYPES[name] for name in names if isinstance(name, str) and name in DTYPES), None)
    return found if found is not None and found.converts else DTYPES["bfloat16"]


def _weight(weight: Encoded, tensors: Mapping[str, SourceTensor], dtype: DType) -> SourceTensor:
    codes, others = tensors[weight.codes], tuple(tensors[part] if part else None for part in weight.others)
    encoded = EncodedTensor(weight, codes, tensors[weight.scales], others)
    return SourceTensor(weight.name, dtype, weight.shape, (), codes.files, encoded=encoded)


def without_others(base: ReadBase, record: BaseRecord) -> dict[str, SourceTensor]:
    """Return the tensors of a base that the trained model has: neither carried nor left out nor dropped.

    Without a record of what was dropped (other tools, earlier versions) names decide.
    """
    is_recorded = bool(record.counts) and len(record.dropped) == record.counts.get("dropped", 0)
    others = {*record.carried, *record.left_out, *(record.dropped if is_recorded else base.of_activations)}
    return {
        name: tensor
        for name, tensor in base.tensors.items()
        if not others.intersection(_stored_names(tensor))
    }


def read_untrained(
    stack: ExitStack,
    selection: Selection,
    named: str | None,
    restored: Mapping[str, str],
    *,
    with_carried: bool = True,
) -> tuple[dict[str, SourceTensor], dict[str, SourceTensor]]:
    """Return the tensors that a merge writes as the base has them: (those that the trained model lacks, those
    that were not trained and of which the checkpoint has rounded copies).

    `named`: the base that the user names. `restored`: {name in a merged model: name in the base} of the
    second ones. Raises: FailedError if the base cannot be found, is known to be another one, or lacks one of
    them.
    """
    carried = record_of_base(selection).carried if with_carried else ()
    if not carried and not restored:
        return {}, {}
    found = _of_recorded_base(stack, selection, named, carried, restored.values())
    names = set(carried)
    return (
        {
            name: replace(tensor, is_carried=True)
            for name, tensor in found.items()
            if names.intersection(_stored_names(tensor))
        },
        {name: replace(found[stored], name=name) for name, stored in restored.items()},
    )


def _of_recorded_base(
    stack: ExitStack,
    selection: Selection,
    named: str | None,
    carried: Collection[str],
    restored: Collection[str],
) -> dict[str, SourceTensor]:
    """Return the tensors that `_find_untrained` finds in the base of a run. Raises: as `read_untrained`."""
    base, names = record_of_base(selection).base, (*carried, *restored)
    name = named or (base.name if base is not None else None)
    where = Where(
        str(
            selection.run.tensors_json
            if selection.run is not None
            else selection.weights[0].root / TENSORS_FILE
        )
    )
    if name is None:
        raise failed_error(
            "merge-carried",
            "it does not name the base with the tensors to carry over",
            where=where,
            hint="`--base MODEL`",
        )
    folder = fetch_model(
        name,
        revision=base.revision if base is not None and named is None else None,
        named_in=Path(where.source or ""),
    )
    what = (
        f"{len(names):,} tensors of {name} that were not trained, such as `{names[0]}`, are written unchanged"
    )
    if base is not None and base.digest is not None and base.differs_from(describe_base(str(folder), None)):
        hint = f"give a copy of the weights of {base.name} as they were: `--base MODEL`"
        raise failed_error(
            "merge-carried",
            f"{what}, and its weights have changed since the training",
            where=Where(str(folder)),
            hint=hint,
        )
    return _find_untrained(read_base(stack, folder), carried, restored, folder)


def carried_problems(recipe: Recipe, facts: ModelFacts) -> list[Problem]:
    """Return why a merge could not read the tensors that it takes from the base, before the run starts. Only
    of files on this machine."""
    record, is_merged = (
        facts.tensors,
        recipe.merge.at_end and (recipe.lora is None or recipe.merge.adapter != "adapter"),
    )
    dtype = recipe.compute_dtype if recipe.merge.dtype == "auto" else recipe.merge.dtype
    restored = record.restored(dtype, facts.base_layout.keeps_fp32(dtype)).values()
    names = (*record.carried, *restored)
    if record.base is None or not names or not is_merged:
        return []
    name = record.base.name
    folder = (
        Path(facts.base_folder)
        if name == str(recipe.model.name_or_path) and facts.base_folder is not None
        else Path(name)
    )
    if not folder.is_dir() or not has_weights(folder):
        return []
    what = f"{len(names):,} tensors that are not trained, such as `{names[0]}`, could not be carried over"
    try:
        with ExitStack() as stack:
            _find_untrained(read_base(stack, folder), record.carried, restored, folder)
    except FsdpTuneError as error:
        leave_out = ", or leave these tensors out: `model.leave_out`" if record.carried else ""
        hint = f"convert the weights to safetensors{leave_out}"
        return [
            Problem(each.code, f"{what} by a merge: {each.message}", each.where, hint)
            for each in error.problems
        ]
    return []


def _find_untrained(
    base: ReadBase, carried: Collection[str], restored: Collection[str], folder: Path
) -> dict[str, SourceTensor]:
    """Return by name the tensors of a base that a merge writes unchanged; a quantised weight is found by each
    of its parts.

    Raises: FailedError if the base lacks one of them. Scales of activations among `carried` are left out:
    earlier versions recorded them.
    """
    wanted = set(carried).difference(base.of_activations).union(restored)
    found = {
        name: tensor for name, tensor in base.tensors.items() if wanted.intersection(_stored_names(tensor))
    }
    missing = wanted.difference(*(_stored_names(tensor) for tensor in found.values()))
    if lost := sorted(name for name in missing if name in restored or not is_of_activations(name)):
        more = f" and {len(lost) - 1:,} more" if len(lost) > 1 else ""
        raise failed_error(
            "merge-carried",
            f"the base lacks `{lost[0]}`{more}, which a merge writes unchanged",
            where=Where(str(folder)),
            hint="give the base with all its tensors: `--base MODEL`",
        )
    return found


def _stored_names(tensor: SourceTensor) -> tuple[str, ...]:
    return (tensor.name,) if tensor.encoded is None else tensor.encoded.weight.parts
