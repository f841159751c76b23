"""LoRA adapters are merged into their base as by torch, or exported under PEFT's names; anything but plain
LoRA is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from fsdp_tune.core.errors import FailedError, FsdpTuneError
from fsdp_tune.core.tensors.peft_names import classify_names
from fsdp_tune.merge.config_and_tokenizer import fetch_model
from fsdp_tune.merge.copy import gather, write
from fsdp_tune.merge.lora import base_under_adapter
from fsdp_tune.run.base_model import BASE_FILE, BaseModel
from tests.merge import peft
from tests.merge.checkpoints import SHARDS, make_run, merged_tensors, same_bits, save_dcp, save_on_ranks
from tests.merge.peft import (
    PREFIX,
    adapter_directory,
    adapter_state,
    added,
    exact,
    factors,
    values,
    whole_state,
    write_config,
)
from tests.merge.test_merging_values import model_directory, small_gpt2, small_llama
from tests.parity.architectures import make_model
from tests.parity.peft_adapters import make_adapter

LINEAR = ("q_proj", "k_proj", "o_proj", "up_proj", "down_proj")


def assert_tensors(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    merged = merged_tensors(folder)
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(merged[name], tensor), name


def base_directory(model, folder: Path) -> Path:
    model_directory(model, folder)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def llama():
    return exact(small_llama())


@pytest.fixture
def base(llama, tmp_path) -> Path:
    return base_directory(llama, tmp_path / "base")


def sharded_peft_model(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    """Three FSDP ranks, uneven shards."""

    def state_of(rank: int):
        mesh = init_device_mesh("cpu", (3,))
        return {
            "model": {
                name: distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
                for name, value in state.items()
            }
        }

    return save_on_ranks(3, folder, state_of)


@pytest.mark.parametrize(
    "source",
    ["whole model", "whole model, base beside", "adapter shards", "adapter pickle", "adapter directory"],
)
def test_adapter_is_added_to_base_weights(source, llama, base, tmp_path, merge):
    adapter = factors(llama, *LINEAR)
    folder = write_config(tmp_path / "c", base_model_name_or_path=str(base))
    if source.startswith("whole model"):
        sharded_peft_model(folder / SHARDS, whole_state(llama, adapter))
    elif source == "adapter shards":  # as Accelerate saves them: without the adapter's name
        sharded_peft_model(folder / SHARDS, adapter_state(adapter))
    elif (
        source == "adapter pickle"
    ):  # Accelerate's FULL_STATE_DICT: what is not frozen, with the adapter's name
        torch.save(adapter_state(adapter, "default"), folder / "pytorch_model_fsdp.bin")
    else:
        adapter_directory(folder, adapter_state(adapter), base_model_name_or_path=str(base))
    result = merge(folder, base=str(base) if "beside" in source else None)
    assert_tensors(result.output, added(llama, adapter))
    assert result.adapter is not None
    assert result.adapter.layers == 10
    told = {notice.code: notice.message for notice in result.notices}
    assert "scaled by 2" in told["merge-adapter"]
    assert ("merge-adapter-base" in told) == source.startswith("adapter")
    if source != "whole model":
        assert json.loads((result.output / "config.json").read_text())["dtype"] == "float32"
        assert (result.output / "tokenizer.json").is_file()
    record = json.loads((result.output / "merge.json").read_text())
    assert record["adapter"]["base"] == (str(base) if source.startswith("adapter") else None)


def test_run_of_a_peft_model_is_merged_and_exported(llama, tmp_path, merge):
    adapter = factors(llama, *LINEAR)
    run = make_run(
        tmp_path / "run", {5: whole_state(llama, adapter)}, model=model_directory(llama, tmp_path / "m")
    )
    write_config(run / "model", base_model_name_or_path="org/base")
    assert_tensors(merge(run, output=None, dtype="keep").output, added(llama, adapter))
    exported = merge(run, output=None, dtype="keep", adapter=True)
    assert exported.output == run / "adapter"
    assert_tensors(run / "adapter", adapter_state(adapter))


def test_merged_model_computes_like_the_adapted_one(llama, base, tmp_path, merge):
    adapter = factors(llama, *LINEAR)
    folder = adapter_directory(tmp_path / "a", adapter_state(adapter), base_model_name_or_path=str(base))
    loaded = AutoModelForCausalLM.from_pretrained(merge(folder, verify="full").output).eval()

    def beside(layer, parts):
        layer.register_forward_hook(
            lambda _, inputs, out: out + 2 * (inputs[0] @ parts["lora_A"].T) @ parts["lora_B"].T
        )

    for module, parts in adapter.items():
        beside(llama.get_submodule(module), parts)
    tokens = torch.arange(9)[None]
    torch.testing.assert_close(loaded(tokens).logits, llama.eval()(tokens).logits)


@pytest.mark.parametrize(
    ("base", "why"),
    [
        ("./nowhere", "there is no directory `./nowhere`"),
        ("bad name", "not a valid name of a repository on the hub"),
        ("org/not-here", "is not in the local cache"),
    ],
)
def test_missing_base_is_reported_with_the_file_that_names_it(base, why, tmp_path):
    with pytest.raises(FsdpTuneError, match=re.escape(why)) as caught:
        fetch_model(base, named_in=tmp_path / "adapter_config.json")
    assert caught.value.exit_code == 2
    assert str(caught.value.problems[0].where).endswith("adapter_config.json")
    assert "`--base" in " ".join([str(caught.value.problems[0].hint), *caught.value.problems[0].ways_out])


def test_base_in_the_cache_of_the_hub_is_read_through_its_links(llama, tmp_path, merge):
    blobs = base_directory(llama, tmp_path / "models--org--base" / "blobs")
    snapshot = tmp_path / "models--org--base" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    adapter = factors(llama, "q_proj")
    folder = adapter_directory(tmp_path / "a", adapter_state(adapter))
    assert_tensors(merge(folder, base=str(snapshot)).output, added(llama, adapter))


@pytest.mark.parametrize(("trained_on", "read"), [("org/base", "abc"), ("org/other", "main"), (None, "main")])
def test_base_of_the_hub_is_read_at_the_commit_of_training(
    trained_on, read, llama, tmp_path, merge, monkeypatch
):
    base, adapter = base_directory(llama, tmp_path / "base"), factors(llama, "q_proj")
    folder = adapter_directory(
        tmp_path / "a", adapter_state(adapter), base_model_name_or_path="org/base", revision="main"
    )
    if trained_on is not None:
        BaseModel(trained_on, "abc").write(folder / BASE_FILE)
    revisions = []

    def fetch(name: str, *, revision: str | None, named_in: Path) -> Path:
        revisions.append(revision)
        return base

    monkeypatch.setattr(base_under_adapter, "fetch_model", fetch)
    assert_tensors(merge(folder).output, added(llama, adapter))
    assert revisions == [read]


@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        ({"lora_alpha": 16}, 16 / 4),
        ({"lora_alpha": 2.5}, 2.5 / 4),
        ({"use_rslora": True}, 8 / 2),
        ({"r": 99, "rank_pattern": {"q_proj": 4}}, 8 / 4),
        ({"alpha_pattern": {r"layers\.\d+\.self_attn\.q_proj": 1}}, 1 / 4),
        ({"alpha_pattern": {"proj": 1}}, 8 / 4),
    ],
    ids=str,
)
def test_scaling_equals_peft(config, scaling, llama, base, tmp_path, merge):
    adapter = factors(llama, "q_proj")
    folder = adapter_directory(tmp_path / "a", adapter_state(adapter), **config)
    assert_tensors(merge(folder, base=str(base)).output, added(llama, adapter, alpha=scaling * peft.RANK))


@pytest.mark.parametrize(
    ("saved_flag", "targets"),
    [(True, ("c_attn", "c_proj", "c_fc")), (False, ("c_attn", "c_proj", "c_fc", "lm_head"))],
)
def test_conv1d_weights_are_transposed_also_where_they_are_square(saved_flag, targets, tmp_path, merge):
    """PEFT's flag tells the kind of the last layer that it wrapped; with a head among them it is wrong for
    all others."""
    model = exact(small_gpt2())
    adapter = factors(model, *targets)
    base = base_directory(model, tmp_path / "base")
    folder = adapter_directory(tmp_path / "a", adapter_state(adapter), fan_in_fan_out=saved_flag)
    merged = merged_tensors(merge(folder, base=str(base)).output)
    for name, tensor in added(model, adapter).items():
        if name != "lm_head.weight" or "lm_head" in targets:
            assert same_bits(merged[name], tensor), name


def test_single_square_conv1d_follows_fan_in_fan_out(tmp_path, merge):
    model = exact(small_gpt2())
    adapter = factors(model, "attn.c_proj")
    base = base_directory(model, tmp_path / "base")
    for flag in (True, False):
        folder = adapter_directory(tmp_path / str(flag), adapter_state(adapter), fan_in_fan_out=flag)
        merged = merged_tensors(merge(folder, base=str(base), output=tmp_path / f"out-{flag}").output)
        name = "transformer.h.0.attn.c_proj.weight"
        assert same_bits(merged[name], added(model, adapter)[name]) == flag


@pytest.mark.parametrize("option", ["keep", "bf16", "fp32"])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
def test_adapter_sum_is_rounded_once(kind, option, tmp_path, merge):
    """Weights and factors of a 16-bit model: added in fp32, not in their own type as PEFT does it."""
    torch.manual_seed(1)
    base = {"w.weight": torch.randn(70, 50).to(kind), "other.weight": torch.randn(3).to(kind)}
    a, b = torch.randn(4, 50).to(kind), torch.randn(70, 4).to(kind)
    state = {f"{PREFIX}w.base_layer.weight": base["w.weight"], f"{PREFIX}other.weight": base["other.weight"]}
    save_dcp(
        {"model": state | {key(side): value for side, value in (("A", a), ("B", b))}},
        write_config(tmp_path / "c") / SHARDS,
    )
    merged = merged_tensors(merge(tmp_path / "c", dtype=option).output)["w.weight"]
    wide = base["w.weight"].double() + 2 * b.double() @ a.double()
    assert merged.dtype == {"keep": kind, "bf16": torch.bfloat16, "fp32": torch.float32}[option]
    off = (merged.double() - wide).abs() / wide.abs().clamp(min=1)
    assert float(off.max()) <= torch.finfo(merged.dtype).eps / 2 + torch.finfo(torch.float32).eps * 8


def key(side: str) -> str:
    return f"{PREFIX}w.lora_{side}.default.weight"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(1, 700), (700, 1), (97, 31), (5, 3000), (256, 64)])
def test_delta_slabs_match_boxes_of_any_size(shape, transposed, tmp_path, merge, monkeypatch):
    """Buffers of 1 KiB and slabs of 4 KiB: rows longer than a buffer, slabs of many boxes, a last one that is
    cut short."""
    for module in (gather, write):
        monkeypatch.setattr(module, "BUFFER_BYTES", 1024)
    monkeypatch.setattr(write, "_SUM_BYTES", 4096)
    monkeypatch.setattr(gather, "SLAB_BYTES", 4096)
    weight, a, b = values(*shape, seed=1), values(4, shape[1], seed=2), values(shape[0], 4, seed=3)
    delta = 2 * (b @ a)
    if transposed:
        names = ("lora_embedding_A.default", "lora_embedding_B.default")
        a, b = b.T.contiguous(), a.T.contiguous()
    else:
        names = ("lora_A.default.weight", "lora_B.default.weight")
    state = {f"{PREFIX}w.base_layer.weight": weight, f"{PREFIX}n.weight": values(3, seed=4)}
    sharded_peft_model(
        write_config(tmp_path / "c") / SHARDS,
        state | {f"{PREFIX}w.{name}": part for name, part in zip(names, (a, b), strict=True)},
    )
    assert same_bits(merged_tensors(merge(tmp_path / "c").output)["w.weight"], weight + delta)


def test_large_factors_respect_memory_budget(tmp_path, merge, monkeypatch):
    """More layers than the budget holds at once, each larger than all of it."""
    monkeypatch.setattr(gather.Budget.__init__, "__defaults__", None)
    monkeypatch.setattr(write, "HELD_BYTES", 16)
    state, expected = {f"{PREFIX}n.weight": values(3, seed=0)}, {}
    for number in range(12):
        weight, a, b = (
            values(20, 30, seed=number),
            values(4, 30, seed=50 + number),
            values(20, 4, seed=99 + number),
        )
        state |= {f"{PREFIX}w{number}.base_layer.weight": weight}
        state |= {
            f"{PREFIX}w{number}.lora_{side}.default.weight": value for side, value in (("A", a), ("B", b))
        }
        expected[f"w{number}.weight"] = weight + 2 * (b @ a)
    save_dcp({"model": state}, write_config(tmp_path / "c") / SHARDS)
    assert_tensors(merge(tmp_path / "c").output, expected | {"n.weight": values(3, seed=0)})


def test_average_of_merged_checkpoints_is_the_mean_of_their_sums(llama, tmp_path, merge):
    first, second = (
        factors(llama, "q_proj"),
        {
            name: {part: -3 * value for part, value in parts.items()}
            for name, parts in factors(llama, "q_proj").items()
        },
    )
    run = make_run(
        tmp_path / "run",
        {1: whole_state(llama, first), 2: whole_state(llama, second)},
        model=model_directory(llama, tmp_path / "m"),
    )
    write_config(run / "model")
    one, two = added(llama, first), added(llama, second)
    assert_tensors(
        merge(run, dtype="keep", average="last:2").output, {name: (one[name] + two[name]) / 2 for name in one}
    )


def test_adapted_embedding_leaves_tied_head_unchanged(tmp_path, merge):
    model = exact(small_gpt2())
    adapter = factors(model, "wte")
    base = base_directory(model, tmp_path / "base")
    result = merge(adapter_directory(tmp_path / "a", adapter_state(adapter)), base=str(base))
    expected = added(model, adapter)
    expected["lm_head.weight"] = model.state_dict()["lm_head.weight"]
    assert_tensors(result.output, expected)
    assert json.loads((result.output / "config.json").read_text())["tie_word_embeddings"] is False
    loaded, report = AutoModelForCausalLM.from_pretrained(result.output, output_loading_info=True)
    assert not any(report.values())
    assert same_bits(loaded.lm_head.weight.detach(), model.lm_head.weight.detach())


def test_untied_head_that_the_base_lacks_is_its_embedding(tmp_path, merge):
    """As after a run with `model.config_overrides: {tie_word_embeddings: false}`."""
    model = exact(small_gpt2())
    adapter = factors(model, "c_attn")
    base = base_directory(model, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    result = merge(adapter_directory(tmp_path / "a", adapter_state(adapter)), base=str(base))
    loaded, report = AutoModelForCausalLM.from_pretrained(result.output, output_loading_info=True)
    assert not any(report.values())
    assert same_bits(loaded.lm_head.weight.detach(), model.lm_head.weight.detach())


def test_embeddings_that_were_tied_in_training_stay_tied(tmp_path, merge):
    model = exact(small_gpt2())
    adapter = factors(model, "wte")
    base = base_directory(model, tmp_path / "base")
    result = merge(
        adapter_directory(tmp_path / "a", adapter_state(adapter), ensure_weight_tying=True), base=str(base)
    )
    expected = added(model, adapter)
    del expected["lm_head.weight"]
    assert_tensors(result.output, expected)


@pytest.mark.parametrize("source", ["whole model", "adapter directory"])
def test_modules_to_save_replace_base_weights(source, llama, base, tmp_path, merge):
    adapter, head = factors(llama, "q_proj"), values(61, 32, seed=7)
    if source == "whole model":
        folder = write_config(tmp_path / "c", modules_to_save=["lm_head"])
        save_dcp({"model": whole_state(llama, adapter, saved={"lm_head": {"weight": head}})}, folder / SHARDS)
    else:
        state = adapter_state(adapter) | {f"{PREFIX}lm_head.weight": head}
        folder = adapter_directory(tmp_path / "c", state, modules_to_save=["lm_head"])
    assert_tensors(merge(folder, base=str(base)).output, added(llama, adapter) | {"lm_head.weight": head})


def test_grown_vocabulary_is_in_config(llama, base, tmp_path, merge):
    adapter, embedding, head = factors(llama, "q_proj"), values(65, 32, seed=7), values(65, 32, seed=8)
    grown = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    folder = adapter_directory(
        tmp_path / "a", adapter_state(adapter) | {PREFIX + name: value for name, value in grown.items()}
    )
    (folder / "tokenizer.json").write_text('{"version": "grown"}')
    result = merge(folder, base=str(base), verify="full")
    assert_tensors(result.output, added(llama, adapter) | grown)
    assert json.loads((result.output / "config.json").read_text())["vocab_size"] == 65
    assert "grown" in (result.output / "tokenizer.json").read_text()
    assert not (
        result.output / "chat_template.jinja"
    ).exists()  # the base's, which knows nothing of the new tokens


def test_trained_biases_replace_and_biases_of_factors_are_added(tmp_path, merge):
    model = exact(small_gpt2())
    adapter, trained, extra = factors(model, "c_attn"), values(96, seed=5), values(96, seed=6)
    base = base_directory(model, tmp_path / "base")
    name = "transformer.h.0.attn.c_attn"
    state = adapter_state(adapter) | {f"{PREFIX}{name}.base_layer.bias": trained}
    state[f"{PREFIX}transformer.h.1.attn.c_attn.lora_B.bias"] = extra
    folder = adapter_directory(tmp_path / "a", state, bias="lora_only", lora_bias=True, fan_in_fan_out=True)
    expected = added(model, adapter) | {f"{name}.bias": trained}
    expected["transformer.h.1.attn.c_attn.bias"] += 2 * extra
    del expected["lm_head.weight"]
    assert_tensors(merge(folder, base=str(base)).output, expected)


def test_base_without_model_prefix_keeps_its_names(tmp_path, merge):
    """GPT-2 on the hub is `h.0.attn…`, and its module `transformer.h.0.attn…`."""
    model = exact(small_gpt2())
    adapter = factors(model, "c_attn")
    base = model_directory(model, tmp_path / "base")
    short = {
        name.removeprefix("transformer."): value
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    peft.save_file(short, base / "model.safetensors", metadata={"format": "pt"})
    folder = adapter_directory(tmp_path / "a", adapter_state(adapter), fan_in_fan_out=True)
    expected = {
        name.removeprefix("transformer."): value
        for name, value in added(model, adapter).items()
        if name != "lm_head.weight"
    }
    result = merge(folder, base=str(base))
    assert_tensors(result.output, expected)
    assert same_bits(
        AutoModelForCausalLM.from_pretrained(result.output).state_dict()[
            "transformer.h.1.attn.c_attn.weight"
        ],
        expected["h.1.attn.c_attn.weight"],
    )


@pytest.mark.parametrize("source", ["whole model", "adapter shards"])
def test_export_loads_with_peft(source, llama, tmp_path, merge):
    adapter, head = factors(llama, *LINEAR, "embed_tokens"), values(61, 32, seed=7)
    folder = write_config(
        tmp_path / "c", modules_to_save=["lm_head"], inference_mode=False, auto_mapping={"kept": 1}
    )
    state = whole_state(llama, adapter, saved={"lm_head": {"weight": head}})
    if source == "adapter shards":
        state = {name: value for name, value in state.items() if "lora_" in name or "modules_to_save" in name}
    save_dcp({"model": state}, folder / SHARDS)
    (folder / "tokenizer.json").write_text("{}")
    result = merge(folder, adapter=True, base="org/base", dtype="keep")
    assert_tensors(result.output, adapter_state(adapter) | {f"{PREFIX}lm_head.weight": head})
    assert set(result.files) == {
        "adapter_model.safetensors",
        "adapter_config.json",
        "tokenizer.json",
        "merge.json",
        "README.md",
    }
    config = json.loads((result.output / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["inference_mode"], config["auto_mapping"]) == (
        "org/base",
        True,
        {"kept": 1},
    )
    card = (result.output / "README.md").read_text()
    assert 'base_model: "org/base"' in card
    assert 'library_name: "peft"' in card


@pytest.mark.parametrize(("bias", "expected"), [("none", 0), ("lora_only", 2), ("all", 10)])
def test_biases_are_exported_as_they_were_trained(bias, expected, tmp_path, merge):
    model = exact(small_gpt2())
    folder = write_config(tmp_path / "c", bias=bias)
    save_dcp({"model": whole_state(model, factors(model, "attn.c_attn"))}, folder / SHARDS)
    names = [name for name in merged_tensors(merge(folder, adapter=True).output) if name.endswith(".bias")]
    assert len(names) == (
        expected if bias != "all" else sum(name.endswith(".bias") for name, _ in model.named_parameters())
    )
    assert all(name.startswith(PREFIX) for name in names)
    assert all(".base_layer." in name for name in names if "c_attn" in name)


def test_adapters_beyond_plain_lora_can_be_exported(llama, tmp_path, merge):
    state = adapter_state(factors(llama, "q_proj"), "default")
    state[f"{PREFIX}model.layers.0.self_attn.q_proj.lora_magnitude_vector.default.weight"] = values(
        32, seed=1
    )
    state[f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta.default"] = values(2, 32, seed=1)
    folder = write_config(tmp_path / "c", use_dora=True)
    save_dcp({"model": state}, folder / SHARDS)
    names = merged_tensors(merge(folder, adapter=True).output).keys()
    assert f"{PREFIX}model.layers.0.self_attn.q_proj.lora_magnitude_vector" in names
    assert f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta" in names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dora_is_merged_as_peft_merges_it(dtype, tmp_path, merge):
    base = make_model("llama", tmp_path / "base")
    folder = make_adapter(base, {"r": 4, "use_dora": True}, tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = PeftModel.from_pretrained(model, folder).merge_and_unload().state_dict()
    found = merged_tensors(
        merge(folder, base=str(base), dtype="fp32" if dtype == torch.float32 else "bf16").output
    )
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        exact = expected[name].to(dtype)
        torch.testing.assert_close(tensor, exact, rtol=1e-6 if dtype == torch.float32 else 2**-8, atol=1e-7)


def test_dora_without_magnitudes_is_refused(llama, base, tmp_path, merge):
    folder = adapter_directory(tmp_path / "a", adapter_state(factors(llama, "q_proj")), use_dora=True)
    with pytest.raises(FailedError, match="no magnitudes"):
        merge(folder, base=str(base))


def refused(tmp_path: Path) -> list[str]:
    return [path.name for path in tmp_path.iterdir() if "out" in path.name]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"peft_type": None}, "None"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"init_lora_weights": "olora"}, "olora"),
    ],
    ids=str,
)
def test_adapters_beyond_plain_lora_are_refused_by_name(change, named, llama, base, tmp_path, merge):
    folder = adapter_directory(tmp_path / "a", adapter_state(factors(llama, "q_proj")), **change)
    with pytest.raises(FailedError, match=named) as caught:
        merge(folder, base=str(base))
    assert caught.value.problems[0].code == "merge-adapter-unsupported"
    assert refused(tmp_path) == []


def test_changed_base_initialisation_merges_with_the_changed_base(llama, tmp_path, merge):
    adapter = factors(llama, "q_proj")
    folder = write_config(tmp_path / "c", init_lora_weights="pissa")
    save_dcp({"model": whole_state(llama, adapter)}, folder / SHARDS)
    assert_tensors(merge(folder).output, added(llama, adapter))


def broken(kind: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    a, b = (f"{PREFIX}model.layers.0.self_attn.q_proj.lora_{side}.weight" for side in "AB")
    magnitudes = {f"{PREFIX}model.layers.0.self_attn.q_proj.lora_magnitude_vector": torch.ones(32)}
    unknown = {f"{PREFIX}model.layers.0.self_attn.q_proj.lora_new.weight": torch.ones(32)}
    return {
        "A alone": {name: value for name, value in state.items() if name != b},
        "B alone": {name: value for name, value in state.items() if name != a},
        "rank of the factors": state | {b: torch.ones(32, 5)},
        "rank of the config": state | {a: torch.ones(5, 32), b: torch.ones(32, 5)},
        "other base": state | {a: torch.ones(4, 31)},
        "layer of another model": state
        | {name.replace("layers.0", "layers.7"): state[name] for name in (a, b)},
        "integers": state | {a: torch.ones(4, 32, dtype=torch.int8)},
        "empty": {name: torch.zeros(0) for name in state},
        "empty factor": state | {b: torch.ones(0, 4)},
        "convolution": state | {a: torch.ones(4, 32, 1, 1), b: torch.ones(32, 4, 1, 1)},
        "magnitudes": state | magnitudes,
        "unknown part": state | unknown,
        "one over the other": state
        | {name.replace("q_proj.", "q_proj.base_layer."): state[name] for name in (a, b)},
        "replaces what is not there": state | {f"{PREFIX}score.weight": torch.ones(2, 32)},
        "replaces by another shape": state | {f"{PREFIX}model.norm.weight": torch.ones(33)},
        "bias without a bias": state | {b.replace("weight", "bias"): torch.ones(32)},
        "two adapters": state | {name.replace(".weight", ".other.weight"): state[name] for name in (a, b)},
    }[kind]


BROKEN = {
    "A alone": "merge-adapter-damaged",
    "B alone": "merge-adapter-damaged",
    "rank of the factors": "merge-adapter-damaged",
    "rank of the config": "merge-adapter-config",
    "other base": "merge-adapter-base",
    "layer of another model": "merge-adapter-base",
    "integers": "merge-adapter-unsupported",
    "empty": "merge-adapter-damaged",
    "empty factor": "merge-adapter-damaged",
    "convolution": "merge-adapter-unsupported",
    "magnitudes": "merge-adapter-damaged",
    "unknown part": "merge-adapter-unsupported",
    "one over the other": "merge-adapter-unsupported",
    "replaces what is not there": "merge-adapter-base",
    "replaces by another shape": "merge-adapter-base",
    "bias without a bias": "merge-adapter-unsupported",
    "two adapters": "merge-adapter-damaged",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_mismatched_adapter_is_one_error_and_writes_nothing(kind, llama, base, tmp_path, merge):
    folder = adapter_directory(
        tmp_path / "a", broken(kind, adapter_state(factors(llama, "q_proj", "k_proj")))
    )
    with pytest.raises(FailedError) as caught:
        merge(folder, base=str(base))
    assert [problem.code for problem in caught.value.problems] == [BROKEN[kind]]
    assert caught.value.problems[0].hint
    assert refused(tmp_path) == []


def test_two_named_adapters_are_reported_by_name(llama, tmp_path, merge):
    adapter = factors(llama, "q_proj")
    state = adapter_state(adapter, "default") | adapter_state(adapter, "reference")
    save_dcp({"model": state}, write_config(tmp_path / "c") / SHARDS)
    with pytest.raises(FailedError, match="default, reference") as caught:
        merge(tmp_path / "c", adapter=True)
    assert caught.value.problems[0].code == "merge-adapter-several"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "merge-adapter-config"),
        ("[]", "merge-adapter-config"),
        ('{"peft_type": "LORA", "rank_pattern": 3}', "merge-adapter-config"),
    ]
    + [
        (f'{{"peft_type": "LORA", "r": 4, "lora_alpha": {alpha}}}', "merge-adapter-config")
        for alpha in ("null", '"8"', "NaN", "true")
    ]
    + [('{"peft_type": "LORA", "r": 4, "alpha_pattern": {"(": 1}}', "merge-adapter-config")],
)
def test_invalid_adapter_config_is_named(text, code, llama, base, tmp_path, merge):
    folder = adapter_directory(tmp_path / "a", adapter_state(factors(llama, "q_proj")))
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises(FailedError) as caught:
        merge(folder, base=str(base))
    assert (caught.value.problems[0].code, caught.value.problems[0].where.source) == (
        code,
        str(folder / "adapter_config.json"),
    )


def test_without_a_config_the_error_names_the_option_that_provides_one(llama, tmp_path, merge):
    adapter = factors(llama, "q_proj")
    save_dcp({"model": whole_state(llama, adapter)}, tmp_path / "c" / SHARDS)
    for options in ({}, {"adapter": True}):
        with pytest.raises(FsdpTuneError, match=r"no adapter_config\.json") as caught:
            merge(tmp_path / "c", **options)
        assert caught.value.exit_code == 2
    given = write_config(tmp_path / "elsewhere")
    for number, path in enumerate((given, given / "adapter_config.json")):
        assert_tensors(
            merge(tmp_path / "c", adapter_config=path, output=tmp_path / f"out{number}").output,
            added(llama, adapter),
        )
    with pytest.raises(FsdpTuneError, match=r"no adapter_config\.json here"):
        merge(tmp_path / "c", adapter_config=tmp_path)


@pytest.mark.parametrize("ranks", [{}, {"model.layers.1.self_attn.q_proj": 2}], ids=["one rank", "two ranks"])
def test_without_a_config_the_error_has_the_file_to_write(ranks, llama, tmp_path, merge):
    adapter = factors(llama, "q_proj", "k_proj")
    for module, rank in ranks.items():
        adapter[module] = {
            "lora_A": adapter[module]["lora_A"][:rank],
            "lora_B": adapter[module]["lora_B"][:, :rank],
        }
    head = values(*llama.lm_head.weight.shape, seed=3)
    save_dcp(
        {"model": whole_state(llama, adapter, saved={"lm_head": {"weight": head}})}, tmp_path / "c" / SHARDS
    )
    with pytest.raises(FsdpTuneError, match=r"no adapter_config\.json") as caught:
        merge(tmp_path / "c")
    given, written = caught.value.problems[0].ways_out
    assert "--adapter-config FILE" in given
    path, text = tmp_path / "c" / SHARDS / "adapter_config.json", written.partition("that: ")[2]
    assert str(path) in written
    assert json.loads(text.replace("ALPHA", "8"))["target_modules"] == ["k_proj", "q_proj"]
    path.write_text(text.replace("ALPHA", str(peft.ALPHA)))
    assert_tensors(merge(tmp_path / "c").output, added(llama, adapter) | {"lm_head.weight": head})


def test_without_a_base_the_alternatives_are_reported(llama, tmp_path, merge):
    folder = adapter_directory(tmp_path / "a", adapter_state(factors(llama, "q_proj")))
    with pytest.raises(FsdpTuneError, match="its config does not name the model") as caught:
        merge(folder)
    assert {"--base" in way or "--adapter" in way for way in caught.value.problems[0].ways_out} == {True}
    empty = model_directory(llama, tmp_path / "base")
    with pytest.raises(FsdpTuneError, match="holds no weights"):
        merge(folder, base=str(empty))


def test_contradictory_merge_options_are_refused(llama, tmp_path, merge):
    run = make_run(tmp_path / "plain", {1: llama.state_dict(), 2: llama.state_dict()})
    for options in ({"adapter": True}, {"adapter_config": tmp_path}):
        with pytest.raises(FsdpTuneError, match="holds no LoRA adapter"):
            merge(run, **options)
    state = whole_state(llama, factors(llama, "q_proj"))
    run = make_run(tmp_path / "run", {1: state, 2: state})
    write_config(run / "checkpoint-2")
    with pytest.raises(FsdpTuneError, match="the mean of the factors"):
        merge(run, adapter=True, average="last:2")


def test_output_must_not_be_inside_the_base(llama, base, tmp_path, merge):
    folder = adapter_directory(tmp_path / "a", adapter_state(factors(llama, "q_proj")))
    (base / "merge.json").write_text("{}")
    for output in (base, base / "merged", folder / "merged"):
        with pytest.raises(FsdpTuneError, match="which is read"):
            merge(folder, base=str(base), output=output, overwrite=True)


def test_incomplete_adapter_is_refused_with_allow_incomplete(llama, tmp_path, merge):
    folder = write_config(tmp_path / "c")
    sharded_peft_model(folder / SHARDS, whole_state(llama, factors(llama, "q_proj")))
    (folder / SHARDS / "__2_0.distcp").unlink()
    with pytest.raises(FailedError, match=r"__2_0\.distcp"):
        merge(folder, allow_incomplete=True)


@pytest.mark.parametrize("part", ["lora_A", "lora_B", "base_layer"])
def test_flipped_bit_in_a_factor_is_found(part, llama, tmp_path, merge):
    """By the checksum of the archive, whichever way the factor is read: whole, or with the rows."""
    state = whole_state(llama, factors(llama, "q_proj"))
    name = next(name for name in state if part in name)
    save_dcp({"model": {name: state[name]}}, tmp_path / "one")
    marked = bytes(state[name].numpy().tobytes())
    save_dcp({"model": state}, write_config(tmp_path / "c") / SHARDS)
    path = tmp_path / "c" / SHARDS / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[data.index(marked) + 9] ^= 1
    path.write_bytes(data)
    with pytest.raises(FailedError, match="bits have flipped"):
        merge(tmp_path / "c")


def test_nan_in_a_factor_is_reported_by_the_weight_it_reaches(llama, tmp_path, merge):
    adapter = factors(llama, "layers.0.self_attn.q_proj")
    adapter["model.layers.0.self_attn.q_proj"]["lora_A"][0, 3] = float("nan")
    save_dcp({"model": whole_state(llama, adapter)}, write_config(tmp_path / "c") / SHARDS)
    with pytest.raises(FailedError, match=r"q_proj.weight.*NaN"):
        merge(tmp_path / "c")


def test_names_of_every_part_are_classified():
    names = {
        "m.q.lora_A.default.weight": "m.q",
        "m.q.lora_B.weight": "m.q",
        "m.q.lora_B.default.bias": "m.q",
        "m.e.lora_embedding_A.default": "m.e",
        "m.e.lora_embedding_B": "m.e",
    }
    found = classify_names(
        [PREFIX + name for name in names]
        + ["m.q.base_layer.weight", "h.modules_to_save.default.weight", "h.original_module.weight"],
        None,
    )
    assert found.factors.keys() == {"m.q", "m.e"}
    assert found.factors["m.q"].keys() == {"lora_A", "lora_B", "lora_B.bias"}
    assert found.weights.keys() == {"m.q.weight", "h.weight"}
    assert (found.wrapped, found.saved, found.adapters) == ({"m.q.weight"}, {"h.weight"}, {"default"})
