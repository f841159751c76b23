"""Models of several modalities in tiny form: what a recipe trains of each, and whether its logits for text
are those of the full model.

`python -m tests.model.composites` writes docs/evidence/data/composites.tsv, a row for each architecture of
transformers.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
)
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.loading.construct import build_empty, build_full
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.loading.language_model import write_language_model
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.architectures.tiny import scaled_down
from tests.merge.published import Base, merge_untrained
from tests.model.recipes import recipe_of

TABLE = Path(__file__).parents[2] / "docs" / "evidence" / "data" / "composites.tsv"
MOST_PARAMETERS = 150_000_000
_MAPPINGS = ("MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ")
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
_SMALLER: dict[str, dict[str, dict[str, Any]]] = {
    "dots3_note": {
        "audio_config": {
            "num_attention_heads": 4,
            "adapter_input_size": 64,
            "adapter_out_dim": 64,
            "num_hidden_layers": 1,
        },
        "vision_config": {"adapter_in_dim": 64, "hidden_size": 64, "embed_dim": 64, "adapter_out_dim": 64},
    },
    "emu3": {"text_config": {"pad_token_id": 0}, "vocabulary_map": {"<image>": 5, "<|extra_200|>": 6}},
    "gemma4": {"text_config": {"pad_token_id": 0}},
    "gemma4_unified": {"text_config": {"pad_token_id": 0}},
    "qwen4_exp": {"text_config": {**_INDEXER, "hc_lowrank": 8, "ngram_vocab_size_base": 100}},
}
"""Fields without which the classes reject the small sizes."""


@dataclass(frozen=True, slots=True)
class Composite:
    """A tiny model in a directory, and its logits [1, tokens, vocabulary] for `ids`."""

    folder: Path
    kind: type[Any]
    ids: torch.Tensor
    logits: torch.Tensor


def class_of(name: str) -> type[Any] | None:
    """Return the class that config.json of a model type names, None if transformers has none with a language
    model."""
    for mapping in _MAPPINGS:
        found = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {}).get(name)
        if isinstance(found, str):
            return getattr(transformers, found)
    return None


def config_of(name: str) -> PreTrainedConfig | None:
    """Return the small configuration of a model type, None if its text is not a model of its own with a
    causal LM."""
    full = CONFIG_MAPPING[name]()
    text = full.get_text_config()
    if (
        text is full
        or class_of(name) is None
        or not {type(full), type(text)} & set(MODEL_FOR_CAUSAL_LM_MAPPING.keys())
    ):
        return None
    fields = scaled_down(full.to_dict())
    for key, value in _SMALLER.get(name, {}).items():
        fields[key] = (fields.get(key) or {}) | value
    return AutoConfig.for_model(**fields | {"model_type": name})


def names() -> list[str]:
    """Return the model types with a configuration of their text."""
    found: list[str] = []
    for name in sorted(CONFIG_MAPPING_NAMES):
        try:
            full = CONFIG_MAPPING[name]()
            is_composite = full.get_text_config() is not full
        except Exception:  # noqa: BLE001  not one that has defaults
            continue
        if is_composite and class_of(name) is not None:
            found.append(name)
    return found


@torch.no_grad()
def make(name: str, folder: Path, **fields: Any) -> Composite:
    """Write a tiny model with random weights. `fields`: of its configuration."""
    config, kind = config_of(name), class_of(name)
    assert config is not None
    assert kind is not None
    for key, value in fields.items():
        place, _, field = key.rpartition("__")
        setattr(getattr(config, place) if place else config, field, value)
    with torch.device("meta"):
        parameters = sum(each.numel() for each in kind(config).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"{parameters:,} parameters at the smallest sizes")
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    ids = torch.randint(10, 200, (1, 12))
    full = kind.from_pretrained(folder, dtype=torch.float32).eval()
    return Composite(folder, kind, ids, logits_of(full, ids))


@torch.no_grad()
def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    # 5.24: it takes no text alone
    inner = model.language_model if type(model).__name__ == "Llama4ForConditionalGeneration" else model
    return inner(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


def recipe_for(composite: Composite) -> Recipe:
    return recipe_of(
        {"name_or_path": str(composite.folder), "dtype": "fp32"},
        data={"train": [{"path": "x"}], "max_length": 32},
    )


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    return float((one - other).abs().max() / one.abs().max())


def merged_difference(composite: Composite, folder: Path) -> float:
    """Return the difference of the logits of the live model, and of the merged one in the class of its
    config.json, from the base's."""
    live = build_full(recipe_for(composite)).eval()
    stored = load_file(composite.folder / "model.safetensors")
    merge_untrained(Base(composite.folder, stored), "full", folder)
    merged = composite.kind.from_pretrained(folder / "run" / "merged", dtype=torch.float32).eval()
    return max(difference(composite.logits, logits_of(model, composite.ids)) for model in (live, merged))


def written_difference(composite: Composite, folder: Path) -> float:
    """Return the difference of the logits of the language model that is written to a directory. Raises: usage
    error."""
    write_language_model(str(composite.folder), folder)
    text = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert find_facts(recipe_of({"name_or_path": str(folder)})).problems == ()
    return difference(composite.logits, logits_of(text, composite.ids))


def outcome(name: str, folder: Path) -> tuple[str, str, str]:
    """Return (what is trained, class or reason, difference of logits)."""
    try:
        if config_of(name) is None:
            return "refused", "transformers has no causal LM of its text", ""
        composite = make(name, folder / "base")
    except Exception as error:  # noqa: BLE001  a row with its reason
        return "not tried", f"{type(error).__name__}: {' '.join(str(error).split())[:120]}", ""
    try:
        live = build_empty(recipe_for(composite))
    except FsdpTuneError:
        try:
            return "language model", "", f"{written_difference(composite, folder / 'text'):.1e}"
        except FsdpTuneError as error:
            return (
                "refused",
                str(error).replace(str(composite.folder), name).partition("cannot be written: ")[2],
                "",
            )
    found = find_facts(recipe_for(composite))
    if found.problems:
        return "refused", found.problems[0].message, ""
    return "trained", type(live).__name__, f"{merged_difference(composite, folder / 'made'):.1e}"


def main() -> None:
    rows = ["architecture\tclass\tresult\tclass or reason\tdifference of logits"]
    for name in sys.argv[1:] or names():
        with tempfile.TemporaryDirectory() as place:
            try:
                found = outcome(name, Path(place))
            except Exception as error:  # noqa: BLE001  a row, whatever it raises
                found = ("failed", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", "")
            rows.append("\t".join([name, getattr(class_of(name), "__name__", ""), *found]))
        print(rows[-1], file=sys.stderr)
    if not sys.argv[1:]:
        TABLE.write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
