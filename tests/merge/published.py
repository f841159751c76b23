"""Bases in the layouts that are published, in small, and a merge of each without training: tensors in, tensors out.

`python -m tests.merge.published` writes docs/evidence/data/published-bases.tsv, a row for each layout and kind of training.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.merging import merge_checkpoint
from fsdp_tune.model.adapters.lora import name_in_base
from fsdp_tune.model.loading.construct import build_empty, build_full, model_config
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.loading.weight_slices import find_weight_files, fits, read_slices
from fsdp_tune.model.model_files import ModelInspection
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.base_model import BaseModel, describe_base
from tests.architectures.tiny import config_of
from tests.merge.checkpoints import make_run
from tests.model.recipes import recipe_of

State = dict[str, torch.Tensor]
TABLE = Path(__file__).parents[2] / "docs" / "evidence" / "data" / "published-bases.tsv"
KINDS = ("full", "lora")
IDS = {"vocab_size": 384, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
TEXT = {**IDS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TEXT |= {"head_dim": 16, "tie_word_embeddings": False}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
DEEPSEEK = {**TEXT, "num_hidden_layers": 2, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4}
DEEPSEEK |= {"n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16}
DEEPSEEK |= {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "num_nextn_predict_layers": 1}
VISION = {"hidden_size": 32, "intermediate_size": 32, "image_size": 16, "patch_size": 4}
QWEN35 = {**TEXT, "mtp_num_hidden_layers": 1, "layer_types": ["linear_attention", "full_attention"]}
QWEN35 |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4}
QWEN_VISION |= {"num_position_embeddings": 16}


@dataclass(slots=True)
class Base:
    """A directory of a model, and what its files mean: `plain` values by name, and the names that the trained class lacks."""

    folder: Path
    plain: State = field(default_factory=State)
    carried: frozenset[str] = frozenset()
    lora: dict[str, Any] = field(default_factory=lambda: {"r": 4})


def _save(folder: Path, kind: str, **config: Any) -> Base:
    torch.manual_seed(0)
    settings = AutoConfig.for_model(kind, **{key: value for key, value in config.items() if key != "model_type"})
    named: Any = getattr(transformers, _CLASSES[kind], None) if kind in _CLASSES else None
    model: Any = named(settings) if named is not None else AutoModelForCausalLM.from_config(settings)
    model.save_pretrained(folder)
    return Base(folder, load_file(folder / "model.safetensors"))


_CLASSES = {"qwen3_5": "Qwen3_5ForConditionalGeneration", "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration"}


def _write(base: Base, stored: State, quantization: dict[str, Any] | None = None) -> Base:
    save_file(stored, base.folder / "model.safetensors", metadata={"format": "pt"})
    if quantization is not None:
        path = base.folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    return base


def _with(base: Base, extra: State) -> Base:
    """Add tensors that the class does not have."""
    base.plain |= extra
    base.carried = frozenset(extra)
    return _write(base, base.plain)


def _quantised(
    base: Base, encode: Callable[[str, torch.Tensor], tuple[State, torch.Tensor]], settings: dict[str, Any] | None = None
) -> Base:
    """Store the projections as codes; `encode` returns the stored tensors of a weight, and the values that they mean."""
    stored: State = {}
    for name, value in base.plain.items():
        if name.endswith("_proj.weight") and value.ndim == 2:
            codes, base.plain[name] = encode(name, value)
            stored |= codes
        else:
            stored[name] = value
    return _write(base, stored, settings)


def _fp8(name: str, value: torch.Tensor) -> tuple[State, torch.Tensor]:
    scale = value.float().abs().max() / 448
    codes = (value.float() / scale).to(torch.float8_e4m3fn)
    grid = scale.expand(-(-value.shape[0] // 128), -(-value.shape[1] // 128)).contiguous()
    return {name: codes, f"{name}_scale_inv": grid}, codes.float() * scale


def _by_channel(kind: torch.dtype, largest: float) -> Callable[[str, torch.Tensor], tuple[State, torch.Tensor]]:
    def encode(name: str, value: torch.Tensor) -> tuple[State, torch.Tensor]:
        scale = value.abs().amax(1, keepdim=True) / largest
        codes = (value / scale).round().to(kind) if kind == torch.int8 else (value / scale).to(kind)
        return {name: codes, f"{name}_scale": scale}, codes.float() * scale

    return encode


def _int4(name: str, value: torch.Tensor) -> tuple[State, torch.Tensor]:
    groups = value.reshape(len(value), -1, 32)
    scale = groups.abs().amax(2, keepdim=True) / 7
    codes = (groups / scale).round().clamp(-8, 7)
    shifted = (codes.reshape(value.shape) + 8).to(torch.int64)
    words = sum((shifted[:, at::8] << (4 * at)) for at in range(8))
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    stored = {f"{name}_packed": packed, f"{name}_scale": scale[..., 0].contiguous(), f"{name}_shape": torch.tensor(value.shape)}
    return stored, (codes * scale).reshape(value.shape)


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _nvfp4(name: str, value: torch.Tensor) -> tuple[State, torch.Tensor]:
    """Return the tensors of ModelOpt: the nearest of 16 values, a scale in fp8 for 16 of a row, and one of the tensor."""
    groups = value.reshape(len(value), -1, 16)
    of_tensor = value.abs().max() / (448 * 6)
    scales = (groups.abs().amax(2) / 6 / of_tensor).to(torch.float8_e4m3fn)
    factors = (scales.float() * of_tensor)[..., None]
    codes = ((groups / factors.clamp(min=1e-9))[..., None] - _E2M1).abs().argmin(-1).reshape(value.shape).to(torch.uint8)
    stored = {name: codes[:, ::2] | codes[:, 1::2] << 4, f"{name}_scale": scales, f"{name}_scale_2": of_tensor}
    stored[name.replace("weight", "input_scale")] = torch.tensor(0.01)
    return stored, (_E2M1[codes.long()].reshape(groups.shape) * factors).reshape(value.shape)


def _nvfp4_packed(name: str, value: torch.Tensor) -> tuple[State, torch.Tensor]:
    """Return the tensors of compressed-tensors: those of ModelOpt with the reciprocal of the scale of the tensor."""
    stored, _ = _nvfp4(name, value)
    of_tensor, codes, scales = (1 / stored[f"{name}_scale_2"]).reshape(1), stored[name].long(), stored[f"{name}_scale"]
    values = torch.stack([_E2M1[codes & 15], _E2M1[codes >> 4]], -1).reshape(len(value), -1, 16)
    found = {f"{name}_packed": stored[name], f"{name}_scale": scales, f"{name}_global_scale": of_tensor}
    return found, (values * (scales.float() / of_tensor)[..., None]).reshape(value.shape)


def _words(values: torch.Tensor, order: Sequence[int] = range(8)) -> torch.Tensor:
    """Return words of eight values of a row each, value i in the four bits from 4 * order[i] on."""
    words = sum(values.long()[:, at::8] << (4 * position) for at, position in enumerate(order))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).contiguous()


def _by_groups(value: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes [in, out], zero points and scales [groups, out] of a weight, and the values that they mean. `index`: of groups."""
    groups = int(index.max()) + 1
    lowest, highest = (
        torch.stack([edge(value.T[index == at]) for at in range(groups)]) for edge in (lambda x: x.amin(0), lambda x: x.amax(0))
    )
    scales = ((highest - lowest) / 15).half()
    zeros = (-lowest / scales).round().clamp(1, 15)
    codes = (value.T / scales[index] + zeros[index]).round().clamp(0, 15)
    return codes, zeros, scales, (scales[index] * (codes - zeros[index]).half()).T.float().contiguous()


