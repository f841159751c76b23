"""Keys of axolotl that mean something of their own. The others are synonyms, or have the same meaning in
every tool."""

from __future__ import annotations

import re
from typing import Any

from fsdp_tune.core.units import enumerated
from fsdp_tune.core.values import as_list, is_mapping
from fsdp_tune.migrate.general import DFT, by_name, chat_template
from fsdp_tune.migrate.ledger import Ledger, LedgerView
from fsdp_tune.migrate.rules import (
    TRAIN,
    UNSUPPORTED_SWITCH,
    Also,
    FileKey,
    Inside,
    Outcome,
    Rules,
    each,
    fine_or,
    implies,
    is_on,
    off_or,
    outcome_of,
    same,
    steps,
)
from fsdp_tune.migrate.tool import Tool
from fsdp_tune.migrate.tools.axolotl_datasets import datasets, pretraining
from fsdp_tune.migrate.tools.emulated_quantisation import AXOLOTL_QAT
from fsdp_tune.migrate.tools.experts import expert_ranks, experts_kernel
from fsdp_tune.migrate.tools.long_rows import DROPPED
from fsdp_tune.recipe.key_paths import KeyPath
from fsdp_tune.recipe.outcome import Ask, Drop, Fate, Weight, Write
from fsdp_tune.recipe.read.tool_detection import AXOLOTL
from fsdp_tune.recipe.synonyms import SYNONYMS


def _share_of_epoch(key: FileKey) -> Outcome:
    """So many events in an epoch are, over all epochs, a share of all steps."""
    synonym, count = SYNONYMS[key.name], key.value
    target, strategy = synonym.key, synonym.key.replace("_steps", "_strategy")
    epochs = key.ledger.decided(("training", "num_train_epochs"), key.of_file("num_epochs"))
    is_number = (
        isinstance(count, int | float)
        and not isinstance(count, bool)
        and isinstance(epochs, int | float)
        and epochs > 0
    )
    if not is_number or isinstance(synonym.outcome(count), Write):
        return by_name(key)
    if count * epochs <= 1:
        reason = f"{count} × {epochs:g} epochs: at the end of each, as axolotl's own default"
        return Write({strategy: "epoch"}, reason, Fate.COMPUTED)
    share = round(1 / (count * epochs), 6)
    return Write(
        {target: share, strategy: "steps"},
        f"1 / ({count} × {epochs:g} epochs), a share of all steps",
        Fate.COMPUTED,
    )


def _targets(key: FileKey) -> Outcome:
    if is_on(key.of_file("lora_target_linear")):
        return Drop("`lora_target_linear` adapts all linear layers")
    return SYNONYMS["lora_target_modules"].outcome(key.value)


def _special_tokens(key: FileKey) -> Outcome:
    keys = {
        "pad_token": "model.tokens.pad",
        "eos_token": "model.tokens.eos",
        "additional_special_tokens": "model.tokens.add",
    }
    if not key.mapping:
        return Ask("write `model: {tokens: {pad: …, eos: …}}`", "model.tokens")
    return Inside({name: same(keys[name]) if name in keys else _own_token for name in key.mapping})


def _own_token(key: FileKey) -> Outcome:
    return Ask(f"the tokenizer's `{key.name}` is used; change it in the tokenizer's files", "model.tokens")


def _tokens(key: FileKey) -> Outcome:
    """A list of new ones, or an older spelling of `special_tokens`."""
    return _special_tokens(key) if isinstance(key.value, dict) else Write({"model.tokens.add": key.value})


_PLUGINS = {"LigerPlugin": ("kernels.liger", True), "CutCrossEntropyPlugin": ("kernels.loss", "chunked")}

_EXPERTS_PLUGIN = "ExpertParallelPlugin"
_DISPATCH = (
    "backend",
    "num_nvl_bytes",
    "num_rdma_bytes",
    "fallback_on_unsupported",
    "save_dispatch",
    "dispatch_chunks",
)


def _plugins(key: FileKey) -> Outcome:
    """Plugins whose work is a key here; the others have no counterpart."""
    names = [str(name).rpartition(".")[2] for name in key.items]
    if others := [name for name in names if name not in (*_PLUGINS, _EXPERTS_PLUGIN)]:
        return Ask(f"plugins are not run here: {', '.join(others)}", "extensions")
    written = dict(keys for name, keys in _PLUGINS.items() if name in names)
    return Write(written, weight=Weight.IMPLIED) if written else Drop("what it does is set by its own keys")


def _recompute(key: FileKey) -> Outcome:
    """true, false, or the place of what is kept: `offload` keeps the inputs of layers in host memory."""
    if isinstance(key.value, str) and key.value.lower() not in ("true", "false"):
        return Write({"fsdp.activation_checkpointing": "full", "fsdp.activation_checkpointing_offload": True})
    return by_name(key)


