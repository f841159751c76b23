"""What optimizers take and where they work. Part of `rules.RULES`."""

from __future__ import annotations

from fsdp_tune.recipe.findings import Finding, Rule
from fsdp_tune.recipe.scalars import shown
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.recipe.schema.keys import closest
from fsdp_tune.recipe.schema.optimizer_arguments import (
    STATE_DTYPE,
    STOCHASTIC,
    TORCHAO_OPTIMIZERS,
    TRUE_WORDS,
    WORDS,
    optimizer_name,
    pairs_of,
)

_KEY = "training.optim_args"


def optimizer_takes_its_arguments(recipe: Recipe) -> Finding | None:
    """A word that nobody reads would be ignored, as transformers ignores it."""
    name = optimizer_name(recipe.training)
    words = WORDS.get(name)
    if words is None:
        return None  # refused by its name
    for word, value in pairs_of(recipe.training):
        if word not in words:
            near = closest(word, list(words))
            takes = ", ".join(words) or "nothing"
            hint = f"did you mean `{near}`?" if near else f"it takes {takes}"
            return Finding("wrong-value", (_KEY,), f"`{_KEY}` has `{shown(word)}`, which `training.optim: {name}` does not know", hint)
        try:
            words[word].read(value or "")
        except ValueError:
            given = "has no value" if value is None else f"is `{shown(value)}`"
            return Finding("wrong-value", (_KEY,), f"`{_KEY}`: `{word}` {given}; it takes {words[word].says}", f'"{word}=…"')
    return None


def _given(recipe: Recipe) -> dict[str, str]:
    """Words with their text, of any optimizer, readable or not."""
    return {word: value or "" for word, value in pairs_of(recipe.training)}


def rounds_by_chance(recipe: Recipe) -> bool:
    """Whether bf16 weights keep, on average, what is smaller than their last place."""
    return _given(recipe).get(STOCHASTIC, "false").lower() in TRUE_WORDS


def stochastic_rounding_has_something_to_round(recipe: Recipe) -> Finding | None:
    if not rounds_by_chance(recipe) or recipe.model.dtype == "bf16":
        return None
    message = f"`{STOCHASTIC}=true` rounds parameters that are stored in bf16, and `model.dtype` is {recipe.model.dtype}"
    return Finding("contradiction", (_KEY, "model.dtype"), message, "write `model.dtype: bf16`, or leave it out")


def lean_state_needs_fsdp_2(recipe: Recipe) -> Finding | None:
    """FSDP1's flat parameters have no place of their own in a tensor, and its checkpoints of state know no blocks."""
    if recipe.fsdp.version == 2 or not recipe.is_sharded:
        return None
    name = optimizer_name(recipe.training)
    lean = [word for word in (STATE_DTYPE, STOCHASTIC) if word in _given(recipe)]
    if name not in TORCHAO_OPTIMIZERS and not lean:
        return None
    key, what = ("training.optim", f"`training.optim: {name}`") if name in TORCHAO_OPTIMIZERS else (_KEY, f"`{lean[0]}`")
    message = f"{what} needs FSDP2, and the recipe asks for `fsdp.version: 1`"
    return Finding("contradiction", (key, "fsdp.version"), message, "use `fsdp.version: 2`")


def blocks_have_no_whole_form(recipe: Recipe) -> Finding | None:
    name = optimizer_name(recipe.training)
    if name not in TORCHAO_OPTIMIZERS:
        return None
    if recipe.fsdp.state_dict_type == "FULL_STATE_DICT":
        message = (
            f"`training.optim: {name}` keeps blocks with a scale each, and `fsdp.state_dict_type: FULL_STATE_DICT` writes plain tensors"
        )
        return Finding("contradiction", ("training.optim", "fsdp.state_dict_type"), message, "use SHARDED_STATE_DICT")
    if rounds_by_chance(recipe) and (recipe.is_hybrid or not recipe.is_sharded):
        message = (
            f"`{STOCHASTIC}=true` under `training.optim: {name}` draws on each rank by itself, and the copies of "
            f"`fsdp.sharding_strategy: {recipe.fsdp.sharding_strategy}` would drift apart"
        )
        hint = "use FULL_SHARD or SHARD_GRAD_OP, or `optim: adamw_torch_fused`, which draws alike on all ranks"
        return Finding("contradiction", (_KEY, "fsdp.sharding_strategy"), message, hint)
    return None


OPTIMIZER_RULES: tuple[Rule, ...] = (
    optimizer_takes_its_arguments,
    stochastic_rounding_has_something_to_round,
    lean_state_needs_fsdp_2,
    blocks_have_no_whole_form,
)