def _asymmetric(bits: int, size: int) -> Callable[[str, torch.Tensor], tuple[State, torch.Tensor]]:
    """Return an encoder to packed integers with packed zero points, in groups of `size` inputs that are not next to each other."""

    def words(codes: torch.Tensor) -> torch.Tensor:
        per_word = 32 // bits
        found = sum(codes.long()[:, at::per_word] << (bits * at) for at in range(per_word))
        return torch.where(found >= 1 << 31, found - (1 << 32), found).to(torch.int32).contiguous()

    def encode(name: str, value: torch.Tensor) -> tuple[State, torch.Tensor]:
        limit, index = 1 << bits, torch.randperm(value.shape[1]) % (value.shape[1] // size)
        scales, zeros = (
            torch.rand(len(value), value.shape[1] // size) / limit + 0.01,
            torch.randint(limit, (len(value), int(index.max()) + 1)),
        )
        codes = (value / scales[:, index] + zeros[:, index]).round().clamp(0, limit - 1)
        parts = {"packed": words(codes), "scale": scales, "zero_point": words(zeros.T).T.contiguous(), "g_idx": index.int()}
        return {f"{name}_{part}": stored for part, stored in parts.items()}, (codes - zeros[:, index]) * scales[:, index]

    return encode


def _int4_and_int8(name: str, value: torch.Tensor) -> tuple[State, torch.Tensor]:
    return _asymmetric(4, 32)(name, value) if "self_attn" in name else _asymmetric(8, 64)(name, value)


INT4_AND_INT8 = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        f"group_{bits}": {
            "targets": [targets],
            "format": "pack-quantized",
            "weights": {"num_bits": bits, "type": "int", "symmetric": False, "strategy": "group", "group_size": size, "actorder": "group"},
        }
        for bits, size, targets in ((4, 32, "re:.*self_attn.*"), (8, 64, "re:.*mlp.*"))
    },
}


