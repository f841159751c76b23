"""Keys of axolotl that mean something of their own. The others are synonyms, or have the same meaning in every tool."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any, cast

from fsdp_tune.core.units import enumerated
from fsdp_tune.migrate.general import (
    DFT,
    TRAIN,
    UNSUPPORTED_SWITCH,
    Rule,
    Rules,
    SourceRule,
    by_synonym,
    chat_template,
    implies,
    is_on,
    leave,
    leave_here,
    off_or,
    question,
    rename,
    same,
    settle_by_name,
    settle_source,
)
from fsdp_tune.migrate.ledger import Fate, Ledger, Path, Weight
from fsdp_tune.migrate.tools.axolotl_prompts import prompt_program
from fsdp_tune.migrate.tools.emulated_quantisation import AXOLOTL_QAT
from fsdp_tune.recipe.schema.kinds import NO_TEMPLATE
from fsdp_tune.recipe.synonyms import OF_A_SOURCE, SYNONYMS


def _datasets(place: Path) -> Rule:
    def rule(ledger: Ledger, path: Path, value: object) -> None:
        if not isinstance(value, list):
            settle_source(ledger, path, (*place, 0), _SOURCE)
        elif not any(isinstance(item, dict) for item in cast("list[Any]", value)):
            names = cast("list[Any]", value)
            ledger.write(path, {(*place, index, "path"): str(name) for index, name in enumerate(names)}, Fate.CONVERTED)
        else:
            for index in range(len(cast("list[Any]", value))):
                settle_source(ledger, (*path, index), (*place, index), _SOURCE)

    return rule


def _pretraining(ledger: Ledger, path: Path, value: Any) -> None:
    """Streamed text without a mask."""
    _datasets(TRAIN)(ledger, path, value)
    ledger.set(("data", "streaming"), True, "pretraining_dataset", Weight.IMPLIED)


# ---- Entries of `datasets`


def _type(ledger: Ledger, path: Path, place: Path, value: Any) -> None:
    """The name of a prompt strategy, or a mapping with the columns of one of the user's own."""
    if isinstance(value, dict):
        prompter = cast("dict[str, Any]", value)
        program = prompt_program(prompter) if prompter.get("format") else None
        if not prompter.get("format"):
            settle_source(ledger, path, place, _SOURCE)
        elif program is None:
            ledger.ask(path, "write the prompts into the rows, as `prompt` and `completion`", (*place, "format"))
        else:
            words = f"write the prompts into the rows: `jq -c {shlex.quote(program)} ROWS.jsonl > NEW.jsonl`, and read `path: NEW.jsonl`"
            ledger.ask(path, f'{words}; `data: {{separator: ""}}`', (*place, "format"))
        return
    advice = OF_A_SOURCE["type"].advice(value)
    kind, _, variant = str(value).partition(".")
    if advice.tree and not variant:
        # `chat_template` is the type of sharegpt rows too: the names of their keys decide.
        weight = Weight.IMPLIED if kind == "chat_template" else Weight.GIVEN
        ledger.write(path, {(*place, "format"): advice.tree["data"]["train"][0]["format"]}, Fate.CONVERTED, weight=weight)
        if kind == "alpaca":
            ledger.set((*place, "chat_template"), NO_TEMPLATE, "default of axolotl: by the prompts of Stanford Alpaca", Weight.IMPLIED)
            ledger.set(("data", "separator"), "\n", "default of axolotl: the answer is on its own line", Weight.IMPLIED)
    else:
        ledger.ask(path, f"`{value}` is a prompt strategy of axolotl: {advice.words}", (*place, "format"))


def _builder(ledger: Ledger, path: Path, place: Path, value: Any) -> None:
    """`ds_type: json` beside `data_files` is a builder; beside a file as `path`, its ending says the same."""
    if ledger.value(*path[:-1], "data_files") is not None:
        ledger.ask(path, OF_A_SOURCE["ds_type"].advice(value).words, (*place, "path"))
    else:
        ledger.drop(path, "the ending of the file says so")


def _message_keys(ledger: Ledger, path: Path, place: Path, value: object) -> None:
    """How the keys of a message are named: `from` and `value` (sharegpt), or `role` and `content`, are known here."""
    keys = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    role = str(keys.get("role", "role"))
    if (role, keys.get("content", "content")) in (("from", "value"), ("role", "content")) and set(keys) <= {"role", "content"}:
        _known_keys(ledger, path, place, role)
    else:
        ledger.ask(path, "messages have `role` and `content`, or `from` and `value`: rename the keys in the file", place)