def _schedule(key: FileKey) -> Outcome:
    """`cosine` with `cosine_min_lr_ratio` is a schedule of its own in transformers."""
    has_floor = key.value == "cosine" and key.of_file("cosine_min_lr_ratio") is not None
    return Write({"training.lr_scheduler_type": "cosine_with_min_lr" if has_floor else key.value})


def _least_rate(key: FileKey) -> Outcome:
    if key.of_file("lr_scheduler") in (None, "cosine"):  # its default
        kwargs = {"min_lr_rate": key.value}
        return Write(
            {"training.lr_scheduler_kwargs": kwargs, "training.lr_scheduler_type": "cosine_with_min_lr"}
        )
    words = "it is `lr_scheduler_kwargs: {min_lr_rate: …}` of the schedule `cosine_with_min_lr`"
    return Ask(words, "training.lr_scheduler_type")


def _chat_template(key: FileKey) -> Outcome:
    """axolotl renders rows of the type `chat_template` by it."""
    named = {_kind(entry) for entry in _entries(key.ledger).values()}
    if named and named <= _WITHOUT_TEMPLATE:
        return Drop(f"it is not used for rows of {enumerated(sorted(named), 'and')}")
    return chat_template(key)


def _kind(entry: dict[str, object]) -> str:
    """Return the type of a data set without its variant."""
    return re.split("[.:]", str(entry.get("type", "")))[0]


def _entries(ledger: LedgerView) -> dict[KeyPath, dict[str, object]]:
    """Return the data sets by the places of their sources."""
    return {
        (*place, index): entry
        for name, place in (("datasets", TRAIN), ("test_datasets", ("data", "eval")))
        for index, entry in enumerate(as_list(ledger.value(name)))
        if is_mapping(entry)
    }


_WITHOUT_TEMPLATE = frozenset({"alpaca", "completion", "input_output"})


def _adapter(key: FileKey) -> Outcome:
    """The rank is a key of its own."""
    if key.value not in ("lora", "qlora"):
        return by_name(key)
    return Write({"lora": {}, **({"quantization.load": "nf4"} if key.value == "qlora" else {})})


def _batch(key: FileKey) -> Outcome:
    """Sequences of one device for a step. axolotl 0.19 does not read it, since its accumulation is 1 by
    default."""
    if key.value == (key.of_file("micro_batch_size") or 1) * (
        key.of_file("gradient_accumulation_steps") or 1
    ):
        return Drop("it is micro-batch × accumulation")
    words = (
        "axolotl 0.19 takes micro-batch × accumulation, older ones divided it by the micro-batch: write "
        "the sum over all devices"
    )
    return Ask(words, "training.global_batch_size")


def _bf16(key: FileKey) -> Outcome:
    """axolotl loads the weights in bf16 too, and trains them so. Beside an adapter, frozen matrices are
    stored in it here too."""
    is_half = str(key.value).lower() in ("true", "auto", "full")
    loaded = Also("model.dtype", "bf16", f"{key.name}: axolotl loads the weights in it")
    return [*steps(by_name(key)), *([loaded] if is_half else [])]


def _warmup(key: FileKey) -> Outcome:
    """axolotl warms up for two steps where one is written."""
    if type(key.value) is int and key.value == 1:
        return Write({"training.warmup_steps": 2}, "axolotl makes two steps of one", Fate.COMPUTED)
    return by_name(key)


def _excess(key: FileKey) -> Outcome:
    names = {"drop": "drop", "truncate": "truncate", "raise": "error"}
    if (name := names.get(str(key.value).lower())) is None:
        return Ask("longer rows: `data: {overlong: drop}`, `truncate` or `error`", "data.overlong")
    return Write({"data.overlong": name})


def settle_defaults(ledger: Ledger, defaults: dict[str, Any], *, is_loaded_in_half: bool) -> None:
    """Change the defaults that other keys decide. Without a key about it, the weights are bf16, as with
    `bf16: auto`."""
    if is_loaded_in_half and not any(
        name in ledger.values for name in ("bf16", "bfloat16", "fp16", "float16", "float32")
    ):
        defaults["model.dtype"] = "bf16"
    if (ledger.get("training", "max_steps") or 0) * defaults["training.warmup_steps"] > _MOST_WARMUP:
        defaults["training.warmup_steps"] = _MOST_WARMUP
    _settle_long_rows(ledger, defaults)


_MOST_WARMUP = 100
"""Steps of axolotl's default, a share, where the number of all steps is known."""