def _gptq(name: str, value: torch.Tensor) -> tuple[State, torch.Tensor]:
    """Return the tensors of GPTQ with `desc_act`: groups of inputs that are not next to each other, and zero points less one."""
    index = torch.randperm(value.shape[1]) % (value.shape[1] // 32)
    codes, zeros, scales, means = _by_groups(value, index)
    owner = name.removesuffix("weight")
    parts = {"qweight": _words(codes.T).T.contiguous(), "qzeros": _words(zeros - 1), "scales": scales, "g_idx": index.int()}
    return {f"{owner}{part}": stored for part, stored in parts.items()}, means


def _awq(name: str, value: torch.Tensor) -> tuple[State, torch.Tensor]:
    codes, zeros, scales, means = _by_groups(value, torch.arange(value.shape[1]) // 32)
    owner, order = name.removesuffix("weight"), (0, 4, 1, 5, 2, 6, 3, 7)
    return {f"{owner}qweight": _words(codes, order), f"{owner}qzeros": _words(zeros, order), f"{owner}scales": scales}, means


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def _fp8_of_tensor(name: str, value: torch.Tensor) -> tuple[State, torch.Tensor]:
    scale = value.abs().max() / 448
    codes = (value / scale).to(torch.float8_e4m3fn)
    stored = {name: codes, f"{name}_scale": scale, name.replace("weight", "input_scale"): torch.tensor(0.01)}
    return stored, codes.float() * scale


def _of_older_modelopt(base: Base) -> Base:
    """Write the settings of ModelOpt to a file of their own, and nothing to config.json."""
    (base.folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "group_size": 16}}))
    return base


CACHE = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}


def _with_cache(base: Base) -> Base:
    """Add the scales of a cache in fp8 next to projections in floating point."""
    kinds = [name.removesuffix("_proj.weight") for name in base.plain if name.endswith((".k_proj.weight", ".v_proj.weight"))]
    return _write(base, base.plain | {f"{kind}_scale": torch.tensor([0.02]) for kind in kinds}, CACHE)


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}


def _next_token_layer(base: Base, layer: int) -> Base:
    """Copy the last layer to one beyond it, with the tensors that join the two (DeepSeek V3, GLM)."""
    last = f"model.layers.{layer - 1}."
    extra = {name.replace(last, f"model.layers.{layer}."): value.clone() for name, value in base.plain.items() if name.startswith(last)}
    extra |= {f"model.layers.{layer}.eh_proj.weight": torch.randn(64, 128), f"model.layers.{layer}.enorm.weight": torch.ones(64)}
    base.lora = {"r": 4, "target_modules": ["o_proj"]}
    return _with(base, extra | {f"model.layers.{layer}.shared_head.head.weight": base.plain["lm_head.weight"].clone()})


def _mtp(base: Base) -> Base:
    extra = {"mtp.fc.weight": torch.randn(64, 128).bfloat16(), "mtp.norm.weight": torch.ones(64).bfloat16()}
    extra["mtp.layers.0.mlp.up_proj.weight"] = torch.randn(128, 64).bfloat16()
    visual = {name for name in base.plain if ".visual." in name}
    found = _with(base, extra)
    found.carried |= visual
    found.lora = {"r": 4, "target_modules": ["q_proj", "in_proj_z", "o_proj"]}
    return found


def _gpt_oss(base: Base) -> Base:
    stored = dict(base.plain)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, columns, rows // 32), dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        base.plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return _write(base, stored, {"quant_method": "mxfp4"})


def _renamed(base: Base, *, without: str = "", extra: State) -> Base:
    base.plain = {name.removeprefix(without): value for name, value in base.plain.items()}
    return _with(base, extra)


def _qwen35(folder: Path, kind: str, **text: Any) -> Base:
    return _mtp(_save(folder, kind, text_config={**QWEN35, **text}, vision_config=QWEN_VISION, image_token_id=100, video_token_id=101))