def _known_keys(ledger: Ledger, path: Path, place: Path, role: str) -> None:
    if role == "role":
        ledger.drop(path, "messages have these keys here too")
    else:
        ledger.write(path, {(*place, "format"): "sharegpt"}, Fate.CONVERTED)


def _messages(ledger: Ledger, path: Path, place: Path, value: object) -> None:
    """The column of the messages, which sharegpt calls `conversations`."""
    keys = ledger.value(*path[:-1], "message_property_mappings", "role") or ledger.value(*path[:-1], "message_field_role")
    rename(ledger, path, place, str(value), "conversations" if keys == "from" else "messages")


def _message_key(ledger: Ledger, path: Path, place: Path, value: object) -> None:
    """The older spelling of `message_property_mappings`, one key for each."""
    if value in ("role", "content"):
        ledger.drop(path, "messages have this key here too")
    elif value in ("from", "value"):
        ledger.write(path, {(*place, "format"): "sharegpt"}, Fate.CONVERTED)
    else:
        ledger.ask(path, "messages have `role` and `content`, or `from` and `value`: rename the keys in the file", place)


_KNOWN_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant"}


def _roles(ledger: Ledger, path: Path, _: Path, value: object) -> None:
    """{known role: [names in the rows]} is the other way round here."""
    written: dict[Path, Any] = {}
    for role, those in cast("dict[str, Any]", value).items() if isinstance(value, dict) else ():
        for name in cast("list[Any]", those) if isinstance(those, list) else [those]:
            if role not in (name, _KNOWN_ROLES.get(str(name))):
                written[("data", "roles", str(name))] = role
    if written:
        ledger.write(path, written, Fate.CONVERTED)
    else:
        ledger.drop(path, "these names are known here too")


def _trained_roles(ledger: Ledger, path: Path, place: Path, value: Any) -> None:
    advice = SYNONYMS["roles_to_train"].advice(value)
    if advice.tree:
        ledger.write(path, {(*place, "loss_on"): advice.tree["data"]["loss_on"]}, Fate.CONVERTED)
    else:
        ledger.ask(path, advice.words, (*place, "loss_on"))


def _end_of_turn(ledger: Ledger, path: Path, place: Path, value: object) -> None:
    if value in ("turn", "all", True):
        ledger.drop(path, "the end of each trained turn is trained, as the chat template renders it")
    else:
        ledger.ask(path, "the end of each trained turn is trained here, as the chat template renders it", place)


def _template(ledger: Ledger, path: Path, place: Path, value: Any) -> None:
    chat_template((*place, "chat_template"))(ledger, path, value)


_SOURCE: dict[str, SourceRule] = {
    "type": _type,
    "ds_type": _builder,
    "message_property_mappings": _message_keys,
    **dict.fromkeys(("message_field_role", "message_field_content"), _message_key),
    "roles": _roles,
    "roles_to_train": _trained_roles,
    **dict.fromkeys(("train_on_eos", "train_on_eot"), _end_of_turn),
    **dict.fromkeys(("chat_template", "chat_template_jinja"), _template),
    "field_messages": _messages,
    "text_column": lambda ledger, path, place, value: rename(ledger, path, place, str(value), "text"),
    "trust_remote_code": leave_here("data sets never run code here"),
    "field_system": lambda ledger, path, place, value: rename(ledger, path, place, str(value), "system"),
    "field_tools": lambda ledger, path, place, value: rename(ledger, path, place, str(value), "tools"),
}

# ---- Keys of the file


