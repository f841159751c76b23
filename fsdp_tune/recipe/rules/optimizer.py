"""Arguments of optimizers, and where each optimizer works. Part of `rules.RULES`."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_tune.recipe.findings import Finding, Rule
from fsdp_tune.recipe.scalars import shown
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.recipe.schema.keys import closest
from fsdp_tune.recipe.schema.optimizers import OPTIMIZERS, STATE_DTYPE, STOCHASTIC, TRUE_WORDS, optimizer_name, pairs_of, state_bits

_KEY = "training.optim_args"
_KEYS_OF_ALL = {"weight_decay": "training.weight_decay", "lr": "training.learning_rate"}
_KEYS_OF_ADAMW = {
    "betas": "training.adam_beta1` and `training.adam_beta2",
    "beta1": "training.adam_beta1",
    "beta2": "training.adam_beta2",
    "eps": "training.adam_epsilon",
}
"""Arguments of torch's classes that have a key here. In `optim_args` they would have no effect: each parameter group has its own value."""


def optimizer_arguments_exist(recipe: Recipe) -> Iterator[Finding]:
    """Refuse unknown arguments, which transformers would ignore."""
    name = optimizer_name(recipe.training)
    if name not in OPTIMIZERS:
        return  # `training.optim` itself is refused
    arguments = OPTIMIZERS[name].arguments
    for word, value in pairs_of(recipe.training):
        if word not in arguments:
            near, key = closest(word, list(arguments)), _key_of(name, word)
            hint = f"did you mean `{near}`?" if near else f"it takes {', '.join(arguments) or 'nothing'}"
            hint = f"write `{key}`" if key else hint
            yield Finding("wrong-value", (_KEY,), f"`{_KEY}` has `{shown(word)}`, which `training.optim: {name}` does not take", hint)
            continue
        try:
            arguments[word].read(value or "")
        except ValueError:
            given = "has no value" if value is None else f"is `{shown(value)}`"
            yield Finding("wrong-value", (_KEY,), f"`{_KEY}`: `{word}` {given}; it takes {arguments[word].description}", f'"{word}=…"')


def _key_of(optimizer: str, argument: str) -> str | None:
    """Return the key of the recipe that sets an argument of torch's class."""
    keys = _KEYS_OF_ALL | (_KEYS_OF_ADAMW if optimizer.startswith("adamw") or optimizer == "muon" else {})
    return keys.get(argument)


def _given(recipe: Recipe) -> dict[str, str]:
    """Return the arguments as text, of any optimizer, valid or not."""
    return {word: value or "" for word, value in pairs_of(recipe.training)}


def rounds_stochastically(recipe: Recipe) -> bool:
    """Return whether bf16 weights keep, on average, updates that are smaller than their last bit."""
    return _given(recipe).get(STOCHASTIC, "false").lower() in TRUE_WORDS


def optimizer_limits(recipe: Recipe) -> Iterator[Finding]:
    name, in_blocks = optimizer_name(recipe.training), state_bits(recipe.training) is not None
    if rounds_stochastically(recipe) and recipe.model.dtype != "bf16":
        message = f"`{STOCHASTIC}=true` rounds parameters that are stored in bf16, and `model.dtype` is {recipe.model.dtype}"
        yield Finding("contradiction", (_KEY, "model.dtype"), message, "write `model.dtype: bf16`, or leave it out")
    lean = [word for word in (STATE_DTYPE, STOCHASTIC) if word in _given(recipe)]
    if recipe.fsdp.version == 1 and recipe.is_sharded and (in_blocks or lean):
        # The flat parameters of FSDP1 do not keep the offsets of tensors, and its checkpoints of state support no blocks.
        key, what = ("training.optim", f"`training.optim: {name}`") if in_blocks else (_KEY, f"`{lean[0]}`")
        message = f"{what} needs FSDP2, and the recipe sets `fsdp.version: 1`"
        yield Finding("contradiction", (key, "fsdp.version"), message, "use `fsdp.version: 2`")
    if recipe.fsdp.version == 1 and recipe.is_sharded and name in OPTIMIZERS and OPTIMIZERS[name].needs_shapes:
        message = f"`training.optim: {name}` needs FSDP2: `fsdp.version: 1` joins the parameters of a unit in one flat tensor without rows"
        yield Finding("contradiction", ("training.optim", "fsdp.version"), message, "use `fsdp.version: 2`")
    if name == "muon" and recipe.lora is not None and recipe.lora.target_parameters:
        message = (
            "`training.optim: muon` with `lora.target_parameters` is not supported: PEFT keeps the factors of all experts in one matrix"
        )
        yield Finding("contradiction", ("training.optim", "lora.target_parameters"), message, "use `optim: adamw_torch_fused`")
    if in_blocks and recipe.fsdp.state_dict_type == "FULL_STATE_DICT":
        message = (
            f"`training.optim: {name}` keeps blocks with a scale each, and `fsdp.state_dict_type: FULL_STATE_DICT` writes plain tensors"
        )
        yield Finding("contradiction", ("training.optim", "fsdp.state_dict_type"), message, "use SHARDED_STATE_DICT")
    if in_blocks and rounds_stochastically(recipe) and (recipe.is_hybrid or not recipe.is_sharded):
        message = (
            f"`{STOCHASTIC}=true` under `training.optim: {name}` draws independently on each rank, and the replicas of "
            f"`fsdp.sharding_strategy: {recipe.fsdp.sharding_strategy}` would drift apart"
        )
        hint = "use FULL_SHARD or SHARD_GRAD_OP, or `optim: adamw_torch_fused`, which draws the same on all ranks"
        yield Finding("contradiction", (_KEY, "fsdp.sharding_strategy"), message, hint)


def parameter_groups_change_something(recipe: Recipe) -> Iterator[Finding]:
    key = "training.parameter_groups"
    for index, group in enumerate(recipe.training.parameter_groups):
        if not group.match:
            yield Finding("wrong-value", (key,), f"`{key}[{index}].match` is empty", 'write patterns of names, such as `["*.layers.0.*"]`')
        if group.learning_rate is None and group.weight_decay is None:
            message = f"`{key}[{index}]` sets neither `learning_rate` nor `weight_decay`"
            yield Finding("missing-key", (key,), message, "set one of them, or leave the entry out")


OPTIMIZER_RULES: tuple[Rule, ...] = (optimizer_arguments_exist, optimizer_limits, parameter_groups_change_something)