def _deepseek_v4(folder: Path) -> Base:
    """Names without the prefix of the bare model, `head.weight`, and a layer `mtp.0` (DeepSeek V4), which transformers does not write."""
    base = _save(folder, "deepseek_v4", **config_of("deepseek_v4") | {"output_router_logits": False, "num_nextn_predict_layers": 1})
    whole = {"embed_tokens.weight": "embed.weight", **{f"hc_head.hc_{end}": f"hc_head_{end}" for end in ("base", "fn", "scale")}}
    names = {name: name.removeprefix("model.") for name in base.plain}
    base.plain = {whole.get(names[name], names[name]): value for name, value in base.plain.items()}
    extra = {name.replace("layers.1.", "mtp.0."): value.clone() for name, value in base.plain.items() if name.startswith("layers.1.")}
    base.lora = {"r": 4, "target_modules": ["q_a_proj", "kv_proj"]}
    return _with(base, extra | {"mtp.0.e_proj.weight": torch.randn(8, 8)})


def _phi4_multimodal(folder: Path) -> Base:
    """Vision, audio and text are one class, which has statistics of audio as buffers."""
    fields = config_of("phi4_multimodal")
    base = _save(folder, **{"kind" if key == "model_type" else key: value for key, value in fields.items()})
    base.lora = {"r": 4, "target_modules": r"model\.layers\.\d+\.(self_attn|mlp)\.(qkv_proj|o_proj|gate_up_proj|down_proj)"}
    return base