def _settle_long_rows(ledger: Ledger, defaults: dict[str, object]) -> None:
    """axolotl cuts texts into pieces of `sequence_len` before its strategy for longer rows, the default of
    which is to drop them.

    `defaults`: those that are written after this.
    """
    paths = {
        target[:3]
        for target in ledger.settings
        if target[:2] in (TRAIN, ("data", "eval")) and target[3:] == ("path",)
    }
    texts = {place for place in paths if ledger.get(*place, "format") == "text"}
    if not texts or ledger.value("pretraining_dataset") is not None or ledger.is_answered(_OVERLONG):
        return
    default = defaults.pop("data.overlong", "drop")
    given = ledger.settings.get(_OVERLONG)
    strategy = default if given is None else given.value
    if texts == paths or strategy == "truncate":
        ledger.discard(_OVERLONG, "texts are cut into pieces of `sequence_len`, as here")
        return
    words = (
        f"axolotl cuts texts into pieces, and longer rows of other types follow `{strategy}`; here all "
        "are cut, or all follow it"
    )
    if given is None:
        ledger.decide(_OVERLONG, words)
    else:
        ledger.withdraw(_OVERLONG, words)


def _in_order(ledger: LedgerView) -> bool:
    return is_on(ledger.value("curriculum_sampling") or False)


def _curriculum(key: FileKey) -> Outcome:
    """The sequential sampler, also below packing. Several data sets are shuffled once when they are merged,
    unless a key says otherwise."""
    several = len(as_list(key.of_file("datasets"))) > 1
    merged = key.of_file("shuffle_merged_datasets")
    if not is_on(key.value):
        return Drop("off: rows are shuffled in each epoch, as here")
    if several and (
        merged is None or is_on(merged) or is_on(key.of_file("shuffle_before_merging_datasets") or False)
    ):
        words = (
            "axolotl shuffles the rows once and keeps that order: shuffle the files and write `data: "
            "{shuffle: false}`, or leave it out"
        )
        return Ask(words, "data.shuffle")
    return Write({"data.shuffle": False})


def _merged(key: FileKey) -> Outcome:
    """Rows are shuffled once when data sets are merged, and again in each epoch. A stream has its buffer
    alone."""
    if key.of_file("pretraining_dataset") is not None or is_on(key.of_file("streaming") or False):
        return Write({"data.shuffle": key.value})
    if _in_order(key.ledger):
        return Drop("the order of the rows is that of `curriculum_sampling`")
    return Drop("rows are shuffled in each epoch, there as here")


_OVERLONG: KeyPath = ("data", "overlong")
_PATTERNS = "write the parameters that are not trained: `model: {freeze: [PATTERN]}`"
_GROUPS = (
    "parameters with a rate of their own: `training: {parameter_groups: [{match: [PATTERN], "
    "learning_rate: …}]}`"
)
_BY_THE_MODEL = "classes follow from the files of model and tokenizer"
_OTHER_KERNELS = "a kernel of axolotl; kernels are chosen in `kernels:` and by `model.attn_implementation`"


_DFT_SWITCHES = ("use_dft", "use_dynamic_finetuning", "liger_use_token_scaling")


def _fused_loss(key: FileKey) -> Outcome:
    if is_on(key.value) and any(is_on(key.of_file(name)) for name in _DFT_SWITCHES):
        return Write(
            {"kernels.loss": "chunked"}, "Liger's kernel weights no tokens here; this holds no logits either"
        )
    return outcome_of(implies({"kernels.loss": "liger"}), key)


