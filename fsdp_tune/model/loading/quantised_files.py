"""Convert a merged model to the quantised one that it was trained as (`quantization.train`). Run as a child
process.

`python -m fsdp_tune.model.loading.quantised_files` reads {"recipe": RECIPE, "merged": DIR, "output": DIR,
"max_shard_bytes": N} from stdin, writes the weights and a config.json in the form that transformers loads
with torchao, loads them again, and prints one JSON object. Weights are rounded from the compute dtype, as in
training.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, TorchAoConfig

from fsdp_tune.model.internals.transformers_internals import eager_config
from fsdp_tune.model.kernels.fake_quantised import base_config, plan_quantised, prepare_quantised
from fsdp_tune.model.loading.kept_precision import keep_precision
from fsdp_tune.model.shard.local import TORCH_DTYPE
from fsdp_tune.recipe.schema.recipe import Recipe

TOKENS = 32


@dataclass(frozen=True, slots=True)
class Converted:
    layers: int
    """Number of quantised layers."""
    left: tuple[str, ...]
    """Linear layers that are not quantised, the head among them."""
    difference: float
    """Norm of the difference between the logits of the converted and the trained model, over the norm of the
    logits."""
    size_bytes: int
    torchao: str


def convert(recipe: Recipe, merged: Path, output: Path, max_shard_bytes: int) -> Converted:
    """Write the quantised model. At most one model is in memory. Raises: ValueError if transformers does not
    load what was planned."""
    import torchao

    dtype = TORCH_DTYPE[recipe.compute_dtype]
    model = _load(merged, dtype=dtype)
    # as in training, since such layers are not quantised
    keep_precision(model, TORCH_DTYPE[recipe.model.dtype], dtype)
    tied = {*(getattr(model, "all_tied_weights_keys", None) or ())}
    plan = plan_quantised(recipe, model)
    left = tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in plan.quantised
    )
    prepare_quantised(recipe, model)
    trained = _logits(model)
    del model
    settings = TorchAoConfig(base_config(recipe), modules_to_not_convert=patterns_of(left, plan.quantised))
    model = _load(merged, dtype=dtype, quantization_config=settings)
    model.save_pretrained(output, max_shard_size=max_shard_bytes)
    del model
    if lost := sorted(_names(merged) - tied - _names(output)):
        raise ValueError(f"transformers drops tensors of the merged model, such as {lost[0]}")
    _complete_config(merged / "config.json", output / "config.json")
    model = _load(output, dtype=dtype)
    found = {
        name
        for name, module in model.named_modules()
        if type(getattr(module, "weight", None)).__name__ == _KIND
    }
    if differing := sorted(found ^ {*plan.quantised}):
        raise ValueError(
            f"{len(plan.quantised)} layers were trained as quantised, and {len(found)} of the written model "
            f"are; `{differing[0]}` differs"
        )
    difference = (_logits(model) - trained).norm() / trained.norm()
    size_bytes = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    return Converted(len(found), left, float(difference), size_bytes, torchao.__version__)


_KIND = "IntxUnpackedToInt8Tensor"
_PART = re.compile(r"\._weight_[a-z_]+$")
"""End of the name of a part of a quantised weight: its codes, scales and offsets."""


def _names(folder: Path) -> set[str]:
    """Return the names of the weights in a directory, each once."""
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {_PART.sub(".weight", name) for name in file.keys()}  # noqa: SIM118  not a mapping
    return found


def patterns_of(left: Sequence[str], quantised: Collection[str]) -> list[str]:
    """Return patterns for `modules_to_not_convert` that match the layers `left` alone.

    Up to version 5.17 at least, transformers matches a pattern as a prefix of a weight's name: `mlp.gate`
    also leaves `mlp.gate_proj`. Other tools read the names of layers, so a pattern has `.weight` only where
    it needs it.
    """
    return [f"{name}.weight" if any(each.startswith(name) for each in quantised) else name for name in left]


def _load(folder: Path, **options: object) -> PreTrainedModel:
    config = eager_config(folder)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, config=config, trust_remote_code=False, output_loading_info=True, **options
    )
    model, report = loaded
    if wrong := {name: sorted(map(str, keys)) for name, keys in report.items() if keys}:
        raise ValueError(f"transformers reports {wrong}")
    return model.eval()


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    rows = model.get_input_embeddings().weight.shape[0]
    found: torch.Tensor = model(input_ids=(torch.arange(TOKENS) % rows)[None], use_cache=False).logits
    return found.float()


def _complete_config(merged: Path, written: Path) -> None:
    """Keep the config.json of the merged model, and add what describes the quantised weights."""
    found = json.loads(written.read_text(encoding="utf-8"))
    config = json.loads(merged.read_text(encoding="utf-8"))
    config |= {name: found[name] for name in ("quantization_config", "dtype") if name in found}
    written.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    request, output = json.load(sys.stdin), sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # libraries print; stdout must hold the answer alone
        recipe = Recipe.model_validate(request["recipe"])
        found = convert(recipe, Path(request["merged"]), Path(request["output"]), request["max_shard_bytes"])
    output.write(json.dumps(asdict(found)) + "\n")


if __name__ == "__main__":
    main()
