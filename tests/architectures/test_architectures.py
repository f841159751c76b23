"""The table's function finds what works and what is refused, and its page shows both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architectures.page import failures_of, page
from tests.evidence import Results

# What trains imports torch and transformers, which collection does without.


@pytest.mark.slow
@pytest.mark.ranks
def test_architectures_train_or_are_refused_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.architectures import case
    from tests.architectures.case import Bench, try_architecture
    from tests.parity.store import make_store
    from tests.ranks import shared_ranks

    store = make_store(tmp_path / "rows")
    experts = try_architecture("mixtral", Bench(tmp_path / "mixtral", store, shared_ranks()))
    assert failures_of(experts.as_dict()) == []
    assert experts.packed is not None
    assert experts.refused == {}
    states = try_architecture("mamba", Bench(tmp_path / "mamba", store, shared_ranks()))
    assert failures_of(states.as_dict()) == []
    assert states.packed is not None
    own_mask = try_architecture("openai-gpt", Bench(tmp_path / "openai-gpt", store, shared_ranks()))
    assert failures_of(own_mask.as_dict()) == []
    assert own_mask.refused.keys() == {"packed"}
    text = page(
        Results(
            {"transformers": "5", "longest_row": 24},
            [experts.as_dict(), states.as_dict(), own_mask.as_dict()],
        )
    )
    assert "3 train, resume, merge and generate, 2 of them packed too; 0 are refused, 0 fail" in text
    assert "\n- the model lets packed examples see each other: `openai-gpt`\n" in text
    monkeypatch.setattr(case, "make_model", lambda *_: 1 / 0)
    unbuilt = try_architecture("llama", Bench(tmp_path / "llama", store, shared_ranks()))
    assert unbuilt.refused == {"model": "ZeroDivisionError: division by zero"}


def test_page_lists_losses_that_differ_as_failures() -> None:
    from tests.architectures.case import Result

    result = Result(
        "llama", "LlamaForCausalLM", unpacked=(0.0, 1e-3), resumed=0.0, merged=True, generated=True
    ).as_dict()
    assert failures_of(result) == ["unpacked: the loss is off by 1.0e-03"]
    assert "\n- Failed: `llama`: unpacked: the loss is off by 1.0e-03" in page(
        Results({"transformers": "5", "longest_row": 24}, [result])
    )


def test_page_names_the_limits_that_no_row_reaches() -> None:
    from tests.architectures.case import Result
    from tests.architectures.tiny import unreached_limits

    config = {
        "index_topk": 2048,
        "index_head_dim": 128,
        "text_config": {"sliding_window": 512},
        "audio_config": {"chunk_size": 99},
        "window_size": 8,
    }
    assert unreached_limits(config, 24) == {"index_topk": 2048, "text_config.sliding_window": 512}
    trained = Result(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        (0.0, 0.0),
        resumed=0.0,
        merged=True,
        generated=True,
        unreached={"index_topk": 2048},
    )
    text = page(Results({"transformers": "5", "longest_row": 24}, [trained.as_dict()]))
    assert "## What the tiny form does not exercise" in text
    assert "\n- `index_topk`: `glm_moe_dsa`. With `index_topk: 8`" in text
