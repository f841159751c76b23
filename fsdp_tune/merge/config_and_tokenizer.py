"""The files next to the weights in a model directory: config, generation config, tokenizer with its chat
template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdp_tune.core.companion_files import CODE, COMPANION, is_of_tokenizer
from fsdp_tune.core.config_changes import with_changes
from fsdp_tune.core.errors import Where, failed_error, usage_error
from fsdp_tune.core.files import read_regular
from fsdp_tune.core.hub import HubResource, model_snapshot, resolves_inside, snapshot
from fsdp_tune.core.tensors.dtypes import DType
from fsdp_tune.core.tensors.quantised_formats import without_quantisation
from fsdp_tune.core.tensors.weight_files import NAMED_KEY
from fsdp_tune.merge.source import Selection
from fsdp_tune.recipe.references import can_only_be_a_path
from fsdp_tune.run.directory import SHARD_FOLDER
from fsdp_tune.run.written_files import model_files

CONFIG_NAME = "config.json"
MAX_CONFIG_BYTES = 16 << 20
_SMALL = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")


@dataclass(frozen=True, slots=True)
class Companions:
    """Config (None if unknown) and the `files` that are copied unchanged: {name in the output: path}."""

    folder: Path | None = None
    config: dict[str, Any] | None = None
    files: dict[str, Path] = field(default_factory=dict[str, Path])
    origin: str | None = None
    is_of_run: bool = False
    """Whether they are those of RUN/model, which has what the run changed."""

    @property
    def missing(self) -> list[str]:
        """Files that transformers needs and that are missing."""
        absent = [] if self.config is not None else [CONFIG_NAME]
        return absent if any(map(is_of_tokenizer, self.files)) else [*absent, "the tokenizer"]

    def with_tokenizer_of(self, folders: Sequence[Path]) -> Companions:
        """Return the same with the first tokenizer found in `folders`: training may have added tokens."""
        for folder in folders:
            files = {
                name: path
                for name, path in _files_of(folder, COMPANION).items()
                if name != "generation_config.json"
            }
            if any(map(is_of_tokenizer, files)):
                kept = {
                    name: path
                    for name, path in self.files.items()
                    if name == "generation_config.json" or CODE.fullmatch(name)
                }
                return replace(self, files=kept | files)
        return self


def find_companions(selection: Selection, base: str | None, *, origin: str | None = None) -> Companions:
    """Find the companions in RUN/model, else in `--base`, else next to the weights, where another tool may
    have put them.

    RUN/model holds the base's files with what the run changed in them, so that `--base` gives a run only the
    weights under an adapter.
    """
    run = selection.run
    named = _named_companions(base, origin) if base is not None else None
    if run is not None and (run.model / CONFIG_NAME).is_file():
        return replace(read_folder(model_files(run)), is_of_run=True)
    if named is not None:
        return named
    weights = selection.weights[0]
    beside = [
        weights.root,
        weights.checkpoint,
        *([weights.root.parent] if weights.root.name == SHARD_FOLDER else []),
    ]
    for place in beside if run is None else []:
        if (place / CONFIG_NAME).is_file():
            return read_folder(place)
    return Companions()


def _named_companions(base: str, origin: str | None) -> Companions:
    folder = Path(base)
    found = (
        read_folder(folder, origin=origin)
        if folder.is_dir()
        else read_folder(snapshot(_on_hub(base), _SMALL), origin=base)
    )
    if found.config is None:
        raise usage_error(
            "merge-base",
            f"`{base}` has no {CONFIG_NAME}",
            hint="pass a model directory or the name of a model on the hub as `--base`",
        )
    return found


def read_folder(folder: Path, *, origin: str | None = None) -> Companions:
    """Return the companions in one model directory; Python files only if its config needs them."""
    config = _read_config(folder) if (folder / CONFIG_NAME).is_file() else None
    wants_code = config is not None and "auto_map" in config
    files = _files_of(folder, COMPANION) | (_files_of(folder, CODE) if wants_code else {})
    return Companions(folder, config, files, origin or str(folder))


def _files_of(folder: Path, wanted: re.Pattern[str]) -> dict[str, Path]:
    paths = sorted([*folder.glob("*"), *folder.glob("additional_chat_templates/*")])
    found = {
        name: path
        for path in paths
        if path.is_file() and wanted.fullmatch(name := path.relative_to(folder).as_posix())
    }
    for path in found.values():
        refuse_outside(path, folder)
    return found


def refuse_outside(path: Path, folder: Path) -> None:
    """Refuse a file of `folder` that is a link to outside of it: a model from elsewhere may name any file of
    this machine."""
    if not resolves_inside(path, folder):
        raise usage_error(
            "merge-link",
            f"it is a link to `{path.resolve()}`, outside of its directory, so it is not copied or "
            "published as a file of the model",
            where=Where(str(path)),
            hint="if the file belongs to the model, put a copy in the place of the link (`cp "
            "--remove-destination`), else remove the link",
        )


def _read_config(folder: Path) -> dict[str, object]:
    path = folder / CONFIG_NAME
    refuse_outside(path, folder)
    try:
        config = json.loads(read_regular(path, most_bytes=MAX_CONFIG_BYTES))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise failed_error(
            "merge-config",
            f"the model's config cannot be read: {error}",
            where=Where(str(path)),
            hint="pass another one with `--base MODEL`",
        ) from error
    return config


def fetch_model(base: str, *, revision: str | None = None, named_in: Path | None = None) -> Path:
    """Return the directory of a model with its weights, downloading it if needed.

    `named_in`: the file that names the model, if the user did not.
    """
    if Path(base).is_dir():
        return Path(base)
    return model_snapshot(_on_hub(base, named_in), _SMALL, revision=revision)


def _on_hub(base: str, named_in: Path | None = None) -> HubResource:
    """Return a model on the hub, or raise a usage error for a name that can only be a path."""
    where = Where(str(named_in)) if named_in is not None else Where()
    if can_only_be_a_path(base):
        raise usage_error(
            "merge-base",
            f"there is no directory `{base}`",
            where=where,
            hint="pass the model's directory: `--base DIR`",
        )
    return HubResource("model", base, "--base", "merge-base", where)


def output_config(
    config: Mapping[str, object],
    dtype: DType | None,
    changes: Mapping[str, object],
    *,
    is_quantised: bool = False,
) -> dict[str, object]:
    """Return the config for the merged weights, with their dtype and `changes`; with settings of quantised
    weights if they are.

    The dtype has the name of transformers 5 and that of transformers before 4.56, `torch_dtype`.
    """
    written = config if is_quantised else without_quantisation(config)
    merged = {key: value for key, value in written.items() if key not in ("_name_or_path", NAMED_KEY)}
    if dtype is not None:
        names = {"dtype": dtype.name, "torch_dtype": dtype.name}
        merged |= names
        for key, value in merged.items():
            if key.endswith("_config") and isinstance(value, dict) and names.keys() & value.keys():
                merged[key] = value | names
    return with_changes(merged, changes)
