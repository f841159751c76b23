"""The adapter that a run starts from: unset keys of `lora:` become those of the adapter that `lora.adapter`
names, as by PEFT's `from_pretrained`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from pydantic import ValidationError

from fsdp_tune.core.tensors.peft_config import CONFIG_FILE, WEIGHTS_FILE
from fsdp_tune.core.tensors.peft_names import PREFIX
from fsdp_tune.core.tensors.safetensors_header import DamagedHeader, read_header
from fsdp_tune.recipe.references import absolute_path
from fsdp_tune.recipe.schema.keys import Finding, given
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.sections import Lora

ADAPTER_KEY = "lora.adapter"
# Keys of `lora:` that PEFT's config has under the same names, with PEFT's values for those that it leaves
# out.
PEFT_DEFAULTS: dict[str, object] = {
    "r": 8,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "target_parameters": [],
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": [],
}
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_MODULE = re.compile(rf"{re.escape(PREFIX)}(.+)\.lora_(embedding_)?A(\.weight)?")


@dataclass(slots=True)
class ContinuedAdapter:
    """`values`: of keys of `lora:`; `reason`: where they are from."""

    values: dict[str, object] = field(default_factory=dict[str, object])
    reason: str = ""
    findings: list[Finding] = field(default_factory=list[Finding])


def continue_adapter(recipe: Recipe, cwd: Path, output: Path) -> ContinuedAdapter:
    """Return the place of the adapter and the values of unset keys. `output`: the run directory, which has
    them if it was started before.

    Whether the adapter fits the model is checked with the model (`model.loading.adapter_files`).
    """
    assert recipe.lora is not None
    assert recipe.lora.adapter is not None
    named = absolute_path(recipe.lora.adapter, cwd).resolve()
    inside = named / "adapter"
    folder = inside if not (named / CONFIG_FILE).is_file() and (inside / CONFIG_FILE).is_file() else named
    config = _read_object(folder / CONFIG_FILE)
    if config is None and (recorded := _recorded_lora(output, (named, inside))) is not None:
        own = {
            key: recorded[key]
            for key in Lora.model_fields
            if key in recorded and not given(recipe, f"lora.{key}")
        }
        return ContinuedAdapter(
            own | {"adapter": recorded["adapter"]}, "recorded by the run as it was started"
        )
    found = ContinuedAdapter({"adapter": str(folder)}, f"the adapter's {CONFIG_FILE}")
    if config is None:
        found.findings += _adapter_of_run(named)
    elif config.get("peft_type") == "LORA":
        own = {
            key: value
            for key, value in _lora_values(config, folder).items()
            if not given(recipe, f"lora.{key}")
        }
        found.findings += _invalid_values(folder, own)
        found.values |= own
    return found


def without_adapter(recipe: Recipe) -> Recipe:
    """Return the recipe for building a model whose adapters are filled from a checkpoint, or not at all; the
    files may be gone."""
    if recipe.lora is None or recipe.lora.adapter is None:
        return recipe
    return recipe.model_copy(update={"lora": recipe.lora.model_copy(update={"adapter": None})})


def _lora_values(config: Mapping[str, object], folder: Path) -> dict[str, object]:
    values = {
        key: default if config.get(key) is None else config[key] for key, default in PEFT_DEFAULTS.items()
    }
    layers = config.get("layers_to_transform")
    targets = config.get("target_modules")
    # PEFT's other ways to choose modules have no keys here: the tensors tell which modules were chosen.
    if targets is None or config.get("exclude_modules") or config.get("layers_pattern"):
        return values | {
            "target_modules": _adapted_modules(folder, values["target_parameters"]),
            "layers_to_transform": None,
        }
    return values | {
        "target_modules": targets,
        "layers_to_transform": [layers] if isinstance(layers, int) else layers,
    }


def _adapted_modules(folder: Path, parameters: object) -> list[str]:
    """Return the full names of the modules with factors in the file, except the owners of
    `target_parameters`."""
    path = folder / WEIGHTS_FILE
    try:
        with open(path, "rb") as file:

            def read(at: int, count: int) -> bytes:
                file.seek(at)
                return file.read(count)

            names = [entry.name for entry in read_header(read, path.stat().st_size, {})]
    except (OSError, DamagedHeader):
        return []  # reported when the tensors are read
    owners = tuple(str(name).rpartition(".")[0] for name in cast(list[object], parameters))
    modules = (found[1] for name in names if (found := _MODULE.fullmatch(name)))
    return sorted(
        {name for name in modules if not name.removesuffix(".base_layer").endswith(owners)}
        if owners
        else set(modules)
    )


def _invalid_values(folder: Path, values: Mapping[str, object]) -> Iterator[Finding]:
    try:
        Lora.model_validate(values)
    except ValidationError as error:
        # a union has one for each of its types
        reasons = {str(wrong["loc"][0]): wrong["msg"] for wrong in error.errors()}
        for key, reason in reasons.items():
            message = f"{ADAPTER_KEY}: {folder}: its `{key}` is {json.dumps(values.get(key))}: {reason}"
            yield Finding(
                "adapter-does-not-fit",
                (ADAPTER_KEY,),
                message,
                f"correct its {CONFIG_FILE}, or write `lora.{key}`",
            )


def _adapter_of_run(named: Path) -> Iterator[Finding]:
    """Report a run of this package without an exported adapter."""
    step = _CHECKPOINT.fullmatch(named.name)
    run = named.parent if step else named
    if (run / "recipe.json").is_file():
        options = f" --step {step[1]} --output DIR" if step else ""
        message = (
            f"{ADAPTER_KEY}: {named} is a {'checkpoint' if step else 'run'}, and has no adapter in "
            "PEFT's format"
        )
        place = "DIR" if step else run
        hint = (
            f"`fsdp-tune merge-checkpoint {run} --adapter{options}` writes one; then `--set "
            f"lora.adapter={place}`"
        )
        yield Finding("adapter-does-not-fit", (ADAPTER_KEY,), message, hint)


def _recorded_lora(output: Path, named: tuple[Path, ...]) -> dict[str, object] | None:
    """Return `lora:` of the recipe of a run that was started from this adapter."""
    recipe = _read_object(output / "recipe.json") or {}
    lora = cast(dict[str, object], recipe.get("lora") or {})
    return lora if lora.get("adapter") in [str(each) for each in named] else None


def _read_object(path: Path) -> dict[str, object] | None:
    """Return a JSON object; None if there is none, which is reported with the model."""
    try:
        found: object = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return cast(dict[str, object], found) if isinstance(found, dict) else None
