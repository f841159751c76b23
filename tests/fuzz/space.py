"""The space of drawn recipes: every key that can change a run's numbers, or the reason why it is excluded.

The keys, what each affects and whether a resumed run may change it come from the schema; the values of
switches come from its types. Only numbers need a domain of their own here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args, get_origin

from fsdp_tune.recipe.schema.key_effects import RESULT, OnResume
from fsdp_tune.recipe.schema.keys import all_keys, effect_of
from fsdp_tune.recipe.schema.training_fields import PASSED_EFFECTS
from tests.fuzz.families import EXPERTS, FAMILIES, HAS_EAGER_ALONE, LAYERS, TAKES_FLASH
from tests.model.flash import FLASH_STAND_IN

STEPS, SAVED_STEP = 6, 3

_BATCH = "the batch of a step is drawn as a whole: rows, ranks, micro-batches (`Draw.batch`)"
_DATA = (
    "rows are drawn as prepared data (`tests.fuzz.trial.make_rows`); what prepares them has tests of its own"
)
_ELSEWHERE = "no run of CPU ranks has it; the rules and `tests/gpu` hold it"
_EMPTY = "a mapping or a section; its keys are drawn"
NOT_DRAWN: dict[str, str] = {
    **dict.fromkeys(
        (
            "model",
            "model.tokens",
            "data",
            "data.mixture",
            "fsdp",
            "precision",
            "parallelism",
            "training",
            "kernels",
        ),
        _EMPTY,
    ),
    **dict.fromkeys(("checkpoint", "launch", "merge", "training.early_stopping"), _EMPTY),
    **dict.fromkeys(
        ("model.name_or_path", "model.from_config", "model.revision"), "the family is drawn (`Draw.family`)"
    ),
    **dict.fromkeys(
        ("model.tokenizer", "model.tokenizer_revision", "model.trust_remote_code"), "rows are drawn as ids"
    ),
    "model.resize_embeddings": "rows are drawn as ids within the vocabulary; tests/parity has rows of "
    "grown embeddings",
    "model.config_overrides": "drawn as fields of the config that both load (`Draw.overrides`)",
    "model.rope_scaling": "changes frequencies before ranks matter; tests/parity has a row",
    "model.frozen_dtype": "follows from the compute dtype, which is drawn",
    **dict.fromkeys(("data.max_length", "data.packing", "training.seed", "training.data_seed"), _BATCH),
    **dict.fromkeys(
        (
            "training.global_batch_size",
            "training.per_device_train_batch_size",
            "training.per_device_train_batch_tokens",
            "training.gradient_accumulation_steps",
            "launch.num_processes",
        ),
        _BATCH,
    ),
    **dict.fromkeys(
        ("parallelism.dp_replicate_size", "parallelism.dp_shard_size"),
        "follow from the strategy and the ranks",
    ),
    **dict.fromkeys(("parallelism.tp_size", "parallelism.cp_size"), "refused above 1"),
    "parallelism.sp_size": "it has parity rows of its own (test_shared_rows)",
    **dict.fromkeys(
        ("fsdp.transformer_layer_cls_to_wrap", "fsdp.min_num_params", "fsdp.modules_to_wrap"),
        "follow from the wrap policy",
    ),
    "fsdp.ignored_modules": "refused for trained modules; tests/parity has a row",
    "fsdp.reshard_after_forward": "agrees with the strategy, which is drawn",
    "precision.fp8_recipe": "fp8 has parity rows of its own, against its emulation",
    "evaluation": "scores saved checkpoints in a process of its own; "
    "tests/cli/test_train_evaluation.py has it",
    "kernels.experts": "kernels of one function, which round differently; tests/model/test_expert_kernels.py "
    "compares them",
    **dict.fromkeys(
        ("lora", "quantization"), "need files of a base; tests/parity/test_adapters.py has rows of them"
    ),
    **dict.fromkeys(
        ("extensions", "extensions.callbacks", "extensions.metrics"),
        "run code of other packages; tests/recipe/test_extensions.py has them",
    ),
    **dict.fromkeys(
        ("training.max_steps", "training.num_train_epochs"),
        "every run has `STEPS` steps over more than one epoch",
    ),
    **dict.fromkeys(
        ("training.early_stopping.patience", "training.early_stopping.threshold"),
        "ends a run; tests/worker has it",
    ),
    "training.neftune_noise_alpha": "random noise, which one device draws otherwise; "
    "tests/cli/test_train_lora.py trains with it",
    **dict.fromkeys(
        ("training.optim_args", "training.optim_target_modules"),
        "lean state has parity rows of its own (test_lean_state)",
    ),
    "fsdp.ep_size": "experts that ranks divide; tests/parity/test_expert_parallel.py has rows",
    "kernels.mlp_slice_tokens": "dense MLPs alone; tests/parity has rows",
    "training.parameter_groups": "it has parity rows of its own (test_optimizers)",
    "training.lr_scheduler_kwargs": "of schedules that are not drawn",
    **dict.fromkeys(("training.debug", "training.full_determinism", "training.tf32"), _ELSEWHERE),
    **dict.fromkeys(
        ("launch.num_machines", "launch.device", "launch.num_cpu_threads_per_process"), _ELSEWHERE
    ),
    **dict.fromkeys(("launch.enable_cpu_affinity", "launch.env"), _ELSEWHERE),
}
"""Keys that affect data, memory, time or numbers and are not drawn by themselves, each with the reason.
`data.train.*` and the like: see `reason_not_drawn`."""
_VALUES_NOT_DRAWN: dict[str, dict[Any, str]] = {
    "precision.mixed_precision": {
        "fp16": "its first steps are skipped until the scale fits; parity has rows",
        "fp8": "parity has rows",
    },
    "precision.reduce_dtype": dict.fromkeys(
        ("bf16", "fp16"), "sums over ranks are rounded, which one device does not have"
    ),
    "fsdp.activation_checkpointing": {"auto": "decided from the plan before a run"},
    "kernels.loss": {"liger": _ELSEWHERE},
    "training.eval_strategy": {
        "auto": "the reference evaluates at the last step",
        "no": "as auto",
        "epoch": "as auto",
    },
}
_DOMAINS: dict[str, tuple[Any, ...]] = {
    "model.attn_implementation": ("auto", "sdpa", "eager", FLASH_STAND_IN, FLASH_STAND_IN),
    "model.freeze": ([], [], ["*.0.*"], ["*.1.*weight"]),
    "fsdp.activation_checkpointing_every": (1, 2),
    "fsdp.forward_prefetch": (False, True, 2),
    "fsdp.backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", 2),
    "training.learning_rate": (1e-2, 1e-3),
    "training.warmup_steps": (0, 2, 0.5),
    "training.adam_beta1": (0.9, 0.5),
    "training.adam_beta2": (0.999, 0.9),
    "training.adam_epsilon": (1e-5, 1e-3),
    "training.weight_decay": (0.0, 0.1),
    "training.max_grad_norm": (1.0, 0.05, 0),
    "training.label_smoothing_factor": (0.0, 0.0, 0.1),
    "training.lr_scheduler_type": ("cosine", "linear", "constant_with_warmup"),
    "training.optim": ("adamw_torch_fused", "adamw_torch_fused", "adamw_torch", "sgd", "adagrad", "rmsprop"),
    "training.per_device_eval_batch_size": (None, 1, 3),
    "training.dataloader_num_workers": (0, 0, 0, 1),
    "training.dataloader_prefetch_factor": (None,),
    "kernels.liger": (False,),
    "data.pad_to_multiple_of": (1, 8, 13),
    "model.dtype": ("fp32", "fp32", "fp32", "bf16"),
}


def reason_not_drawn(name: str) -> str | None:
    """Why a key is not drawn; None for one that is."""
    drawn_of_data = ("data.shuffle", "data.pad_to_multiple_of")
    if name.startswith("model.rope_scaling"):
        return NOT_DRAWN["model.rope_scaling"]
    if name.startswith("training.parameter_groups"):
        return NOT_DRAWN["training.parameter_groups"]
    if name.startswith(("data.", "model.tokens.")) and name not in drawn_of_data and name not in NOT_DRAWN:
        return _DATA
    if name.startswith("evaluation."):
        return NOT_DRAWN["evaluation"]
    return NOT_DRAWN["lora"] if name.startswith(("lora.", "quantization.")) else NOT_DRAWN.get(name)


def keys() -> Iterator[str]:
    """Every key that affects data, memory, time or numbers: of the schema, and those that `training:` passes
    on."""
    names = [key.name for key in all_keys()] + [f"training.{name}" for name in PASSED_EFFECTS]
    return (name for name in dict.fromkeys(names) if effect_of(name).affects & ~RESULT)


def values_of(name: str) -> tuple[Any, ...]:
    """The values that are drawn for a key: its domain, or those of its type in the schema."""
    if name in _DOMAINS:
        return _DOMAINS[name]
    annotation = next(key.field.annotation for key in all_keys() if key.name == name)
    found = _of_type(annotation)
    assert found, f"{name} ({annotation}) needs a domain, or a reason why it is not drawn"
    return tuple(value for value in found if value not in _VALUES_NOT_DRAWN.get(name, {}))


def _of_type(annotation: Any) -> tuple[Any, ...]:
    if annotation is bool:
        return (False, True)
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(value for inner in get_args(annotation) for value in _of_type(inner))


def drawn_keys() -> list[str]:
    return [name for name in keys() if reason_not_drawn(name) is None]


@dataclass(frozen=True)
class Draw:
    """One trial. `switches` maps dotted keys to values, defaults left out."""

    seed: int
    family: str
    ranks: int
    batch: dict[str, Any] = field(hash=False)
    switches: dict[str, Any] = field(hash=False)
    overrides: dict[str, Any] = field(default_factory=dict, hash=False)
    """Fields of the model's config, in the directory that the run and the plain loop load."""
    bad_step: int | None = None
    """A step whose gradient is made NaN, under `on_nonfinite: skip`."""
    resumed: Draw | None = None
    """How the run continues after it was killed: other ranks, and other values of every key that may change
    freely."""
    killed_after: int = STEPS

    def without(self, name: str) -> Draw:
        """The same with one switch back at its default, in the resumed part too."""
        kept = {key: value for key, value in self.switches.items() if key != name}
        return replace(self, switches=kept, resumed=self.resumed and self.resumed.without(name))

    def unpacked(self) -> Draw:
        batch = {**self.batch, "data.packing": False}
        return replace(self, batch=batch, resumed=self.resumed and self.resumed.unpacked())

    def recipe(self) -> dict[str, Any]:
        """The keys that are set, nested as in YAML."""
        tree: dict[str, Any] = {}
        skipping = {"training.on_nonfinite": "skip"} if self.bad_step is not None else {}
        for name, value in {
            **self.switches,
            **skipping,
            **self.batch,
            "launch.num_processes": self.ranks,
        }.items():
            *sections, last = name.split(".")
            inner = tree
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[last] = value
        return tree

    def __str__(self) -> str:
        parts = [
            f"{self.family}, {self.ranks} ranks",
            *(f"{key}={value}" for key, value in {**self.batch, **self.switches}.items()),
        ]
        parts += [f"config {self.overrides}"] if self.overrides else []
        parts += [f"NaN at step {self.bad_step}"] if self.bad_step else []
        parts += (
            [f"killed after step {self.killed_after}, resumed from step {SAVED_STEP} as ({self.resumed})"]
            if self.resumed
            else []
        )
        return ", ".join(parts)


