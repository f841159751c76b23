"""The configuration files of the trained model: what the base wrote and the recipe does not change stays as
the base wrote it.

transformers 5 writes a configuration that it read from an older file with other fields (`rope_parameters`,
`dtype`), which transformers 4 does not read: it would compute with default rotary frequencies and report
nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import file_exists, parse_safetensors_file_metadata
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from fsdp_tune.core.config_changes import (
    changed_fields,
    old_names,
    with_changes,
    with_floats,
    with_old_spellings,
)
from fsdp_tune.core.families import LAYERS
from fsdp_tune.core.hub import cached_model_file, hub_is_reachable
from fsdp_tune.core.model_parts import part_of, without_next_token_layers
from fsdp_tune.core.tensors.quantised_formats import MODELOPT_FILE, settings_of_files, without_quantisation
from fsdp_tune.core.tensors.quantised_weight import StoredType
from fsdp_tune.core.tensors.weight_files import NAMED_KEY, find_weight_list
from fsdp_tune.model.loading.pickled_codes import refuse_pickled_codes
from fsdp_tune.model.loading.pickled_files import pickled_paths, read_pickled
from fsdp_tune.model.loading.stored_tensors import locate, read_objects, twice_problems
from fsdp_tune.model.loading.tensor_account import BaseTensors
from fsdp_tune.model.loading.weight_slices import base_tensors, file_of_model
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.base_model import BaseRecord
from fsdp_tune.run.directory import run_of
from fsdp_tune.run.written_files import model_files

_LOG = logging.getLogger(__name__)
_REQUESTS = 8


_NOT_COMPARED = (
    *(
        "transformers_version",
        "_name_or_path",
        "architectures",
        "dtype",
        "torch_dtype",
        "use_cache",
        "quantization_config",
    ),
    NAMED_KEY,
)
"""Fields that a merge sets, or that do not change the model."""


def base_folder(recipe: Recipe) -> Path | None:
    """Return the directory with the small files of the base: its own, that of the run it comes from, or its
    snapshot in the hub's cache."""
    name = recipe.model.name_or_path
    if name is None or recipe.model.from_config is not None:
        return None
    if (run := run_of(Path(name))) is not None:
        return model_files(run)
    if Path(name).is_dir():
        return Path(name).resolve()
    cached = cached_model_file(name, recipe.model.revision, "config.json")
    return cached.parent if cached is not None else None


def is_on_hub(recipe: Recipe) -> bool:
    """Return whether the base is neither a local directory nor drawn from a configuration."""
    name = recipe.model.name_or_path
    return name is not None and recipe.model.from_config is None and not Path(name).is_dir()


def local_tensors(recipe: Recipe) -> BaseTensors | None:
    """Return the tensors in the safetensors files of a recipe's base, or in its pickled files on this
    machine. Of safetensors files that are not on this machine, the hub sends the headers. None if it has no
    such files, or if they cannot be reached.

    Raises: usage error for pickled files with quantised weights, or that torch does not read.
    """
    folder, name = base_folder(recipe), str(recipe.model.name_or_path)
    if folder is None or run_of(Path(name)) is not None:
        return None

    def find(file: str) -> Path | None:
        path = folder / file
        if path.is_file():
            return path
        # transformers does not load it with the configuration, so the snapshot may lack it
        if file == MODELOPT_FILE and not Path(name).is_dir() and hub_is_reachable():
            return file_of_model(name, recipe.model.revision, file)
        return None

    located = locate(find)
    if located.tensors and located.is_complete:
        return base_tensors(located, find)
    if (
        not Path(name).is_dir()
        and hub_is_reachable()
        and (of_hub := _tensors_of_hub(name, recipe.model.revision, folder)) is not None
    ):
        return of_hub
    base = read_pickled(pickled_paths(find))
    if base is not None:
        refuse_pickled_codes(name, find, base)
    return base


def _tensors_of_hub(name: str, revision: str, folder: Path) -> BaseTensors | None:
    """Return the tensors of a repository from the headers of its files. `folder`: its snapshot, which has
    config.json.

    Raises: usage error for quantised weights in files of another kind.
    """

    def find(file: str) -> Path | None:
        return file_of_model(name, revision, file)

    def read(file: str) -> bytes | None:
        return path.read_bytes() if (path := find(file)) is not None else None

    try:
        listed = find_weight_list(lambda file: file_exists(name, file, revision=revision), read)
        headers = {} if listed is None or listed.is_pickled else _headers_of_hub(name, revision, listed.files)
    except Exception as error:  # noqa: BLE001  of the network too: the ranks read the files, and find what is wrong with them
        _LOG.info("the headers of %s cannot be read: %s", name, error)
        return None
    if listed is None or listed.is_pickled:
        if listed is not None:
            refuse_pickled_codes(name, find)
        return None
    held = listed.holders(headers)
    types = {key: headers[file][key] for key, file in held.files.items()}
    settings = settings_of_files(read_objects(find), types)
    problems = twice_problems(held, folder / listed.first)  # ranks compare values, when they have the files
    return BaseTensors(types, {key: folder / file for key, file in held.files.items()}, settings, problems)


