"""What makes weights a model directory: config, generation config, tokenizer with its chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_tune.errors import Where, failed_error, usage_error
from fsdp_tune.merge.dtypes import DType
from fsdp_tune.merge.source import SHARD_FOLDER, Selection

CONFIG_NAME = "config.json"
_FILES = re.compile(
    r"generation_config\.json|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|[\w.-]+\.(model|tiktoken)|chat_template\.(jinja|json)|additional_chat_templates/[\w.-]+\.jinja|(pre)?processor_config\.json"
)
_CODE = re.compile(r"[\w-]+\.py")
MAX_CONFIG_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Companions:
    """`config` is None where nothing is known about the model. `files` are copied as they are: {name in the output: path}."""

    folder: Path | None = None
    config: dict[str, Any] | None = None
    files: dict[str, Path] = field(default_factory=dict[str, Path])
    origin: str | None = None

    @property
    def missing(self) -> list[str]:
        """What transformers will want and is not there."""
        absent = [] if self.config is not None else [CONFIG_NAME]
        return (
            absent
            if any(name.startswith("tokenizer") or name.endswith((".model", ".tiktoken")) for name in self.files)
            else [*absent, "the tokenizer"]
        )


def find_companions(selection: Selection, base: str | None) -> Companions:
    """From `--base`, else from RUN/model, else from beside the weights, where another tool may have put them."""
    if base is not None:
        folder = Path(base)
        found = read_folder(folder) if folder.is_dir() else read_folder(_download(base), origin=base)
        if found.config is None:
            raise usage_error(
                "merge-base", f"`{base}` has no {CONFIG_NAME}", hint="`--base` is a model directory or the name of a model on the hub"
            )
        return found
    weights = selection.weights[0]
    beside = [weights.root, weights.checkpoint, *([weights.root.parent] if weights.root.name == SHARD_FOLDER else [])]
    places = [selection.run.model] if selection.run is not None else beside
    for place in places:
        if (place / CONFIG_NAME).is_file():
            return read_folder(place)
    return Companions()


def read_folder(folder: Path, *, origin: str | None = None) -> Companions:
    """The companions in one model directory; python files only when its config says that the model needs them."""
    config = _read_config(folder / CONFIG_NAME) if (folder / CONFIG_NAME).is_file() else None
    wants_code = config is not None and "auto_map" in config
    files = {
        name: path
        for path in sorted([*folder.glob("*"), *folder.glob("additional_chat_templates/*")])
        if path.is_file() and (_FILES.fullmatch(name := path.relative_to(folder).as_posix()) or (wants_code and _CODE.fullmatch(name)))
    }
    return Companions(folder, config, files, origin or str(folder))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ValueError("it is too large")
        config = json.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise failed_error(
            "merge-config",
            f"the model's config cannot be read: {error}",
            where=Where(str(path)),
            hint="give another one with `--base MODEL`",
        ) from error
    return config


def _download(base: str) -> Path:
    """Config and tokenizer of a model on the hub (or in its cache), without the weights."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py"]
    try:
        return Path(snapshot_download(base, allow_patterns=wanted, ignore_patterns=["*.index.json"]))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise usage_error(
            "merge-base",
            f"`{base}` is no directory here, and the hub does not give it ({type(error).__name__})",
            hint="give the path of a local copy, or check the name, the network and `hf auth login`",
        ) from error


def output_config(config: Mapping[str, Any], dtype: DType | None, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config as it belongs to the merged weights: their dtype, and what was learnt about ties.

    transformers 5 reads `dtype`; the older `torch_dtype` would contradict it and goes.
    """
    merged = {key: value for key, value in config.items() if key not in ("torch_dtype", "_name_or_path")}
    if dtype is not None:
        merged["dtype"] = dtype.name
        for key, value in merged.items():
            if key.endswith("_config") and isinstance(value, dict) and ("dtype" in value or "torch_dtype" in value):
                merged[key] = {name: item for name, item in value.items() if name != "torch_dtype"} | {"dtype": dtype.name}
    return {**merged, **changes}