def draw(seed: int) -> Draw:
    """A trial from a seed. About half of the switches stay at their defaults, so that pairs of the others
    show."""
    dice = random.Random(seed)
    family = dice.choice(sorted(FAMILIES))
    micro_batches_many = dice.random() < 0.15
    packed = dice.random() < 0.4
    compiles = seed % 12 == 0  # tracing takes ten times as long as the rest of a trial
    switches = _switches(dice, family, drawn_keys(), compiles=compiles)
    if family in EXPERTS:  # routing flips by rounding, which no tolerance tells from a bug
        switches.pop("model.dtype", None)
        switches["precision.mixed_precision"] = "no"
    overrides = {"output_router_logits": True} if family in EXPERTS and dice.random() < 0.6 else {}
    if str(switches.get("training.optim", "adamw")).startswith("adamw"):
        switches.setdefault("training.adam_epsilon", 1e-4)
    else:  # a recipe refuses what its optimizer does not read
        switches = {name: value for name, value in switches.items() if not name.startswith("training.adam_")}
    if switches.get("training.lr_scheduler_type") == "constant":
        switches.pop("training.warmup_steps", None)
    # their first steps are signs, which amplify rounding
    if switches.get("training.optim") in (
        "adagrad",
        "rmsprop",
    ):
        switches["training.learning_rate"] = 1e-3
    bad_step = dice.randint(2, SAVED_STEP) if dice.random() < 0.25 else None
    first = Draw(
        seed, family, *_layout(dice, packed=packed, many=micro_batches_many), switches, overrides, bad_step
    )
    first.batch["training.seed"] = dice.randrange(1000)
    if dice.random() < 0.5:
        return first
    free = [name for name in drawn_keys() if effect_of(name).on_resume is OnResume.FREE]
    kept = {name: value for name, value in switches.items() if name not in free}
    ranks, batch = _layout(dice, packed=packed, many=micro_batches_many)
    same = {name: first.batch[name] for name in ("training.seed",)}
    switches = kept | _switches(dice, family, free, compiles=compiles)
    second = Draw(seed, family, ranks, batch | same, switches, overrides)
    return replace(first, resumed=second, killed_after=dice.randint(SAVED_STEP, STEPS - 1))


