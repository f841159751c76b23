"""Each tensor of a base's files has one fate, or is refused by name before a byte of weights is read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import SafetensorsFileMetadata, TensorInfo
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.models.llama.modeling_llama import LlamaAttention

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.tensors.quantised_weight import StoredType
from fsdp_tune.merge.lora.adapt import merge_problems
from fsdp_tune.model.loading import exported_config, tensor_account
from fsdp_tune.model.loading.construct import build_empty, build_full
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.loading.model_config import model_config
from fsdp_tune.model.loading.tensor_account import BaseTensors, account_for
from fsdp_tune.model.loading.weight_slices import find_weight_files, read_slices
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**FAMILIES["llama"])).save_pretrained(folder)
    return folder


def rewrite(
    folder: Path, changes: dict[str, torch.Tensor | None], quantization: dict[str, Any] | None = None
) -> None:
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file(
        {name: value for name, value in tensors.items() if value is not None}, folder / "model.safetensors"
    )
    if quantization is not None:
        config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
        (folder / "config.json").write_text(json.dumps(config))


def fp8_like(folder: Path) -> torch.Tensor:
    return torch.randn(load_file(folder / "model.safetensors")[UP].shape).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("method", [None, "quark", "aqlm", "fbgemm_fp8"])
def test_quantised_weight_that_no_rule_reads_is_refused_where_it_is_validated_and_loaded(
    base: Path, method: str | None
) -> None:
    rewrite(
        base,
        {UP: fp8_like(base), f"{UP}_scale": torch.ones(1)},
        None if method is None else {"quant_method": method},
    )
    recipe = recipe_of({"name_or_path": str(base)})
    problems = find_facts(recipe).problems
    assert [problem.code for problem in problems] == ["model-quantised"]
    assert (method or UP) in problems[0].message
    assert problems[0].hint is not None
    for load in (find_weight_files, build_full):
        with pytest.raises(FsdpTuneError, match=r"up_proj|quantised") as caught:
            load(recipe)
        assert caught.value.exit_code == 2


def test_files_with_exactly_the_parameters_of_the_model_need_no_renamings(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers' table of them costs a tenth of a second in each process."""
    calls: list[str] = []
    real = tensor_account.get_model_conversion_mapping
    monkeypatch.setattr(
        tensor_account,
        "get_model_conversion_mapping",
        lambda *given, **options: calls.append("") or real(*given, **options),
    )
    recipe = recipe_of({"name_or_path": str(base)})
    types = {
        name: StoredType("F32", tuple(value.shape))
        for name, value in load_file(base / "model.safetensors").items()
    }

    def account(changed: dict[str, StoredType]) -> tuple[dict[str, int], int]:
        calls.clear()
        found = account_for(
            recipe, model_config(recipe), build_empty(recipe), BaseTensors(types | changed, {}, {})
        )
        return found.counts(), len(found.problems)

    assert account({}) == ({"trained": len(types)}, 0)
    assert not calls
    assert account({"extra": StoredType("F32", (2,))}) == ({"trained": len(types), "carried": 1}, 0)
    assert calls
    assert account({UP: StoredType("F32", types[UP].shape[::-1])})[1] == 1
    assert calls


def test_no_conversion_changes_a_tensor_that_has_the_name_and_the_shape_of_its_parameter() -> None:
    """Ranks read such tensors as they are: `Transpose` compares shapes then, and `Inkling2UnpadVocab` cuts
    rows that they do not have."""
    found: set[tuple[str, bool]] = set()
    for conversions in conversion_mapping._build_checkpoint_conversion_mapping().values():
        for each in conversions:
            sources, targets = (
                {re.sub(r"[\\^$]", "", name) for name in names}
                for names in (each.source_patterns, each.target_patterns)
            )
            if isinstance(each, WeightConverter) and sources & targets:
                found |= {
                    (type(operation).__name__, getattr(operation, "check_dims", False))
                    for operation in each.operations
                }
    assert found <= {("Transpose", True), ("Inkling2UnpadVocab", False)}
    assert ("Transpose", True) in found


