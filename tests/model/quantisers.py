"""What stands for a linear layer in the files of every quantiser of transformers.

`python -m tests.model.quantisers` prints the table of docs/evidence/published-bases.md.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from transformers import __version__

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.tensors.quantised_weight import StoredType
from fsdp_tune.model.loading.construct import build_empty
from fsdp_tune.model.loading.model_config import model_config
from fsdp_tune.model.loading.tensor_account import BaseTensors, account_for
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": {"r": 2}},
    "qlora": {"lora": {"r": 2}, "quantization": {}},
}
INT = {
    "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"}}},
    "format": "int-quantized",
}
Part = tuple[str, tuple[int, ...]]
GPTQ: dict[str, Part] = {
    "qweight": ("I32", (8, 48)),
    "qzeros": ("I32", (1, 6)),
    "scales": ("F16", (1, 48)),
    "g_idx": ("I32", (64,)),
}
NVFP4: dict[str, Part] = {
    "weight": ("U8", (48, 32)),
    "weight_scale": ("F8_E4M3", (48, 4)),
    "weight_scale_2": ("F32", ()),
}
STORED: dict[str, dict[str, Part]] = {
    "awq": {"qweight": ("I32", (64, 6)), "qzeros": ("I32", (1, 6)), "scales": ("F16", (1, 48))},
    "bitsandbytes_4bit": {
        "weight": ("U8", (1536, 1)),
        "weight.absmax": ("F32", (48,)),
        "weight.quant_map": ("F32", (16,)),
    },
    "bitsandbytes_8bit": {"weight": ("I8", (48, 64)), "SCB": ("F32", (48,)), "weight_format": ("U8", ())},
    "gptq": GPTQ,
    "aqlm": {
        "codes": ("I8", (48, 8, 1)),
        "codebooks": ("F16", (1, 256, 1, 8)),
        "scales": ("F16", (48, 1, 1, 1)),
    },
    "quanto": {
        "weight._data": ("I8", (48, 64)),
        "weight._scale": ("F32", (48, 1)),
        "input_scale": ("F32", ()),
    },
    "quark": {"weight": ("F8_E4M3", (48, 64)), "weight_scale": ("F32", ()), "input_scale": ("F32", ())},
    "fouroversix": {
        "quantized_weight_values": ("U8", (48, 32)),
        "quantized_weight_scale_factors": ("F8_E4M3", (192,)),
    },
    "fp_quant": {
        "qweight": ("U8", (48, 32)),
        "scales": ("U8", (48, 2)),
        "forward_hadamard_matrix": ("BF16", (32, 32)),
    },
    "eetq": {"weight": ("I8", (64, 48)), "weight_scales": ("F16", (48,))},
    "higgs": {
        "weight": ("I16", (12, 64)),
        "scales": ("F16", (48, 1)),
        "tables": ("F16", (16,)),
        "tables2": ("F16", (16, 16, 2)),
    },
    "hqq": {"W_q": ("U8", (24, 64)), "scale": ("F16", (48, 1)), "zero": ("F16", (48, 1))},
    "compressed-tensors": {"weight": ("I8", (48, 64)), "weight_scale": ("F32", (48, 1))},
    "fbgemm_fp8": {"weight": ("F8_E4M3", (48, 64)), "weight_scale": ("F32", (48, 1))},
    "torchao": {"_weight_qdata": ("I8", (48, 64)), "_weight_scale": ("F32", (48, 1))},
    "bitnet": {"weight": ("U8", (12, 64)), "weight_scale": ("BF16", (1,))},
    "vptq": {
        "indices": ("I32", (1, 64, 3)),
        "centroids.weight": ("F16", (1, 4096)),
        "weight_scale": ("F16", (64,)),
    },
    "spqr": {"dense_weights": ("I64", (100,)), "row_offsets": ("I32", (49,)), "col_vals": ("I32", (10,))},
    "fp8": {"weight": ("F8_E4M3", (48, 64)), "weight_scale_inv": ("F32", (1, 1))},
    "gguf": {"weight": ("U8", (48, 34))},  # blocks of Q8_0
    "nvfp4": NVFP4,
    "mxfp8": {"weight": ("F8_E4M3", (48, 64)), "weight_scale_inv": ("U8", (48, 2))},
    "modelopt": NVFP4,
    "auto-round": GPTQ,
    "mxfp4": {"weight_blocks": ("U8", (48, 2, 16)), "weight_scales": ("U8", (48, 2))},
    "metal": {"weight": ("U32", (48, 8)), "scales": ("BF16", (48, 1)), "qbiases": ("BF16", (48, 1))},
    "sinq": {"W_q": ("U8", (24, 64)), "meta": ("U8", (200,))},
    "gemma": {
        "weight": ("U8", (48, 32)),
        "weight_scale": ("F32", (48, 1)),
        "input_activation_scale": ("F32", ()),
    },
}
"""{method: the tensors that stand for a linear layer [48, 64] in its files}, from the integrations of
transformers 5.24 and ModelOpt."""
MODULE = "model.layers.0.mlp.up_proj"
LLAMA = FAMILIES["llama"] | {"hidden_size": 64}


def settings_of(method: str) -> dict[str, Any]:
    name, _, bits = method.partition("_") if method.startswith("bitsandbytes") else (method, "", "")
    return (
        {"quant_method": name}
        | ({f"load_in_{bits}": True} if bits else {})
        | (INT if method == "compressed-tensors" else {})
    )


def write_config(folder: Path, settings: dict[str, Any], **config: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(LLAMA | {"architectures": ["LlamaForCausalLM"]} | settings | config)
    )


def types_of(plain: Recipe) -> dict[str, StoredType]:
    return {
        name: StoredType("F32", tuple(tensor.shape))
        for name, tensor in build_empty(plain).state_dict().items()
    }


def stored_parts(method: str, module: str) -> dict[str, StoredType]:
    return {f"{module}.{part}": StoredType(*stored) for part, stored in STORED[method].items()}


def without_settings(plain: Recipe, method: str) -> str:
    """Return the problems of a base with a layer of a quantiser, whose config.json has nothing about it."""
    others = {name: stored for name, stored in types_of(plain).items() if not name.startswith(MODULE)}
    return problems_of(plain, others | stored_parts(method, MODULE))


def problems_of(plain: Recipe, types: dict[str, StoredType]) -> str:
    account = account_for(plain, model_config(plain), build_empty(plain), BaseTensors(types, {}, {}))
    return " ".join(problem.message for problem in account.problems)


def with_settings(folder: Path, method: str, kind: str) -> str:
    """Return `decoded`, or the message with which a recipe for a base with the settings of a quantiser is
    refused."""
    write_config(folder, {"quantization_config": settings_of(method)})
    try:
        model_config(recipe_of({"name_or_path": str(folder)}, **KINDS[kind]))
    except FsdpTuneError as error:
        return f"refused: {error.problems[0].message.replace(str(folder), 'BASE')}"
    return "decoded"


def main() -> None:
    print(
        f"transformers {__version__}\n\n| method | full, LoRA | QLoRA | tensors without settings "
        "|\n|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as place:
        write_config(Path(place) / "plain", {})
        plain = recipe_of({"name_or_path": f"{place}/plain"})
        for method in STORED:
            full, lora, qlora = (with_settings(Path(place) / "base", method, kind) for kind in KINDS)
            assert full == lora
            alone = without_settings(plain, method).replace(f"{MODULE}.", "X.").partition(";")[0]
            print(f"| {method} | {full} | {'the same' if qlora == full else qlora} | refused: {alone} |")


if __name__ == "__main__":
    main()