def _switches(dice: random.Random, family: str, names: list[str], *, compiles: bool) -> dict[str, Any]:
    chosen = {name: dice.choice(values_of(name)) for name in names if dice.random() < 0.5}
    if not compiles:
        chosen.pop("kernels.compile", None)
    if family in HAS_EAGER_ALONE:
        chosen["model.attn_implementation"] = "eager"
    if family == "opt":  # its forward calls the decoder inside its body, so that the loss cannot be chunked
        chosen.pop("kernels.loss", None)
    if chosen.get("model.attn_implementation") == FLASH_STAND_IN and family not in TAKES_FLASH:
        del chosen["model.attn_implementation"]
    if chosen.get("fsdp.auto_wrap_policy") == "MODULE_NAMES_WRAP":
        chosen["fsdp.modules_to_wrap"] = [LAYERS.get(family, "model.layers.*")]
    return chosen


def _layout(dice: random.Random, *, packed: bool, many: bool) -> tuple[int, dict[str, Any]]:
    """Ranks and how the global batch, the same for all of a trial, is cut into micro-batches."""
    ranks = dice.choice((1, 2, 2, 4))
    size = 64 if many else 8
    micro = 1 if many else dice.choice([each for each in (1, 2, 4, 8) if each * ranks <= size])
    batch = {
        "data.packing": packed,
        "training.per_device_train_batch_size": micro,
        "training.gradient_accumulation_steps": size // ranks // micro,
    }
    return ranks, batch
