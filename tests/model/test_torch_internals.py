"""What replaces a private name of torch gives the same result, or leaves out what its entry says; objects
have the listed attributes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._flat_param import FlatParameter
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.internals import torch_internals as internals
from fsdp_tune.model.internals.internal import Attribute, Name, NoFallback
from fsdp_tune.model.optim.lean_adamw import LeanAdamW
from fsdp_tune.model.shard import selective_recompute
from fsdp_tune.model.step import scale_gradients
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.worker.observe import flight_recorder
from fsdp_tune.worker.observe.expert_loads import ExpertLoads
from fsdp_tune.worker.readback.dtype_audit import DtypeAudit, warnings_of, why_not_audited
from fsdp_tune.worker.step_observer import LoggedStep
from tests.structure.internals import entries

ENTRIES = {
    name.partition(".")[2]: entry for name, entry in entries().items() if name.startswith("torch_internals.")
}


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[Name], Any]:
    """Make the installed version one without a name."""

    def remove(entry: Name) -> None:
        exists = Name.exists
        monkeypatch.setattr(Name, "exists", lambda each: each.path != entry.path and exists(each))

    return remove


def _scaled() -> list[torch.Tensor]:
    parameters = [nn.Parameter(torch.arange(6.0)), nn.Parameter(torch.ones(2, 3))]
    for parameter in parameters:
        parameter.grad = parameter.detach() + 1
    scale_gradients(parameters, 0.25)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def foreach_mul(without: Callable[[Name], None]) -> None:
    with_name = _scaled()
    without(internals.FOREACH_MUL)
    assert all(map(torch.equal, _scaled(), with_name))


def foreach_norm(without: Callable[[Name], None]) -> None:
    tensors = [torch.arange(6.0).bfloat16(), torch.ones(2, 3).bfloat16()]
    with_name = internals.FOREACH_NORM.get()(tensors, 2, dtype=torch.float32)
    without(internals.FOREACH_NORM)
    assert all(map(torch.equal, internals.FOREACH_NORM.get()(tensors, 2, dtype=torch.float32), with_name))


def disable_modes(without: Callable[[Name], None]) -> None:
    fake_mode = internals.FAKE_TENSOR_MODE.get()
    without(internals.DISABLE_MODES)
    with internals.DISABLE_MODES.get()():
        assert float(torch.ones(())) == 1
    with fake_mode(), pytest.raises(FsdpTuneError, match="a plan needs"):
        internals.DISABLE_MODES.get()()


def observing_mode(without: Callable[[Name], None]) -> None:
    recipe = Recipe.model_validate({"model": {"name_or_path": "gpt2"}})
    with DtypeAudit() as audit:
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert audit.report() == {"matmul": {"float32": 1}}
    assert not [warning for warning in warnings_of(recipe, {}) if "not known" in warning]
    without(internals.OBSERVING_MODE)
    with DtypeAudit() as audit:
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert audit.report() == {}
    (warning,) = [warning for warning in warnings_of(recipe, {}) if "not known" in warning]
    assert "TorchDispatchMode" in warning


def test_flex_attention_is_not_audited_with_the_reason() -> None:
    """As single operations torch refuses it under the mode that the audit is."""
    recipe = Recipe.model_validate(
        {"model": {"name_or_path": "gpt2", "attn_implementation": "flex_attention"}}
    )
    with DtypeAudit(why_not_audited(recipe)) as audit:
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert audit.report() == {}
    (warning,) = [warning for warning in warnings_of(recipe, {}) if "not known" in warning]
    assert warning.endswith("`flex_attention` computes only in compiled code")


def operators_of_selective_recomputation(without: Callable[[Name], None]) -> None:
    saved = selective_recompute._attention_operators.__wrapped__()
    without(internals.ATTENTION_OPERATORS[0])
    assert saved - selective_recompute._attention_operators.__wrapped__() == {
        torch.ops.aten._scaled_dot_product_flash_attention.default
    }


def scaled_mm(without: Callable[[Name], None]) -> None:
    without(internals.SCALED_MM)
    assert torch.ops.aten.mm.default in selective_recompute.products.__wrapped__()


def not_replaced(entry: Name) -> Callable[[Callable[[Name], None]], None]:
    def check(without: Callable[[Name], None]) -> None:
        original = entry.get()
        with entry.replaced(print):
            assert entry.get() is print
        assert entry.get() is original
        without(entry)
        with entry.replaced(print):
            assert entry.get() is None

    return check


def fused_adamw(without: Callable[[Name], None]) -> None:
    def trained() -> torch.Tensor:
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(64))
        optimizer = LeanAdamW(
            [parameter], state_dtype=torch.float32, rounds_parameters=False, seed=0, lr=1e-2, weight_decay=0.1
        )
        for _ in range(5):
            parameter.grad = torch.randn(64)
            optimizer.step()
        assert int(optimizer.state[parameter]["step"]) == 5
        return parameter.detach()

    with_name = trained()
    without(internals.FUSED_ADAMW)
    torch.testing.assert_close(trained(), with_name, rtol=1e-6, atol=1e-7)


def graph_task(without: Callable[[Name], None]) -> None:
    class Experts(nn.Module):
        num_experts = 4

        def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor) -> torch.Tensor:
            return hidden

    assert ExpertLoads(Experts(), torch.device("cpu"))._layers
    without(internals.GRAPH_TASK)
    loads = ExpertLoads(Experts(), torch.device("cpu"))
    loads._is_counted = True
    assert loads.facts(LoggedStep(1)) == {}


def flight_records(without: Callable[[Name], None]) -> None:
    without(internals.FLIGHT_RECORDS["cpu"][0])
    assert flight_recorder.dump(SimpleNamespace(), 0, "cpu") is None  # type: ignore[arg-type]


# Each entry that has a fallback is in this table, with a test of what a run does without the name.
FALLBACKS: dict[str, Callable[[Callable[[Name], None]], None]] = {
    "FOREACH_MUL": foreach_mul,
    "FOREACH_NORM": foreach_norm,
    "DISABLE_MODES": disable_modes,
    "OBSERVING_MODE": observing_mode,
    "ATTENTION_OPERATORS": operators_of_selective_recomputation,
    "SCALED_MM": scaled_mm,
    "VERIFY_SHAPES": not_replaced(internals.VERIFY_SHAPES),
    "CHUNKS": not_replaced(internals.CHUNKS),
    "FUSED_ADAMW": fused_adamw,
    "GRAPH_TASK": graph_task,
    "FLIGHT_RECORDS": flight_records,
}


def test_each_fallback_of_a_name_is_in_the_table() -> None:
    have = {
        name.partition("[")[0]
        for name, each in ENTRIES.items()
        if isinstance(each, Name) and each.fallback is not NoFallback.REFUSED
    }
    assert have == set(FALLBACKS)


@pytest.mark.parametrize("name", FALLBACKS)
def test_run_without_the_name(name: str, without: Callable[[Name], None]) -> None:
    FALLBACKS[name](without)


@pytest.fixture(scope="module")
def owners(one_rank: None) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries themselves
        return _owners()


def _owners() -> dict[str, Any]:
    unit: Any = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
    unit(torch.ones(1, 4))
    state = internals.FSDP_STATE.of(unit)()
    (group,) = internals.PARAM_GROUPS.of(state)
    backend = internals.BACKEND.of(dist.group.WORLD)(torch.device("cpu"))
    return {
        "LOCAL_TENSOR": distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)]),
        "SCRIPT_TYPE": dist.group.WORLD.boxed(),  # type: ignore[union-attr]
        "COMPILED_FROM": torch.compile(torch.sin),
        "SCHEMA": torch.ops.aten.mm.default,
        "FSDP_STATE": unit,
        **dict.fromkeys(
            ("PARAM_GROUP", "PARAM_GROUPS", "FORWARD_PREFETCH", "BACKWARD_PREFETCH", "LAZY_INIT"), state
        ),
        **dict.fromkeys(("FORWARD_RECORD", "ORIGINAL_DTYPE"), group),
        **dict.fromkeys(("MODULE_INFO", "PARAM_NAME"), group.fsdp_params[0]),
        "HANDLE": FullyShardedDataParallel(
            nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True
        ),
        # one process does not shard, so its own has none
        **dict.fromkeys(
            ("FULL_PARAMETER", "LOCAL_SHARD", "SAVED_GRADIENT"),
            SimpleNamespace(**FlatParameter.__annotations__),
        ),
        **dict.fromkeys(("DEVICE_TYPES", "BACKEND"), dist.group.WORLD),
        "BACKEND_TIMEOUT": backend.options,
        "SET_TIMEOUT": backend,
        "NON_PERSISTENT": nn.Linear(1, 1),
    }


ATTRIBUTES = {name: entry for name, entry in ENTRIES.items() if isinstance(entry, Attribute)}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_objects_of_the_installed_version_have_the_attribute(name: str, owners: dict[str, Any]) -> None:
    entry = ATTRIBUTES[name]
    if ".".join(torch.__version__.split(".")[:2]) in entry.read_in:
        assert entry.exists(owners[name])


@pytest.mark.parametrize(
    ("versions", "having"),
    [(("2.11", "2.13", "2.15"), "2.11, 2.13 and 2.15"), (("2.13",), "2.13")],
)
def test_refusal_names_the_versions_that_have_the_name(versions: tuple[str, ...], having: str) -> None:
    [problem] = Name("torch:_gone", "a feature", versions).refused().problems
    assert problem.message.endswith(f"; it is in torch {having}")


def test_objects_without_an_attribute_have_the_fallback(owners: dict[str, Any]) -> None:
    nothing = SimpleNamespace(to_local=lambda: torch.ones(2), _fsdp_param_group="group")
    found = {
        name: entry.of(nothing)
        for name, entry in ATTRIBUTES.items()
        if not isinstance(entry.fallback, NoFallback)
    }
    assert torch.equal(found.pop("LOCAL_TENSOR"), torch.ones(2))
    assert found == {
        "PARAM_GROUPS": ["group"],
        "ORIGINAL_DTYPE": None,
        "FULL_PARAMETER": None,
        "LOCAL_SHARD": None,
        "SAVED_GRADIENT": None,
        "NON_PERSISTENT": frozenset(),
    }
    internals.ORIGINAL_DTYPE.set(nothing, torch.float32)
    assert not hasattr(nothing, "_orig_dtype"), "another version reads something else"
    state = owners["FSDP_STATE"] and internals.FSDP_STATE.of(owners["FSDP_STATE"])()
    single = SimpleNamespace(_fsdp_param_group=internals.PARAM_GROUPS.of(state)[0])
    assert internals.PARAM_GROUPS.of(single) == internals.PARAM_GROUPS.of(state)
    assert internals.PARAM_GROUPS.of(SimpleNamespace(_fsdp_param_group=None)) == []
