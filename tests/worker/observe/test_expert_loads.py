"""Tokens by expert are those that the router chose, once each, over all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, TrainerControl, TrainerState, TrainingArguments

from fsdp_tune.run.metrics_file import read_metrics
from fsdp_tune.worker.observe import expert_loads
from fsdp_tune.worker.observe.expert_loads import ExpertLoads
from fsdp_tune.worker.step_observer import LoggedStep
from tests.cuda.devices import on_devices
from tests.parity.bench import Bench
from tests.parity.cases import Case
from tests.worker.short_runs import short_run

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    more = (
        {"first_k_dense_replace": 0, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
        if kind == "deepseek_v3"
        else {}
    )
    config = AutoConfig.for_model(
        kind, **SIZES, **more, num_hidden_layers=2, num_local_experts=4, num_experts=4, num_experts_per_tok=2
    )
    return AutoModelForCausalLM.from_config(config).train()


def begin(loads: ExpertLoads, step: int, **arguments: Any) -> None:
    given = cast(
        TrainingArguments, SimpleNamespace(**({"logging_steps": 2, "logging_first_step": False} | arguments))
    )
    loads.on_step_begin(given, TrainerState(global_step=step - 1, max_steps=9), TrainerControl())


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_tokens_of_each_expert_are_those_of_the_router(
    kind: str, recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_loads.dist, "all_reduce", lambda tensor: None)
    model = model_of(kind)
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loads = ExpertLoads(model, torch.device("cpu"))
    chosen: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for index, layer in enumerate(model.model.layers):
        router: nn.Module = getattr(layer.mlp, "gate", None) or layer.mlp.router
        router.register_forward_hook(lambda _m, _a, output, index=index: chosen[index].append(output[2]))
    ids = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(1))
    begin(loads, 2)
    for row in ids:
        model(input_ids=row[None], use_cache=False).logits.sum().backward()
    model.eval()
    model(input_ids=ids, use_cache=False)
    calls = 2 if not recomputed else 4
    counts = [
        torch.cat(chosen[index][:calls]).flatten().bincount(minlength=4) // (calls // 2) for index in (0, 1)
    ]
    found = loads.facts(LoggedStep(1))
    means = [each.double().mean() for each in counts]
    assert found["expert_load_max"] == max(
        float(each.max() / mean) for each, mean in zip(counts, means, strict=True)
    )
    assert found["expert_load_min"] == min(
        float(each.min() / mean) for each, mean in zip(counts, means, strict=True)
    )
    assert found["experts_unused"] == sum(int((each == 0).sum()) for each in counts)
    worst = max((0, 1), key=lambda index: float(counts[index].max() / means[index]))
    assert found["expert_tokens"] == counts[worst].tolist()
    assert found["expert_layer"].startswith(f"model.layers.{worst}.")
    assert sum(found["expert_tokens"]) == 2 * 9 * 2


def test_only_logged_steps_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_loads.dist, "all_reduce", lambda tensor: None)
    model = model_of("mixtral")
    loads = ExpertLoads(model, torch.device("cpu"))
    ids = torch.arange(12)[None]
    for step, tokens in ((1, 0), (2, 24), (3, 0), (4, 24), (9, 24)):
        begin(loads, step)
        model(input_ids=ids, use_cache=False)
        assert sum(loads.facts(LoggedStep(1)).get("expert_tokens", [])) == tokens
    begin(loads, 1, logging_first_step=True)
    assert loads.facts(LoggedStep(1))["experts_unused"] == 8
    assert ExpertLoads(nn.Linear(2, 2), torch.device("cpu")).facts(LoggedStep(1)) == {}


@on_devices
@pytest.mark.ranks
def test_lines_of_a_sharded_mixture_have_the_tokens_of_all_ranks(bench: Bench) -> None:
    run = short_run(bench, Case("mixtral", recomputation="full", accumulation=2, packed=True))
    lines = [line for line in read_metrics(run) if "loss" in line]
    before = 0
    for line in lines:
        chosen = 2 * (line["tokens"] - before)
        assert 0 < chosen <= sum(line["expert_tokens"]) < 1.9 * chosen, "each token once, and some padding"
        assert line["expert_load_min"] <= 1.0 <= line["expert_load_max"]
        before = line["tokens"]