def _headers_of_hub(name: str, revision: str, files: Sequence[str]) -> dict[str, dict[str, StoredType]]:
    """Return types and shapes of the tensors of each file of a repository."""
    with ThreadPoolExecutor(_REQUESTS) as pool:
        found = pool.map(
            lambda file: parse_safetensors_file_metadata(name, file, revision=revision).tensors, files
        )
        return {
            file: {key: StoredType(info.dtype, tuple(info.shape)) for key, info in tensors.items()}
            for file, tensors in zip(files, found, strict=True)
        }


def record_of_run(recipe: Recipe) -> BaseRecord:
    """Return the record of the run that a recipe starts from; an empty one if it starts from no run."""
    run = run_of(Path(str(recipe.model.name_or_path))) if recipe.model.from_config is None else None
    return (BaseRecord.read(run.tensors_json) if run is not None else None) or BaseRecord()


def is_part_of_other(config: PreTrainedConfig, model: PreTrainedModel, tensors: BaseRecord) -> bool:
    """Return whether the trained model is a part of what a merge writes, which is a model of another class.
    `config`: that of the base."""
    return (
        type(config) is not type(model.config)
        and bool(tensors.carried)
        and not is_text_alone(config, model, tensors)
    )


def is_text_alone(config: PreTrainedConfig, model: PreTrainedModel, tensors: BaseRecord) -> bool:
    """Return whether the language model is all that is left of a base of several modalities. `config`: that
    of the base."""
    layers = LAYERS.of(config.get_text_config()) or 0
    parts = {part_of(name, layers) for name in tensors.carried}
    return type(config) is not type(model.config) and bool(tensors.left_out) and parts <= {"mtp"}


def exported_config(
    recipe: Recipe,
    changes: Mapping[str, object],
    config: PreTrainedConfig,
    model: PreTrainedModel,
    tensors: BaseRecord,
) -> dict[str, object]:
    """Return config.json of the trained model. `changes`: the fields of the base that the recipe changes;
    `config`: that of the run.

    It describes what a merge writes: of a base of several modalities it is the text's alone if the others are
    left out. The result is read again: if transformers does not find the run's configuration in it, its own
    spelling is written instead.
    """
    if is_text_alone(config, model, tensors):
        found = with_old_spellings(_fields(model.config) | {"use_cache": True})
    else:
        found = _exported_config(recipe, changes, config)
    layers = LAYERS.of(config.get_text_config()) or 0
    has_lost_layers = any(part_of(name, layers) == "mtp" for name in tensors.left_out)
    return without_next_token_layers(found) if has_lost_layers else found


def _exported_config(
    recipe: Recipe, changes: Mapping[str, object], config: PreTrainedConfig
) -> dict[str, object]:
    new = _fields(config) | {"use_cache": True}
    candidates = [with_old_spellings(new), new]
    folder = base_folder(recipe)
    if folder is not None and (written := _read_object(folder / "config.json")):
        own = with_changes(written, changes)
        candidates = (
            [with_old_spellings(own), own, *candidates]
            if _is_of_transformers_5(written)
            else [own, *candidates]
        )
    # A merged model is not quantised, and its files have the usual names.
    candidates = [
        {key: value for key, value in without_quantisation(each).items() if key != NAMED_KEY}
        for each in candidates
    ]
    return next((candidate for candidate in candidates if _reads_as(candidate, config)), candidates[-1])


def _is_of_transformers_5(written: Mapping[str, object]) -> bool:
    """Return whether a config.json has what transformers 4 does not read: rotary positions, a renamed field,
    an infinity as an object."""
    nested = [
        value for name, value in written.items() if name.endswith("_config") and isinstance(value, dict)
    ]
    has_new_rope = "rope_parameters" in written and "rope_theta" not in written
    has_new_names = not old_names(written, written).keys() <= written.keys()
    return (
        has_new_rope
        or has_new_names
        or with_floats(written) != written
        or any(map(_is_of_transformers_5, nested))
    )


def _fields(config: PreTrainedConfig) -> dict[str, object]:
    return json.loads(config.to_json_string(use_diff=False))


def _reads_as(candidate: Mapping[str, object], config: PreTrainedConfig) -> bool:
    """Return whether a config.json is read as this configuration; fields of other readers may be added."""
    try:
        found = _fields(type(config).from_dict(with_floats(json.loads(json.dumps(candidate)))))
    except (TypeError, ValueError, KeyError, AttributeError):
        return False
    return not _compared(changed_fields(found, _fields(config)))


def _compared(changes: Mapping[str, object]) -> dict[str, object]:
    """Return changes without the fields that are not compared, in nested configurations too."""
    kept = {
        name: _compared(value) if name.endswith("_config") and isinstance(value, dict) else value
        for name, value in changes.items()
        if name not in _NOT_COMPARED
    }
    return {name: value for name, value in kept.items() if value != {} or changes[name] == {}}


def exported_generation_config(recipe: Recipe, config: GenerationConfig) -> dict[str, object]:
    """Return generation_config.json as the base wrote it, or that of `config` if the base has none."""
    folder = base_folder(recipe)
    written = _read_object(folder / "generation_config.json") if folder is not None else None
    return written or json.loads(config.to_json_string())


def _read_object(path: Path | None) -> dict[str, object] | None:
    if path is None:
        return None
    try:
        found: object = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