GPT2 = {**IDS, "n_embd": 64, "n_layer": 2, "n_head": 4}
GPT_OSS = {**TEXT, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
LAYOUTS: dict[str, Callable[[Path], Base]] = {
    "llama": lambda folder: _save(folder, "llama", **TEXT),
    "llama with rotary frequencies": lambda folder: _renamed(
        _save(folder, "llama", **TEXT), extra={"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(8)}
    ),
    "llama, quantised cache (compressed-tensors)": lambda folder: _with_cache(_save(folder, "llama", **TEXT)),
    "llama int8 (compressed-tensors)": lambda folder: _quantised(
        _save(folder, "llama", **TEXT), _by_channel(torch.int8, 127), _compressed("int-quantized", num_bits=8, type="int")
    ),
    "llama int4 (compressed-tensors)": lambda folder: _quantised(
        _save(folder, "llama", **TEXT), _int4, _compressed("pack-quantized", num_bits=4, type="int", group_size=32)
    ),
    "llama int4 + int8, zero points, g_idx (compressed-tensors)": lambda folder: _quantised(
        _save(folder, "llama", **TEXT), _int4_and_int8, INT4_AND_INT8
    ),
    "llama GPTQ": lambda folder: _quantised(_save(folder, "llama", **TEXT), _gptq, GPTQ),
    "llama AWQ": lambda folder: _quantised(_save(folder, "llama", **TEXT), _awq, AWQ),
    "qwen3_moe GPTQ": lambda folder: _quantised(_save(folder, "qwen3_moe", **TEXT, **EXPERTS), _gptq, GPTQ),
    "deepseek_v3 AWQ + layer": lambda folder: _quantised(_next_token_layer(_save(folder, "deepseek_v3", **DEEPSEEK), 2), _awq, AWQ),
    "qwen3 fp8": lambda folder: _quantised(_save(folder, "qwen3", **TEXT), _fp8, FP8),
    "qwen3 fp8 (compressed-tensors)": lambda folder: _quantised(
        _save(folder, "qwen3", **TEXT), _by_channel(torch.float8_e4m3fn, 448), _compressed("float-quantized", num_bits=8, type="float")
    ),
    "qwen3 nvfp4 (ModelOpt)": lambda folder: _quantised(_save(folder, "qwen3", **TEXT), _nvfp4, {"quant_method": "modelopt"}),
    "qwen3 nvfp4 (compressed-tensors)": lambda folder: _quantised(
        _save(folder, "qwen3", **TEXT), _nvfp4_packed, _compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16)
    ),
    "qwen3 fp8 (ModelOpt)": lambda folder: _quantised(_save(folder, "qwen3", **TEXT), _fp8_of_tensor, {"quant_method": "modelopt"}),
    "qwen3_moe nvfp4 (hf_quant_config.json)": lambda folder: _of_older_modelopt(
        _quantised(_save(folder, "qwen3_moe", **TEXT, **EXPERTS), _nvfp4)
    ),
    "qwen3 tied": lambda folder: _save(folder, "qwen3", **{**TEXT, "tie_word_embeddings": True}),
    "qwen3_moe": lambda folder: _save(folder, "qwen3_moe", **TEXT, **EXPERTS),
    "qwen3_moe fp8": lambda folder: _quantised(_save(folder, "qwen3_moe", **TEXT, **EXPERTS), _fp8, FP8),
    "mixtral": lambda folder: _save(folder, "mixtral", **TEXT, **EXPERTS),
    "deepseek_v3 + layer": lambda folder: _next_token_layer(_save(folder, "deepseek_v3", **DEEPSEEK), 2),
    "deepseek_v3 fp8 + layer": lambda folder: _quantised(_next_token_layer(_save(folder, "deepseek_v3", **DEEPSEEK), 2), _fp8, FP8),
    "glm4_moe + layer": lambda folder: _next_token_layer(_save(folder, "glm4_moe", **{**DEEPSEEK, "head_dim": 16}), 2),
    **({"deepseek_v4 + mtp": _deepseek_v4} if "deepseek_v4" in CONFIG_MAPPING else {}),
    "gpt_oss": lambda folder: _save(folder, "gpt_oss", **GPT_OSS),
    "gpt_oss mxfp4": lambda folder: _gpt_oss(_save(folder, "gpt_oss", **GPT_OSS)),
    "qwen3_5 + visual + mtp": lambda folder: _qwen35(folder, "qwen3_5"),
    "qwen3_5_moe + visual + mtp": lambda folder: _qwen35(folder, "qwen3_5_moe", **EXPERTS, shared_expert_intermediate_size=32),
    "gemma3 + vision": lambda folder: _save(
        folder,
        "gemma3",
        text_config={**TEXT, "tie_word_embeddings": True},
        vision_config={**VISION, "num_hidden_layers": 1, "num_attention_heads": 2},
        mm_tokens_per_image=4,
        image_token_index=100,
        boi_token_index=101,
        eoi_token_index=102,
    ),
    "phi4_multimodal": _phi4_multimodal,
    "gpt2 of the hub": lambda folder: _renamed(
        _save(folder, "gpt2", **GPT2), without="transformer.", extra={"h.0.attn.bias": torch.ones(1, 1, 64, 64)}
    ),
    "gpt_neox with masks": lambda folder: _renamed(
        _save(folder, "gpt_neox", **TEXT), extra={"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 64, 64, dtype=torch.bool)}
    ),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """`way`: how ranks load the base; `differing`: tensors of the base that the merged model lacks, adds or has with other values."""

    way: str
    counts: dict[str, int]
    merged: int
    differing: tuple[str, ...]
    reported: tuple[str, ...]
    """Keys that transformers or PEFT report when they load what was written."""


def merge_untrained(base: Base, kind: str, folder: Path, **model: Any) -> Outcome:
    """Load a base in both ways, save it as a run does, and merge."""
    lora = base.lora if kind == "lora" else None
    sections: dict[str, Any] = {"merge": {"dtype": "fp32"}, "data": {"train": [{"path": "x"}], "max_length": 32}}
    sections |= {"lora": lora} if lora is not None else {}
    recipe = recipe_of({"name_or_path": str(base.folder), **model}, **sections)
    found = find_facts(recipe)
    assert found.facts is not None
    assert not found.problems, found.problems
    loaded = build_full(recipe, model_config(recipe))
    way, differing = _loaded_in_slices(recipe, loaded.state_dict())
    trained = {name for name, parameter in loaded.named_parameters() if parameter.requires_grad}
    state = {name: value for name, value in loaded.state_dict().items() if lora is None or name in trained}
    run = make_run(folder / "run", {1: state}, model=run_model(folder, base, found), recipe=recipe)
    output = merge_checkpoint(run, MergeOptions()).output
    merged = load_file(output / "model.safetensors")
    wanted = {name: value for name, value in base.plain.items() if name not in found.facts.tensors.left_out}
    differing += [*sorted(wanted.keys() ^ merged.keys()), *_other_values(wanted, merged, base.carried)]
    reported = _reported(output, base)
    if kind == "lora":
        reported += _reported_by_peft(merge_checkpoint(run, MergeOptions(adapter=True)).output, base)
    return Outcome(way, found.facts.tensors.counts, len(merged), tuple(differing), tuple(reported))


def _loaded_in_slices(recipe: Recipe, whole: State) -> tuple[str, list[str]]:
    model, files = build_empty(recipe, model_config(recipe)).to_empty(device="cpu"), find_weight_files(recipe)
    assert files is not None
    if not fits(model, files):
        return "whole", []
    read_slices(model, files)
    model.tie_weights()
    state = {name: value for name, value in model.state_dict().items() if name_in_base(name) is not None}
    return "slices", [f"slices: {name}" for name, value in state.items() if not torch.equal(value, whole[name])]


def run_model(folder: Path, base: Base, found: ModelInspection) -> Path:
    """Write the files of RUN/model, without a tokenizer."""
    facts, target = found.facts, folder / "model"
    assert facts is not None
    target.mkdir(parents=True)
    config = facts.exported_config | ({} if facts.keeps_architectures else {"architectures": [facts.architecture]})
    (target / "config.json").write_text(json.dumps(config))
    facts.base_layout.write(target / "base_layout.json")
    identity = describe_base(str(base.folder), None)
    facts.tensors.write(target / "tensors.json")
    if facts.adapter_config is not None:
        (target / "adapter_config.json").write_text(json.dumps(facts.adapter_config))
        BaseModel(str(base.folder), digest=identity.digest).write(target / "base.json")
    return target


def _other_values(wanted: State, merged: State, carried: frozenset[str]) -> list[str]:
    """Names of tensors with other values; those that are carried must have their dtype too, unless they were decoded."""
    found: list[str] = []
    for name in wanted.keys() & merged.keys():
        one, other = wanted[name], merged[name]
        same = torch.equal(one, other) if name in carried and one.dtype == other.dtype else torch.equal(one.float(), other.float())
        if not same and not (name in carried and torch.equal(one.bfloat16(), other.bfloat16()) and other.dtype == torch.bfloat16):
            found.append(f"values: {name}")
    return sorted(found)


def _reported(folder: Path, base: Base) -> list[str]:
    """Load with AutoModelForCausalLM and with the class that config.json names."""
    config = json.loads((folder / "config.json").read_text())
    found: list[str] = []
    for kind in (AutoModelForCausalLM, getattr(transformers, config["architectures"][0])):
        loaded: Any = kind.from_pretrained(folder, output_loading_info=True)
        report = {name: {str(key) for key in keys} for name, keys in loaded[1].items() if name != "unexpected_keys"}
        found += [f"{kind.__name__} {name}: {key}" for name, keys in report.items() for key in sorted(keys)]
        unexpected = sorted(str(key) for key in loaded[1]["unexpected_keys"] if not _is_carried(str(key), base))
        found += [f"{kind.__name__}: {key}" for key in unexpected]
    return found


def _is_carried(key: str, base: Base) -> bool:
    """Whether a key is a carried tensor, or of a layer beyond the last: transformers names its experts as it would stack them."""
    return key in base.carried or key.startswith("model.layers.2.")


def _reported_by_peft(adapter: Path, base: Base) -> list[str]:
    """Load the adapter onto the published class. Quantised bases are replaced by plain ones: loading these is transformers' concern."""
    from peft import PeftModel

    config = json.loads((base.folder / "config.json").read_text())
    config.pop("quantization_config", None)
    kind = getattr(transformers, config["architectures"][0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapted = PeftModel.from_pretrained(kind(AutoConfig.for_model(**config)), str(adapter))
    names = {name for name, _ in adapted.named_parameters() if "lora_" in name}
    stored = load_file(adapter / "adapter_model.safetensors")
    found = [str(each.message)[:120] for each in caught if "adapter keys" in str(each.message)]
    return found + ([] if len(names) == len(stored) else [f"PEFT has {len(names)} tensors, and the file {len(stored)}"])


def main() -> None:
    rows = ["base\ttraining\tloaded as\ttensors in\ttrained\tfrozen\tdecoded\tcarried\ttensors out\tdiffering\treported"]
    for name, make in LAYOUTS.items():
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(sys.stderr):
                folder = Path(place)
                outcome = merge_untrained(make(folder / "base"), kind, folder / "made")
            counts = Counter(outcome.counts)
            fates = [str(counts[fate]) for fate in ("trained", "frozen", "decoded", "carried")]
            ends = [str(outcome.merged), str(len(outcome.differing)), str(len(outcome.reported))]
            rows.append("\t".join([name, kind, outcome.way, str(counts.total()), *fates, *ends]))
            print(rows[-1], outcome.differing[:3], outcome.reported[:3], file=sys.stderr)
    TABLE.write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
