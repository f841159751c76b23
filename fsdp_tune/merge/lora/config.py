"""`adapter_config.json`: the scaling of a LoRA adapter's factors (PEFT's `LoraConfig`, read from PEFT
0.21)."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_tune.core.errors import FsdpTuneError, Where, failed_error, usage_error
from fsdp_tune.core.expert_names import are_stacked_experts
from fsdp_tune.core.files import read_regular
from fsdp_tune.core.tensors.peft_config import (
    CONFIG_FILE,
    initialisation_that_changes_base,
    is_trained_in_full,
    other_arithmetic,
    value_for,
)
from fsdp_tune.core.tensors.peft_names import MAGNITUDE, PeftNames

MAX_CONFIG_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    path: Path
    values: Mapping[str, object]

    @property
    def base(self) -> str | None:
        """The model that the adapter was trained on, as its config names it."""
        value = self.values.get("base_model_name_or_path")
        return value if isinstance(value, str) and value else None

    @property
    def fan_in_fan_out(self) -> bool:
        return self.values.get("fan_in_fan_out") is True

    @property
    def use_dora(self) -> bool:
        return self.values.get("use_dora") is True

    @property
    def ties_embeddings(self) -> bool:
        return self.values.get("ensure_weight_tying") is True

    def saves(self, weight: str) -> bool:
        return is_trained_in_full(self.values, weight)

    def parameters_of(self, module: str) -> list[str]:
        """Return the parameters of a module that `target_parameters` names, by the last part of their
        names."""
        named: Any = self.values.get("target_parameters") or []
        split = [name.rpartition(".") for name in named if isinstance(name, str)]
        return [parameter for owner, _, parameter in split if module == owner or module.endswith(f".{owner}")]

    def scaling(self, module: str, rank: int) -> float:
        """alpha / rank, or alpha / √rank with `use_rslora`, of one module. Raises: FailedError if the config
        has another rank."""
        wanted = self._of_pattern("rank_pattern", module, self.values.get("r", 8))
        alpha = self._of_pattern("alpha_pattern", module, self.values.get("lora_alpha", 8))
        if (
            type(wanted) is not int
            or isinstance(alpha, bool)
            or not isinstance(alpha, int | float)
            or not math.isfinite(alpha)
        ):
            raise self.wrong(f"it gives no rank and alpha of `{module}`")
        if wanted != rank:
            raise self.wrong(
                f"it says that the rank of `{module}` is {wanted}, and the factors have {rank}: it "
                "belongs to another adapter"
            )
        return alpha / (math.sqrt(rank) if self.values.get("use_rslora") is True else rank)

    def _of_pattern(self, name: str, module: str, default: object) -> object:
        patterns = self.values.get(name) or {}
        if not isinstance(patterns, dict):
            raise self.wrong(f"its `{name}` is not an object")
        try:
            return value_for(module, patterns, default)
        except re.error as error:
            raise self.wrong(f"its `{name}` has an invalid pattern: {error}") from error

    def check_mergeable(self, *, has_own_base: bool) -> None:
        """Raises: FailedError for anything but LoRA and DoRA. `has_own_base`: the weights under the adapter
        are in the checkpoint."""
        kind = self.values.get("peft_type")
        if kind != "LORA":
            raise self.unsupported(f"the adapter is of the type {kind}")
        if (name := other_arithmetic(self.values)) is not None:
            raise self.unsupported(f"the adapter was trained with `{name}`")
        start = initialisation_that_changes_base(self.values)
        if not has_own_base and start is not None:
            raise self.unsupported(
                f"the adapter began with `init_lora_weights: {start}`, which changes the base as "
                "training begins",
                "convert it with PEFT (`save_pretrained(…, path_initial_model_for_weight_conversion=…)`) "
                "and merge the result",
            )

    def unsupported(
        self, why: str, hint: str = "merge it with PEFT (`merge_and_unload`), or export it with `--adapter`"
    ) -> FsdpTuneError:
        return failed_error(
            "merge-adapter-unsupported",
            f"{why}: only LoRA and DoRA are merged",
            where=Where(str(self.path)),
            hint=hint,
        )

    def wrong(self, why: str) -> FsdpTuneError:
        return failed_error(
            "merge-adapter-config",
            f"the adapter's config cannot be used: {why}",
            where=Where(str(self.path)),
            hint=f"give the right one with `--adapter-config` (the {CONFIG_FILE} that PEFT wrote)",
        )


def find_config(given: Path | None, places: Sequence[Path]) -> AdapterConfig | None:
    """The one that was given (a file, or the directory that holds it), else the first beside the weights."""
    if given is not None:
        path = given / CONFIG_FILE if given.is_dir() else given
        if not path.is_file():
            raise usage_error(
                "merge-adapter-config", f"there is no {CONFIG_FILE} here", where=Where(str(given))
            )
        return _read(path)
    for place in places:
        if (place / CONFIG_FILE).is_file():
            return _read(place / CONFIG_FILE)
    return None


def _read(path: Path) -> AdapterConfig:
    try:
        values = json.loads(read_regular(path, most_bytes=MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterConfig(path, {}).wrong(str(error)) from error
    if not isinstance(values, dict):
        raise AdapterConfig(path, {}).wrong("it is not a JSON object")
    return AdapterConfig(path, values)


def derive_config(names: PeftNames, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return the text of an `adapter_config.json`, as far as the tensors tell it: ALPHA stands for
    `lora_alpha`.

    None for experts, of which the names of the factors do not tell the parameter.
    """
    if any("base_layer" in module.split(".") or are_stacked_experts(module) for module in names.factors):
        return None
    keys = {
        module: parts.get("lora_A") or parts.get("lora_embedding_A")
        for module, parts in names.factors.items()
    }
    ranks = {module: shapes[key][0] for module, key in keys.items() if key is not None and shapes[key]}
    if not ranks:
        return None
    (rank, _), *_ = Counter(ranks.values()).most_common()
    fields: dict[str, object] = {"peft_type": "LORA", "r": rank, "lora_alpha": "ALPHA"}
    fields["target_modules"] = sorted({module.rpartition(".")[2] for module in names.factors})
    fields |= (
        {"rank_pattern": others}
        if (others := {module: each for module, each in ranks.items() if each != rank})
        else {}
    )
    fields |= {"use_dora": True} if any(name.endswith(MAGNITUDE) for name in names.others) else {}
    saved = sorted({name.rpartition(".")[0] for name in names.saved})
    fields |= {"modules_to_save": saved} if saved else {}
    return json.dumps(fields).replace('"ALPHA"', "ALPHA")