def _share_of_epoch(ledger: Ledger, path: Path, value: Any) -> None:
    """So many events in an epoch are, over all epochs, a share of all steps."""
    key = SYNONYMS[str(path[-1])].key
    epochs = ledger.decided(("training", "num_train_epochs"), ledger.value("num_epochs"))
    advice = SYNONYMS[str(path[-1])].advice(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and isinstance(epochs, int | float) and epochs > 0
    if advice.tree is None and is_number and value * epochs <= 1:
        settings = {key.replace("_steps", "_strategy"): "epoch"}
        ledger.write(path, settings, Fate.COMPUTED, f"{value} × {epochs:g} epochs: at the end of each, as axolotl's own default")
    elif advice.tree is None and is_number:
        share = round(1 / (value * epochs), 6)
        settings = {key: share, key.replace("_steps", "_strategy"): "steps"}
        ledger.write(path, settings, Fate.COMPUTED, f"1 / ({value} × {epochs:g} epochs), a share of all steps")
    else:
        settle_by_name(ledger, path, value)


def _targets(ledger: Ledger, path: Path, value: Any) -> None:
    if is_on(ledger.value("lora_target_linear")):
        ledger.drop(path, "`lora_target_linear` adapts all linear layers")
    else:
        by_synonym("lora_target_modules")(ledger, path, value)


def _tokens(ledger: Ledger, path: Path, value: Any) -> None:
    """A list of new ones, or an older spelling of `special_tokens`."""
    if isinstance(value, dict):
        _special_tokens(ledger, path, cast("dict[str, Any]", value))
    else:
        ledger.write(path, {"model.tokens.add": value}, Fate.CONVERTED)


def _special_tokens(ledger: Ledger, path: Path, value: object) -> None:
    keys = {"pad_token": "model.tokens.pad", "eos_token": "model.tokens.eos"}
    for name, token in cast("dict[str, Any]", value).items() if isinstance(value, dict) else ():
        inner = (*path, name)
        if token is None or token == "":
            ledger.drop(inner, "no value")
        elif name in keys:
            ledger.write(inner, {keys[name]: token}, Fate.CONVERTED)
        elif name == "additional_special_tokens":
            ledger.write(inner, {"model.tokens.add": token}, Fate.CONVERTED)
        else:
            ledger.ask(inner, f"the tokenizer's `{name}` is used; change it in the tokenizer's files", ("model", "tokens"))
    if ledger.is_open(path):
        ledger.ask(path, "write `model: {tokens: {pad: …, eos: …}}`", ("model", "tokens"))


def _plugins(ledger: Ledger, path: Path, value: Any) -> None:
    """Plugins whose work is a key here; the others have no counterpart."""
    names = [str(name).rpartition(".")[2] for name in (cast("list[Any]", value) if isinstance(value, list) else [value])]
    written = {
        **({"kernels.liger": True} if "LigerPlugin" in names else {}),
        **({"kernels.loss": "chunked"} if "CutCrossEntropyPlugin" in names else {}),
    }
    others = [name for name in names if name not in ("LigerPlugin", "CutCrossEntropyPlugin")]
    if others:
        ledger.ask(path, f"plugins are not run here: {', '.join(others)}", ("extensions",))
    else:
        ledger.write(path, written, Fate.CONVERTED, weight=Weight.IMPLIED)


def _liger(ledger: Ledger, path: Path, value: Any) -> None:
    """Liger's kernels are one switch here."""
    if is_on(value):
        ledger.write(path, {"kernels.liger": True}, Fate.CONVERTED, weight=Weight.IMPLIED)
    else:
        ledger.drop(path, "Liger's kernels are one switch: `kernels.liger`")


def _recompute(ledger: Ledger, path: Path, value: Any) -> None:
    """true, false, or the place of what is kept: `offload` keeps the inputs of layers in host memory."""
    if isinstance(value, str) and value.lower() not in ("true", "false"):
        settings = {"fsdp.activation_checkpointing": "full", "fsdp.activation_checkpointing_offload": True}
        ledger.write(path, settings, Fate.CONVERTED)
    else:
        settle_by_name(ledger, path, value)


def _schedule(ledger: Ledger, path: Path, value: Any) -> None:
    """`cosine` with `cosine_min_lr_ratio` is a schedule of its own in transformers."""
    name = "cosine_with_min_lr" if value == "cosine" and ledger.value("cosine_min_lr_ratio") is not None else value
    ledger.write(path, {"training.lr_scheduler_type": name}, Fate.CONVERTED)


def _least_rate(ledger: Ledger, path: Path, value: Any) -> None:
    if ledger.value("lr_scheduler") in (None, "cosine"):  # its default
        written = {"training.lr_scheduler_kwargs": {"min_lr_rate": value}, "training.lr_scheduler_type": "cosine_with_min_lr"}
        ledger.write(path, written, Fate.CONVERTED)
    else:
        words = "it is `lr_scheduler_kwargs: {min_lr_rate: …}` of the schedule `cosine_with_min_lr`"
        ledger.ask(path, words, ("training", "lr_scheduler_type"))


def _chat_template(ledger: Ledger, path: Path, value: Any) -> None:
    """axolotl renders rows of the type `chat_template` by it."""
    named = {_kind(entry) for entry in _entries(ledger).values()}
    if named and named <= _WITHOUT_TEMPLATE:
        ledger.drop(path, f"it is not used for rows of {enumerated(sorted(named), 'and')}")
    else:
        chat_template("data.chat_template")(ledger, path, value)


def _kind(entry: dict[str, Any]) -> str:
    """Return the type of a data set without its variant."""
    return str(entry.get("type", "")).partition(".")[0]


def _entries(ledger: Ledger) -> dict[Path, dict[str, Any]]:
    """Return the data sets by the places of their sources."""
    found: dict[Path, dict[str, Any]] = {}
    for name, place in (("datasets", TRAIN), ("test_datasets", ("data", "eval"))):
        entries = ledger.value(name)
        for index, entry in enumerate(cast("list[Any]", entries) if isinstance(entries, list) else []):
            if isinstance(entry, dict):
                found[(*place, index)] = cast("dict[str, Any]", entry)
    return found


_WITHOUT_TEMPLATE = frozenset({"alpaca", "completion", "input_output"})


def _wandb_project(ledger: Ledger, path: Path, value: object) -> None:
    """Naming a project switches the tracker on."""
    ledger.write(path, {("launch", "env", "WANDB_PROJECT"): str(value), ("training", "report_to"): ["wandb"]}, Fate.CONVERTED)


def _hub_model(ledger: Ledger, path: Path, value: Any) -> None:
    ledger.write(path, {"training.hub_model_id": value, "training.push_to_hub": True}, Fate.CONVERTED, "naming it switches the upload on")


def _adapter(ledger: Ledger, path: Path, value: Any) -> None:
    """The rank is a key of its own."""
    if value in ("lora", "qlora"):
        settings: dict[str, Any] = {"lora": {}}
        settings |= {"quantization.load": "nf4"} if value == "qlora" else {}
        ledger.write(path, settings, Fate.CONVERTED)
    else:
        settle_by_name(ledger, path, value)


def _batch(ledger: Ledger, path: Path, value: Any) -> None:
    """Sequences of one device for a step. axolotl 0.19 does not read it, since its accumulation is 1 by default."""
    if value == (ledger.value("micro_batch_size") or 1) * (ledger.value("gradient_accumulation_steps") or 1):
        ledger.drop(path, "it is micro-batch × accumulation")
    else:
        words = "axolotl 0.19 takes micro-batch × accumulation, older ones divided it by the micro-batch: write the sum over all devices"
        ledger.ask(path, words, ("training", "global_batch_size"))


def _bf16(ledger: Ledger, path: Path, value: Any) -> None:
    """axolotl loads the weights in bf16 too, and trains them so. Beside an adapter, frozen matrices are stored in it here too."""
    settle_by_name(ledger, path, value)
    if str(value).lower() in ("true", "auto", "full"):
        ledger.set(("model", "dtype"), "bf16", f"{path[-1]}: axolotl loads the weights in it", Weight.IMPLIED)


def _warmup(ledger: Ledger, path: Path, value: Any) -> None:
    """axolotl warms up for two steps where one is written."""
    if type(value) is int and value == 1:
        ledger.write(path, {"training.warmup_steps": 2}, Fate.COMPUTED, "axolotl makes two steps of one")
    else:
        settle_by_name(ledger, path, value)


def _excess(ledger: Ledger, path: Path, value: Any) -> None:
    names = {"drop": "drop", "truncate": "truncate", "raise": "error"}
    if (name := names.get(str(value).lower())) is None:
        ledger.ask(path, "longer rows: `data: {overlong: drop}`, `truncate` or `error`", ("data", "overlong"))
    else:
        ledger.write(path, {"data.overlong": name}, Fate.CONVERTED)


def settle_defaults(ledger: Ledger, defaults: dict[str, Any], *, is_loaded_in_half: bool) -> None:
    """Change the defaults that other keys decide. Without a key about it, the weights are bf16, as with `bf16: auto`."""
    if is_loaded_in_half and not any(name in ledger.values for name in ("bf16", "bfloat16", "fp16", "float16", "float32")):
        defaults["model.dtype"] = "bf16"
    if (ledger.get("training", "max_steps") or 0) * defaults["training.warmup_steps"] > _MOST_WARMUP:
        defaults["training.warmup_steps"] = _MOST_WARMUP
    _settle_long_rows(ledger, defaults)


_MOST_WARMUP = 100
"""Steps of axolotl's default, a share, where the number of all steps is known."""


def _settle_long_rows(ledger: Ledger, defaults: dict[str, Any]) -> None:
    """axolotl cuts texts into pieces of `sequence_len` before its strategy for longer rows, the default of which is to drop them.

    `defaults`: those that are written after this.
    """
    paths = {target[:3] for target in ledger.settings if target[:2] in (TRAIN, ("data", "eval")) and target[3:] == ("path",)}
    texts = {place for place in paths if ledger.get(*place, "format") == "text"}
    if not texts or ledger.value("pretraining_dataset") is not None or ledger.is_answered(_OVERLONG):
        return
    default = defaults.pop("data.overlong", "drop")
    given = ledger.settings.get(_OVERLONG)
    strategy = default if given is None else given.value
    if texts == paths or strategy == "truncate":
        ledger.discard(_OVERLONG, "texts are cut into pieces of `sequence_len`, as here")
        return
    words = f"axolotl cuts texts into pieces, and longer rows of other types follow `{strategy}`; here all are cut, or all follow it"
    if given is None:
        ledger.decide(_OVERLONG, words)
    else:
        ledger.withdraw(_OVERLONG, words)


def _in_order(ledger: Ledger) -> bool:
    return is_on(ledger.value("curriculum_sampling") or False)


def _curriculum(ledger: Ledger, path: Path, value: Any) -> None:
    """The sequential sampler, also below packing. Several data sets are shuffled once when they are merged, unless a key says otherwise."""
    several = isinstance(found := ledger.value("datasets"), list) and len(cast("list[Any]", found)) > 1
    merged = ledger.value("shuffle_merged_datasets")
    if not is_on(value):
        ledger.drop(path, "off: rows are shuffled in each epoch, as here")
    elif several and (merged is None or is_on(merged) or is_on(ledger.value("shuffle_before_merging_datasets") or False)):
        words = "axolotl shuffles the rows once and keeps that order: shuffle the files and write `data: {shuffle: false}`, or leave it out"
        ledger.ask(path, words, ("data", "shuffle"))
    else:
        ledger.write(path, {"data.shuffle": False}, Fate.CONVERTED)


def _merged(ledger: Ledger, path: Path, value: Any) -> None:
    """Rows are shuffled once when data sets are merged, and again in each epoch. A stream has its buffer alone."""
    if ledger.value("pretraining_dataset") is not None or is_on(ledger.value("streaming") or False):
        same("data.shuffle")(ledger, path, value)
    elif _in_order(ledger):
        ledger.drop(path, "the order of the rows is that of `curriculum_sampling`")
    else:
        ledger.drop(path, "rows are shuffled in each epoch, there as here")


_OVERLONG: Path = ("data", "overlong")
_PATTERNS = "write the parameters that are not trained: `model: {freeze: [PATTERN]}`"
_GROUPS = "parameters with a rate of their own: `training: {parameter_groups: [{match: [PATTERN], learning_rate: …}]}`"
_BY_THE_MODEL = "classes follow from the files of model and tokenizer"
_OTHER_KERNELS = "a kernel of axolotl; kernels are chosen in `kernels:` and by `model.attn_implementation`"


def _all(names: Sequence[str], rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names, rule)


_DFT_SWITCHES = ("use_dft", "use_dynamic_finetuning", "liger_use_token_scaling")


def _fused_loss(ledger: Ledger, path: Path, value: Any) -> None:
    if is_on(value) and any(is_on(ledger.value(name)) for name in _DFT_SWITCHES):
        ledger.write(
            path, {"kernels.loss": "chunked"}, Fate.CONVERTED, "Liger's kernel weights no tokens here; this holds no logits either"
        )
    else:
        implies({"kernels.loss": "liger"})(ledger, path, value)


RULES: Rules = {
    "datasets": _datasets(TRAIN),
    "test_datasets": _datasets(("data", "eval")),
    "pretraining_dataset": _pretraining,
    **dict.fromkeys(("chat_template", "chat_template_jinja"), _chat_template),
    "lr_scheduler": _schedule,
    **_all(("bf16", "bfloat16"), _bf16),
    "warmup_steps": _warmup,
    "torch_dtype": leave("axolotl takes it from `bf16` and `fp16`"),
    "excess_length_strategy": _excess,
    "adapter": _adapter,
    **_all(("evals_per_epoch", "saves_per_epoch"), _share_of_epoch),
    "special_tokens": _special_tokens,
    "tokens": _tokens,
    "lora_target_modules": _targets,
    "plugins": _plugins,
    **_all(("liger_rope", "liger_rms_norm", "liger_layer_norm", "liger_glu_activation", "liger_swiglu", "liger_rms_norm_gated"), _liger),
    "liger_fused_linear_cross_entropy": _fused_loss,
    **_all(_DFT_SWITCHES, implies({"training.loss": "dft"}, DFT)),
    "cut_cross_entropy": implies({"kernels.loss": "chunked"}, "the logits are not held"),
    "gradient_checkpointing": _recompute,
    "activation_offloading": implies({"fsdp.activation_checkpointing_offload": True}),
    "cosine_min_lr_ratio": _least_rate,
    "wandb_project": _wandb_project,
    **_all(("use_wandb",), implies({"training.report_to": ["wandb"]})),
    **_all(("use_tensorboard",), implies({"training.report_to": ["tensorboard"]})),
    **_all(("wandb_watch", "wandb_log_model"), leave("the tracker's callback has the losses alone")),
    "hub_model_id": _hub_model,
    "batch_size": _batch,
    "eval_batch_size": same("training.per_device_eval_batch_size"),
    "tokenizer_config": same("model.tokenizer"),
    **_all(("model_type", "tokenizer_type", "tokenizer_use_fast", "tokenizer_legacy", "is_llama_derived_model"), leave(_BY_THE_MODEL)),
    "processor_type": off_or("off", "models with images or sound are not trained here; a text model in the same files may be"),
    "pad_to_sequence_len": leave("rows are padded to the longest of a batch; packed rows are full"),
    **_all(
        ("loss_watchdog_threshold", "loss_watchdog_patience"), leave("a spike of the loss is an event of metrics.jsonl; NaN stops the run")
    ),
    **_all(("strict", "debug", "skip_prepare_dataset", "experimental_skip_move_to_device"), leave("a matter of axolotl's own code")),
    **_all(("shuffle_merged_datasets", "shuffle_before_merging_datasets"), _merged),
    "curriculum_sampling": _curriculum,
    "pretrain_multipack_attn": leave("examples in one row never see each other"),
    **_all(
        ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "flash_attn_cross_entropy", "flash_attn_rms_norm"), leave(_OTHER_KERNELS)
    ),
    **_all(("flash_attn_fuse_mlp", "flash_attn_fuse_qkv", "torchdistx_path", "gptq", "use_kernels"), off_or("off", _OTHER_KERNELS)),
    "eager_attention": implies({"model.attn_implementation": "eager"}),
    "flex_attention": implies({"model.attn_implementation": "flex_attention"}),
    "eot_tokens": leave("the end of each trained turn is trained, as the chat template renders it"),
    "unfrozen_parameters": question(_PATTERNS, "model", "freeze"),
    **_all(("embedding_lr", "embedding_lr_scale", "lr_groups", "loraplus_lr_embedding"), question(_GROUPS, "training")),
    "adam_eps": same("training.adam_epsilon"),
    "auto_resume_from_checkpoints": leave("it is `train --resume auto`"),
    "sequence_parallel_degree": same("parallelism.sp_size"),
    "context_parallel_size": same("parallelism.sp_size"),
    "tensor_parallel_size": same("parallelism.tp_size"),
    "fsdp_version": same("fsdp.version"),
    "qat": AXOLOTL_QAT,
    "resize_token_embeddings_to_32x": off_or("off", "the embedding grows to the tokenizer alone: `model: {resize_embeddings: true}`"),
    **_all(("use_ray", "s2_attention", "xformers_attention", "relora", "lisa_n_layers"), UNSUPPORTED_SWITCH),
}
"""By name; see `general.settle_key`."""
UNSUPPORTED = {"rl": "preference tuning", "reward_model": "reward models", "diffusion": "diffusion models"}
