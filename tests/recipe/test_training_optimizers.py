"""`training.optim` and `training.optim_args`: accepted values, and errors with their line."""

from __future__ import annotations

import pytest

from fsdp_tune.recipe.schema.optimizers import OPTIMIZERS, optimizer_arguments, state_bytes, state_dtype
from tests.recipe.loading import load_with, one_problem, problems

HEAD = "model: {name_or_path: gpt2DTYPE}\ndata: {train: [{path: a}]}\n"


def refused(extra: str, dtype: str = "fp32") -> object:
    return one_problem(problems(HEAD.replace("DTYPE", f", dtype: {dtype}") + extra))


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ('training: {optim_args: "state_dtype=bf8"}', "`state_dtype` is `bf8`; it takes `fp32` or `bf16`"),
        ('training: {optim_args: "state_dtype"}', "`state_dtype` has no value"),
        (
            'training: {optim_args: "stat_dtype=bf16"}',
            "`stat_dtype`, which `training.optim: adamw_torch_fused` does not take",
        ),
        (
            'training: {optim: adamw_torch, optim_args: "state_dtype=bf16"}',
            "`training.optim: adamw_torch` does not take",
        ),
        ('training: {optim: sgd, optim_args: "momentum=much"}', "`momentum` is `much`; it takes a number"),
        ('training: {optim: sgd, optim_args: "momentum=inf"}', "`momentum` is `inf`; it takes a number"),
        (
            "training: {optim: rmsprop, adam_epsilon: 1.0e-6}",
            "`training.optim: rmsprop` does not read `training.adam_epsilon`",
        ),
        ("training: {optim_target_modules: [attn]}", "does not read `training.optim_target_modules`"),
        (
            'training: {optim: adamw_torch_8bit, optim_args: "block_size=100"}',
            "it takes a power of two, 16 or more",
        ),
        ('training: {optim_args: "bf16_stochastic_round=true"}', "`model.dtype` is fp32"),
        ('training: {optim_args: "state_dtype=bf16"}\nfsdp: {version: 1}', "`state_dtype` needs FSDP2"),
        ("training: {optim: adamw_torch_8bit}\nfsdp: {version: 1}", "needs FSDP2"),
        (
            "training: {optim: adamw_torch_8bit}\nfsdp: {state_dict_type: FULL_STATE_DICT}",
            "writes plain tensors",
        ),
        (
            "training: {optim: adamw_torch_8bit}\nfsdp: {state_dict_type: FULL_STATE_DICT, "
            "sharding_strategy: NO_SHARD}",
            "writes plain",
        ),
    ],
)
def test_invalid_optimizer_argument_is_refused_with_its_line(extra: str, words: str) -> None:
    problem = refused(extra)
    assert words in problem.message  # type: ignore[attr-defined]
    assert problem.where.line == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize(
    ("argument", "key"), [("weight_decay", "training.weight_decay"), ("lr", "training.learning_rate")]
)
def test_argument_that_has_a_key_is_refused_with_the_key(optim: str, argument: str, key: str) -> None:
    problem = refused(f'training: {{optim: {optim}, optim_args: "{argument}=0.01"}}')
    assert (f"`{argument}`, which `training.optim: {optim}` does not take") in problem.message  # type: ignore[attr-defined]
    assert problem.hint == f"write `{key}`"  # type: ignore[attr-defined]


def test_betas_of_adamw_are_refused_with_their_keys() -> None:
    assert "training.adam_beta2" in refused('training: {optim_args: "betas=0.9"}').hint  # type: ignore[attr-defined]
    assert "training.adam_epsilon" in refused('training: {optim: adamw_torch, optim_args: "eps=1e-6"}').hint  # type: ignore[attr-defined]


@pytest.mark.parametrize("strategy", ["NO_SHARD", "HYBRID_SHARD"])
def test_torchao_stochastic_rounding_is_refused_with_replicas(strategy: str) -> None:
    extra = (
        f'training: {{optim: adamw_torch_8bit, optim_args: "bf16_stochastic_round=true"}}\nfsdp: '
        f"{{sharding_strategy: {strategy}}}"
    )
    assert "would drift apart" in refused(extra, "bf16").message  # type: ignore[attr-defined]


def test_optimizer_argument_words_are_parsed() -> None:
    def training(extra: str) -> object:
        return load_with(f"training: {{{extra}}}").recipe.training

    assert optimizer_arguments(training("optim: sgd, optim_args: 'momentum=0.9, nesterov=Yes'")) == {
        "momentum": 0.9,
        "nesterov": True,
    }  # type: ignore[arg-type]
    assert state_dtype(training("optim_args: state_dtype=bf16"), "fp32") == "bf16"  # type: ignore[arg-type]
    assert state_dtype(training(""), "bf16") == "bf16"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("extra", "wanted"),
    [
        ("", 8),
        ("optim_args: state_dtype=bf16", 4),
        ("optim: adamw_torch_8bit", 2 * (1 + 4 / 256)),
        ("optim: adamw_torch_4bit, optim_args: block_size=128", 2 * (0.5 + 4 / 128)),
        ("optim: sgd", 0),
        ("optim: sgd, optim_args: momentum=0.9", 4),
        ("optim: rmsprop", 4),
    ],
)
def test_bytes_of_state_of_a_parameter(extra: str, wanted: float) -> None:
    assert state_bytes(load_with(f"training: {{{extra}}}").recipe.training, 4) == wanted