def test_integers_in_the_place_of_a_weight_are_refused_by_name(base: Path) -> None:
    rewrite(base, {UP: torch.zeros(load_file(base / "model.safetensors")[UP].shape, dtype=torch.int8)})
    (problem,) = find_facts(recipe_of({"name_or_path": str(base)})).problems
    assert UP in problem.message
    assert "I8" in problem.message


def gptq_parts(folder: Path, bias: float | None = None, name: str = UP) -> dict[str, torch.Tensor | None]:
    """Return the tensors of GPTQ in the place of one weight, with a bias as old AutoGPTQ writes it for each
    layer."""
    out, inputs = load_file(folder / "model.safetensors")[name].shape
    owner = name.removesuffix("weight")
    parts = {
        "qweight": torch.zeros(inputs // 8, out, dtype=torch.int32),
        "qzeros": torch.zeros(1, out // 8, dtype=torch.int32),
    }
    parts |= {"scales": torch.ones(1, out).half()} | (
        {} if bias is None else {"bias": torch.full((out,), bias).half()}
    )
    return {name: None, **{f"{owner}{part}": value for part, value in parts.items()}}


@pytest.mark.parametrize("bias", [None, 0.0, 3.0])
def test_bias_of_a_decoded_weight_that_the_class_lacks_is_dropped_if_it_is_zero_and_else_refused(
    base: Path, bias: float | None
) -> None:
    rewrite(base, gptq_parts(base, bias), {"quant_method": "gptq", "bits": 4, "group_size": -1})
    found = find_facts(recipe_of({"name_or_path": str(base)}))
    if bias:
        (problem,) = found.problems
        assert (problem.code, UP.replace("weight", "bias") in problem.message) == ("model-quantised", True)
        assert problem.where.source == str(base / "model.safetensors")
        return
    assert found.problems == ()
    assert found.facts is not None
    assert found.facts.tensors.carried == ()
    assert found.facts.tensors.dropped == (() if bias is None else (UP.replace("weight", "bias"),))
    assert [notice.code for notice in found.notices if notice.code == "base-calibration-dropped"] == []


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_gptq_of_a_conv1d_is_refused_by_name_where_its_shape_does_not_show_it(
    lora: dict[str, Any] | None, tmp_path: Path
) -> None:
    """A square weight of GPT-2 would be trained transposed."""
    config = AutoConfig.for_model("gpt2", vocab_size=64, n_positions=1024, n_embd=32, n_layer=1, n_head=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    square = "transformer.h.0.attn.c_proj.weight"
    rewrite(
        tmp_path, gptq_parts(tmp_path, name=square), {"quant_method": "gptq", "bits": 4, "group_size": -1}
    )
    found = find_facts(
        recipe_of({"name_or_path": str(tmp_path)}, **({} if lora is None else {"lora": lora}))
    ).problems
    (message,) = (problem.message for problem in found if problem.code == "model-quantised")
    assert square.replace("weight", "qweight") in message
    assert "Conv1D" in message


@pytest.mark.parametrize(
    ("entry", "says", "hint"),
    [
        ("mtp", "matches no tensor", "extra"),
        ("layers.0", "tensors of the model that is trained", "extra"),
        ("extra", None, None),
    ],
)
def test_entries_of_leave_out_that_leave_nothing_out_are_refused(
    base: Path, entry: str, says: str | None, hint: str | None
) -> None:
    rewrite(base, {"extra.weight": torch.ones(3)})
    recipe = recipe_of({"name_or_path": str(base), "leave_out": [entry]})
    found = find_weight_files(recipe)
    assert found is not None
    assert found.base is not None
    account = account_for(recipe, model_config(recipe), build_empty(recipe), found.base)
    assert account.names("left out") == (("extra.weight",) if says is None else ())
    assert [problem.message for problem in account.problems if says and says in problem.message] == [
        problem.message for problem in account.problems
    ]
    assert all(hint is not None and hint in str(problem.hint) for problem in account.problems)


def test_headers_of_a_base_that_is_not_on_this_machine_are_read_from_the_hub(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the first run on a model of the hub would not record what a merge carries over."""
    stored = load_file(base / "model.safetensors") | {"mtp.fc.weight": torch.ones(2, 2)}
    (base / "model.safetensors").unlink()
    types = {name: StoredType("F32", tuple(value.shape)) for name, value in stored.items()}
    files = dict.fromkeys(types, base / "model.safetensors")
    monkeypatch.setattr(exported_config, "hub_is_reachable", lambda: True)
    monkeypatch.setattr(exported_config, "_tensors_of_hub", lambda *_: BaseTensors(types, files, {}))
    monkeypatch.setattr(exported_config, "base_folder", lambda _: base)
    recipe = recipe_of({"name_or_path": str(base)})
    hub = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name_or_path": "org/name"})})
    found = exported_config.local_tensors(hub)
    assert found is not None
    account = account_for(recipe, model_config(recipe), build_empty(recipe), found)
    assert account.names("carried") == ("mtp.fc.weight",)


@pytest.mark.parametrize("held", ["single file and index", "index", "one of both shards", "pickle"])
def test_files_of_a_repository_are_those_that_ranks_download(
    held: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single file comes before an index, and a tensor of two shards is in the one that the index names."""
    config = json.loads((base / "config.json").read_text()) | (
        {"quantization_config": {"quant_method": "fp8"}} if held == "pickle" else {}
    )
    (base / "config.json").write_text(json.dumps(config))
    weight_map = {"a": "1.safetensors", "b": "2.safetensors"} | (
        {"c": "1.safetensors"} if held == "index" else {}
    )
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    headers = {
        "model.safetensors": {"a": [3]},
        "1.safetensors": {"a": [1], "c": [1]},
        "2.safetensors": {"b": [2], "c": [2]},
    }
    there = {
        "single file and index": {"model.safetensors", "model.safetensors.index.json"},
        "pickle": {"pytorch_model.bin"},
    }.get(held, {"model.safetensors.index.json"})

    def parse(_: str, file: str, *, revision: str) -> SafetensorsFileMetadata:
        assert revision == "main"
        infos = {name: TensorInfo("F32", shape, (0, 4 * shape[0])) for name, shape in headers[file].items()}
        return SafetensorsFileMetadata({}, infos)

    monkeypatch.setattr(exported_config, "file_exists", lambda _, file, **__: file in there)
    monkeypatch.setattr(exported_config, "parse_safetensors_file_metadata", parse)
    monkeypatch.setattr(
        exported_config,
        "file_of_model",
        lambda _, __, file: path if (path := base / file).is_file() else None,
    )
    if held == "pickle":
        with pytest.raises(FsdpTuneError, match=r"quantised \(fp8\)"):
            exported_config._tensors_of_hub("org/name", "main", base)
        return
    found = exported_config._tensors_of_hub("org/name", "main", base)
    assert found is not None
    shapes = {name: stored.shape for name, stored in found.types.items()}
    assert shapes["a"] == ((3,) if held == "single file and index" else (1,))
    assert [problem.code for problem in found.problems] == (
        ["model-weights-twice"] if held == "one of both shards" else []
    )
    if held == "index":
        assert (shapes["c"], found.files["c"]) == ((1,), base / "1.safetensors")


def test_tensors_beside_an_index_whose_shards_are_gone_are_accounted_for(base: Path) -> None:
    rewrite(base, {"mtp.fc.weight": torch.ones(2, 2)})
    (base / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {UP: "model-00001-of-00002.safetensors"}})
    )
    found = find_facts(recipe_of({"name_or_path": str(base)}))
    assert found.problems == ()
    assert found.facts is not None
    assert found.facts.tensors.carried == ("mtp.fc.weight",)


def test_weights_that_a_config_names_are_not_named_by_that_of_the_trained_model(base: Path) -> None:
    """A merge writes them under the usual name."""
    (base / "model.safetensors").rename(base / "own.safetensors")
    config = json.loads((base / "config.json").read_text()) | {"transformers_weights": "own.safetensors"}
    (base / "config.json").write_text(json.dumps(config))
    found = find_facts(recipe_of({"name_or_path": str(base)}))
    assert found.problems == ()
    assert found.facts is not None
    assert "trained" in found.facts.tensors.counts
    assert "transformers_weights" not in found.facts.exported_config


def test_parameter_of_the_class_with_the_name_of_a_scale_is_trained_and_loaded(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = LlamaAttention.__init__

    def with_scale(self: Any, *args: Any, **options: Any) -> None:
        built(self, *args, **options)
        self.k_scale = torch.nn.Parameter(torch.ones(1))

    monkeypatch.setattr(LlamaAttention, "__init__", with_scale)
    stored = load_file(base / "model.safetensors")
    owners = [name.removesuffix("q_proj.weight") for name in stored if name.endswith("q_proj.weight")]
    rewrite(
        base,
        {f"{owner}{part}_scale": torch.tensor([3.0]) for owner in owners for part in "kv"},
        {"quant_method": "modelopt"},
    )
    recipe = recipe_of({"name_or_path": str(base)})
    found = find_facts(recipe)
    assert found.problems == ()
    assert found.facts is not None
    assert found.facts.tensors.dropped == tuple(sorted(f"{owner}v_scale" for owner in owners))
    model, files = build_empty(recipe).to_empty(device="cpu"), find_weight_files(recipe)
    assert files is not None
    read_slices(model, files)
    assert [model.get_parameter(f"{owner}k_scale").item() for owner in owners] == [3.0] * len(owners)


TEXT = {
    k: FAMILIES["llama"][k]
    for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


@pytest.fixture
def gemma3(tmp_path: Path) -> Path:
    """A directory with the config of a model with a vision tower, without weights."""
    config = {
        "text_config": {**TEXT, "head_dim": 16},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        "image_token_index": 3,
    }
    AutoConfig.for_model(
        "gemma3", **config, architectures=["Gemma3ForConditionalGeneration"]
    ).save_pretrained(tmp_path)
    return tmp_path


def test_parts_that_text_does_not_call_get_no_adapters(gemma3: Path) -> None:
    found = find_facts(recipe_of({"name_or_path": str(gemma3)}, lora={"r": 2}))
    assert found.problems == ()
    assert found.facts is not None
    assert not [name for name in found.facts.adapter_tensors if "vision_tower" in name]
    assert [
        "model.vision_tower, model.multi_modal_projector" in n.message
        for n in found.notices
        if n.code == "lora-text-alone"
    ] == [True]


@pytest.mark.parametrize(
    "lora", [{"target_modules": ["fc1"]}, {"target_modules": ["q_proj"], "modules_to_save": ["fc2"]}]
)
def test_adapters_of_the_vision_tower_alone_are_refused_with_a_way_out(
    gemma3: Path, lora: dict[str, Any]
) -> None:
    (problem,) = find_facts(recipe_of({"name_or_path": str(gemma3)}, lora={"r": 2, **lora})).problems
    assert "would get no gradient" in problem.message
    assert "outside of" in str(problem.hint)


def test_model_whose_text_has_no_causal_lm_either_is_refused_with_a_hint_that_says_so(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen3_vl").save_pretrained(tmp_path)
    (problem,) = find_facts(recipe_of({"name_or_path": str(tmp_path)})).problems
    assert "Qwen3VLTextConfig" in str(problem.hint)
    assert "python" not in str(problem.hint)


def test_weights_that_the_run_holds_in_4_bits_are_frozen_and_can_be_merged(tmp_path: Path) -> None:
    config = AutoConfig.for_model(**{**FAMILIES["llama"], "hidden_size": 64, "intermediate_size": 64})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    recipe = recipe_of({"name_or_path": str(tmp_path)}, lora={"r": 2}, quantization={})
    facts = find_facts(recipe).facts
    assert facts is not None
    assert len(facts.nf4_weights) == 14
    assert (facts.tensors.carried, facts.tensors.left_out) == ((), ())
    assert merge_problems(recipe, facts) == []


def test_tensor_with_and_without_the_prefix_of_the_model_is_refused(base: Path) -> None:
    """transformers loads the first by name, and slices have the name of the model."""
    other = UP.removeprefix("model.")
    rewrite(base, {other: load_file(base / "model.safetensors")[UP] + 1})
    (problem,) = find_facts(recipe_of({"name_or_path": str(base)})).problems
    assert problem.code == "model-weights-twice"
    assert f"`{other}` and `{UP}` are both `{UP}`" in problem.message
