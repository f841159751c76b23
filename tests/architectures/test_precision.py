"""The dtypes of a run's live and merged tensors are those of a model that transformers loads in bf16 and
saves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architectures.tiny import known

FAMILIES = (
    *(
        "afmoe",
        "deepseek_v3",
        "deepseek_v4",
        "ernie4_5_moe",
        "glm4_moe_lite",
        "hunyuan_v1_moe",
        "hy_v4",
        "kimi_linear",
        "nemotron_h",
    ),
    "olmo_hybrid",
)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("family", FAMILIES)
def test_dtypes_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    from tests.architectures.precision import try_precision
    from tests.parity.store import make_store
    from tests.ranks import shared_ranks

    if family not in known(family):
        pytest.skip("not in this transformers")
    found = try_precision(family, tmp_path / family, make_store(tmp_path / "rows"), shared_ranks(), ["full"])
    assert found is not None
    assert found.kept
    assert found.differences["live"] == {}
    assert found.differences["merged full"] == {}
    assert found.gathered in (True, None)


@pytest.mark.slow
@pytest.mark.ranks
def test_losses_are_equal_under_every_wrapping(tmp_path: Path) -> None:
    from tests.architectures.precision import train
    from tests.architectures.tiny import config_of, make_model
    from tests.parity import runs
    from tests.parity.store import make_store
    from tests.ranks import shared_ranks

    base, store = (
        make_model(config_of("deepseek_v3") | {"output_router_logits": False}, tmp_path / "base"),
        make_store(tmp_path / "rows"),
    )
    found = {}
    for name, fsdp in {
        "not sharded": {"sharding_strategy": "NO_SHARD"},
        "by layers": {},
        "kept gathered": {"sharding_strategy": "SHARD_GRAD_OP"},
        "recomputed": {"activation_checkpointing": "full"},
        "on the host": {"offload_params": True},
        "by size": {"auto_wrap_policy": "SIZE_BASED_WRAP"},
        "one unit": {"auto_wrap_policy": "NO_WRAP"},
        "decoder a unit": {
            "auto_wrap_policy": "MODULE_NAMES_WRAP",
            "modules_to_wrap": ["model", "model.layers.*"],
        },
    }.items():
        run = train(
            tmp_path / name.replace(" ", "-"),
            base,
            {
                "fsdp": fsdp
                if "sharding_strategy" in fsdp and fsdp["sharding_strategy"] == "NO_SHARD"
                else {"version": 2} | fsdp
            },
            store,
            shared_ranks(),
        )
        found[name] = [line["loss"] for line in runs.loss_lines(run)]
    assert found == dict.fromkeys(found, found["not sharded"])
