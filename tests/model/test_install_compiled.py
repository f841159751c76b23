"""Decoder layers compiled one by one: the same gradients, one graph for all of them, and no new one once two
widths have been seen."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerControl, TrainerState, TrainingArguments

from fsdp_tune.model.kernels.compiled import (
    GRAPHS_OF_A_LAYER,
    CompileClock,
    compile_layers,
    expected_graphs,
    is_compiled,
)
from fsdp_tune.model.loading.construct import build_empty, build_full
from fsdp_tune.model.shard.fsdp_units import decoder_layers
from fsdp_tune.model.shard.recompute import recompute_activations
from fsdp_tune.model.step import micro_batch_loss
from fsdp_tune.worker.compile_events import CompileReport
from fsdp_tune.worker.readback.dtype_audit import DtypeAudit
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of

# torch's own, while it looks whether a hidden state is a leaf
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


@pytest.fixture(autouse=True)
def without_machine_code() -> Iterator[None]:
    """The graphs are what is counted; `aot_eager` makes the same ones and runs their operations as they
    are."""
    torch._dynamo.reset()
    with patch("fsdp_tune.model.kernels.compiled.BACKEND", "aot_eager"):
        yield
    torch._dynamo.reset()


def batch(width: int) -> dict[str, torch.Tensor]:
    """Two packed rows."""
    ids = torch.arange(2 * width).remainder(257).view(2, width)
    return {
        "input_ids": ids,
        "labels": ids,
        "position_ids": torch.arange(width).remainder(11).expand(2, width).contiguous(),
    }


def loss_and_gradient(model: Any, width: int) -> tuple[float, torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    loss, _ = micro_batch_loss(model, batch(width))
    loss.backward()
    return float(loss.detach()), torch.cat(
        [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    )


SLOW = [
    pytest.param(family, way, marks=pytest.mark.slow)
    for family, way in (
        ("llama", "full"),
        ("llama", "none"),
        ("llama", "selective"),
        ("gpt2", "full"),
        ("gemma", "none"),
    )
]


@pytest.mark.parametrize(("family", "way"), SLOW)
def test_one_graph_serves_all_layers_and_every_width(family: str, way: str) -> None:
    """GPT-2 has dropout: compiled or not, recomputed or not, the masks are the same."""
    recipe = recipe_of(family, fsdp={"activation_checkpointing": way}, kernels={"compile": True})
    plain = build_full(recipe).train()
    compiled = copy.deepcopy(plain)
    for model in (plain, compiled):
        recompute_activations(recipe, model)
    names = compile_layers(recipe, compiled)
    assert not torch._inductor.config.cpp_cache_precompile_headers, "they lie in TMPDIR/torchinductor_USER"
    assert len(names) == 2
    assert [name for name, module in compiled.named_modules() if is_compiled(module)] == names
    assert not any(is_compiled(module) for module in plain.modules())
    clock = CompileClock()
    graphs: list[int] = []
    for width in (24, 32, 40, 24):
        (loss, true), (found_loss, found) = (loss_and_gradient(model, width) for model in (plain, compiled))
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert float((found - true).norm() / true.norm()) <= 1e-6
        graphs.append(clock.graphs)
    assert graphs == [1, 2, 2, 2], "the second width makes it a variable"
    compiled.eval()
    with torch.no_grad():
        for width in (24, 64):
            micro_batch_loss(compiled, batch(width))
    assert clock.graphs == 3, "all batches had as many rows"
    assert clock.seconds > 0


def test_audited_layers_are_compiled_as_well() -> None:
    """torch silently never compiles a function that it first sees under a dispatch mode."""
    compiled = torch.compile(lambda x: (x @ x).relu(), backend="aot_eager")
    clock = CompileClock()
    with DtypeAudit() as audit:
        compiled(torch.ones(3, 3))
    assert audit.report() == {"matmul": {"float32": 1}}
    assert clock.graphs == 0
    compiled(torch.ones(3, 3))
    assert clock.graphs == 1


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="so torch is up to 2.13; 2.15 compiles")
def test_dispatch_mode_without_disable_prevents_compilation() -> None:
    """Why `DtypeAudit` keeps the compiler out."""

    class Plain(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    compiled = torch.compile(lambda x: (x @ x).relu(), backend="aot_eager")
    clock = CompileClock()
    with Plain():
        compiled(torch.ones(3, 3))
    compiled(torch.ones(3, 3))
    assert clock.graphs == 0


def test_compile_time_is_an_event_outside_step_time() -> None:
    events: list[dict[str, Any]] = []
    left_out: list[float] = []
    said: list[str] = []
    report = CompileReport(said.append)
    metrics = SimpleNamespace(
        event=lambda event: events.append({"event": event.name, "step": event.step, **event.details()})
    )
    report.trainer = SimpleNamespace(
        parts=SimpleNamespace(
            metrics=metrics,
            recipe=recipe_of("llama"),
            loaded=SimpleNamespace(layers=[("0", torch.nn.Linear(1, 1))]),
        ),
        lines=SimpleNamespace(leave_out=left_out.append),
    )  # type: ignore[assignment]

    def step(number: int, graphs: int, seconds: float) -> None:
        with patch.object(CompileClock, "graphs", graphs):
            report._clock.seconds += seconds
            report.on_step_end(
                TrainingArguments(use_cpu=True), TrainerState(global_step=number), TrainerControl()
            )

    step(1, 1, 20.0)
    step(2, 1, 0.0)
    step(3, 2, 10.0)
    step(9, 6, 1.0)
    assert events == [
        {"event": "compiled", "step": 1, "seconds": 20.0, "graphs": 1},
        {"event": "compiled", "step": 3, "seconds": 10.0, "graphs": 2},
        {"event": "compiled", "step": 9, "seconds": 1.0, "graphs": 6},
    ]
    assert left_out == [20.0, 10.0, 1.0]
    assert f"6 graphs by now, where {GRAPHS_OF_A_LAYER} were expected" in said[-1]
    assert not any("expected" in line for line in said[:-1])


def layers_of(family: str, **overrides: Any) -> list[torch.nn.Module]:
    recipe = recipe_of({"from_config": FAMILIES[family], "config_overrides": overrides})
    return [layer for _, layer in decoder_layers(build_empty(recipe))]


def test_two_layer_kinds_compile_twice_the_graphs() -> None:
    every_second = {"activation_checkpointing": "full", "activation_checkpointing_every": 2}
    assert expected_graphs(recipe_of("llama", fsdp=every_second), layers_of("llama")) == 2 * GRAPHS_OF_A_LAYER
    mixed = layers_of("gemma3_text", layer_types=["sliding_attention", "full_attention"])
    assert expected_graphs(recipe_of("gemma3_text"), mixed) == 2 * GRAPHS_OF_A_LAYER
    assert expected_graphs(recipe_of("llama"), layers_of("llama")) == GRAPHS_OF_A_LAYER


def test_recompile_limit_follows_from_layer_kinds() -> None:
    recipe = recipe_of("llama")
    with torch._dynamo.config.patch(recompile_limit=2):
        compile_layers(recipe, build_empty(recipe))
        assert torch._dynamo.config.recompile_limit >= 2 * GRAPHS_OF_A_LAYER


def test_fallback_to_uncompiled_code_is_reported() -> None:
    report, said = CompileReport(lambda line: said.append(line)), list[str]()
    events: list[str] = []
    metrics = SimpleNamespace(event=lambda event: events.append(event.name))
    report.trainer = SimpleNamespace(  # type: ignore[assignment]
        parts=SimpleNamespace(metrics=metrics, recipe=recipe_of("llama"), loaded=SimpleNamespace(layers=[])),
        lines=SimpleNamespace(leave_out=lambda seconds: None),
    )

    def of_layer(x: torch.Tensor, kind: str) -> torch.Tensor:
        return x + len(kind)

    compiled = torch.compile(of_layer, backend="aot_eager")
    with torch._dynamo.config.patch(recompile_limit=2):
        for kind in ("a", "bb", "ccc"):
            compiled(torch.ones(3), kind)
    report.on_step_end(TrainingArguments(use_cpu=True), TrainerState(global_step=1), TrainerControl())
    assert events == ["compile_fallback", "compiled"]
    assert "WARNING: 'of_layer'" in said[0]