_LIGER = implies(
    {"kernels.liger": True}, off="Liger's kernels are one switch: `kernels.liger`", weight=Weight.IMPLIED
)
RULES: Rules = {
    "datasets": datasets(TRAIN),
    "test_datasets": datasets(("data", "eval")),
    "pretraining_dataset": pretraining,
    **each(("chat_template", "chat_template_jinja"), _chat_template),
    "lr_scheduler": _schedule,
    **each(("bf16", "bfloat16"), _bf16),
    "warmup_steps": _warmup,
    "torch_dtype": Drop("axolotl takes it from `bf16` and `fp16`"),
    "excess_length_strategy": _excess,
    "adapter": _adapter,
    **each(("evals_per_epoch", "saves_per_epoch"), _share_of_epoch),
    "special_tokens": _special_tokens,
    "tokens": _tokens,
    "lora_target_modules": _targets,
    "plugins": _plugins,
    **each(
        (
            "liger_rope",
            "liger_rms_norm",
            "liger_layer_norm",
            "liger_glu_activation",
            "liger_swiglu",
            "liger_rms_norm_gated",
        ),
        _LIGER,
    ),
    "liger_fused_linear_cross_entropy": _fused_loss,
    **each(_DFT_SWITCHES, implies({"training.loss": "dft"}, DFT)),
    "cut_cross_entropy": implies({"kernels.loss": "chunked"}, "the logits are not held"),
    "gradient_checkpointing": _recompute,
    "activation_offloading": implies({"fsdp.activation_checkpointing_offload": True}),
    "cosine_min_lr_ratio": _least_rate,
    "wandb_project": lambda key: Write(  # naming a project switches the tracker on
        {("launch", "env", "WANDB_PROJECT"): str(key.value), ("training", "report_to"): ["wandb"]}
    ),
    "use_wandb": implies({"training.report_to": ["wandb"]}),
    "use_tensorboard": implies({"training.report_to": ["tensorboard"]}),
    **each(("wandb_watch", "wandb_log_model"), Drop("the tracker's callback has the losses alone")),
    "hub_model_id": lambda key: Write(
        {"training.hub_model_id": key.value, "training.push_to_hub": True}, "naming it switches the upload on"
    ),
    "batch_size": _batch,
    "eval_batch_size": same("training.per_device_eval_batch_size"),
    "tokenizer_config": same("model.tokenizer"),
    **each(
        ("model_type", "tokenizer_type", "tokenizer_use_fast", "tokenizer_legacy", "is_llama_derived_model"),
        Drop(_BY_THE_MODEL),
    ),
    "processor_type": off_or(
        "off", "models with images or sound are not trained here; a text model in the same files may be"
    ),
    "pad_to_sequence_len": Drop("rows are padded to the longest of a batch; packed rows are full"),
    **each(
        ("loss_watchdog_threshold", "loss_watchdog_patience"),
        Drop("a spike of the loss is an event of metrics.jsonl; NaN stops the run"),
    ),
    **each(
        ("strict", "debug", "skip_prepare_dataset", "experimental_skip_move_to_device"),
        Drop("a matter of axolotl's own code"),
    ),
    **each(("shuffle_merged_datasets", "shuffle_before_merging_datasets"), _merged),
    "curriculum_sampling": _curriculum,
    "pretrain_multipack_attn": Drop("examples in one row never see each other"),
    **each(
        (
            "lora_mlp_kernel",
            "lora_qkv_kernel",
            "lora_o_kernel",
            "flash_attn_cross_entropy",
            "flash_attn_rms_norm",
        ),
        Drop(_OTHER_KERNELS),
    ),
    **each(
        ("flash_attn_fuse_mlp", "flash_attn_fuse_qkv", "torchdistx_path", "gptq", "use_kernels"),
        off_or("off", _OTHER_KERNELS),
    ),
    "eager_attention": implies({"model.attn_implementation": "eager"}),
    "flex_attention": implies({"model.attn_implementation": "flex_attention"}),
    "eot_tokens": Drop("the end of each trained turn is trained, as the chat template renders it"),
    "unfrozen_parameters": Ask(_PATTERNS, "model.freeze"),
    **each(
        ("embedding_lr", "embedding_lr_scale", "lr_groups", "loraplus_lr_embedding"), Ask(_GROUPS, "training")
    ),
    "adam_eps": same("training.adam_epsilon"),
    "auto_resume_from_checkpoints": Drop("it is `train --resume auto`"),
    **each(("sequence_parallel_degree", "context_parallel_size"), same("parallelism.sp_size")),
    "experts_implementation": experts_kernel,
    "expert_parallel_size": expert_ranks,
    "expert_parallel_token_capacity": fine_or(
        (None,), "no token is dropped, as here", "no token is dropped here", "fsdp.ep_size"
    ),
    **each(
        [f"expert_parallel_{name}" for name in _DISPATCH], Drop("tokens are exchanged by `all_to_all_single`")
    ),
    "tensor_parallel_size": same("parallelism.tp_size"),
    "fsdp_version": same("fsdp.version"),
    "dataset_exact_deduplication": same("data.drop_duplicates"),
    "qat": AXOLOTL_QAT,
    "resize_token_embeddings_to_32x": off_or(
        "off", "the embedding grows to the tokenizer alone: `model: {resize_embeddings: true}`"
    ),
    **each(("use_ray", "s2_attention", "xformers_attention", "relora", "lisa_n_layers"), UNSUPPORTED_SWITCH),
}
"""By name; see `settle_keys.settle_key`."""
TOOL = Tool(
    AXOLOTL,
    RULES,
    defaults={
        "training.num_train_epochs": 1,
        "training.lr_scheduler_type": "cosine",
        "training.warmup_steps": 0.03,
        "data.max_length": 512,
    },
    adapter_switches=("adapter",),
    upcasts=True,
    long_rows=DROPPED,  # but of texts, which it cuts
    null_is_default=True,
    other_training={
        "rl": "preference tuning",
        "reward_model": "reward models",
        "diffusion": "diffusion models",
    },
)
