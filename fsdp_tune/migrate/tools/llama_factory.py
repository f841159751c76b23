"""Options of LLaMA-Factory that mean something of their own."""

from __future__ import annotations

from fsdp_tune.migrate.general import DFT
from fsdp_tune.migrate.rules import (
    TRAIN,
    UNSUPPORTED_SWITCH,
    Also,
    FileKey,
    Outcome,
    Rules,
    Step,
    each,
    fine_or,
    implies,
    is_on,
    off_or,
    same,
)
from fsdp_tune.migrate.tool import TRAINER_DEFAULTS, Method, Tool
from fsdp_tune.migrate.tools.llama_factory_datasets import INFO, listed_datasets, names_of
from fsdp_tune.migrate.tools.llama_factory_templates import OF_TOKENIZER, is_template_of_tokenizer, template
from fsdp_tune.migrate.tools.long_rows import CUT_BY_TRL
from fsdp_tune.migrate.tools.swift import MEDIA, method
from fsdp_tune.recipe.outcome import Ask, Drop, Fate, Write
from fsdp_tune.recipe.read.tool_detection import LLAMA_FACTORY


def _stage(key: FileKey) -> Outcome:
    if key.value != "pt":
        words = "supervised fine-tuning is what `train` does"
        return Drop(f"{words}. {OF_TOKENIZER}" if is_template_of_tokenizer(key) else words)
    found: list[Step] = [Write({"data.loss_on": "all"}, "pre-training: every token is trained")]
    origin = f"default of {LLAMA_FACTORY} for `stage: pt`"
    if (packing := key.of_file("packing")) is None:
        found.append(Also("data.packing", True, origin))
    if packing is None or is_on(packing):
        found.append(
            Also("data.packing_strategy", "wrapped", f"{origin}: texts are joined and cut into blocks")
        )
    return found


def _rows_of_each(key: FileKey) -> Outcome:
    """A limit of every data set."""
    names = {
        TRAIN: names_of(key.of_file("dataset")) or ["NAME"],
        ("data", "eval"): names_of(key.of_file("eval_dataset")),
    }
    places = [(*place, index, "max_rows") for place, named in names.items() for index in range(len(named))]
    return Write(dict.fromkeys(places, key.value))


def _shares(key: FileKey) -> Outcome:
    try:
        weights = [float(share) for share in names_of(key.value)]
    except ValueError:
        return Ask("write a `weight` for each source", TRAIN)
    return Write({(*TRAIN, index, "weight"): weight for index, weight in enumerate(weights)})


_CUT = (
    "prompt and answer of a longer row are cut in proportion there; here its end is, and a row without a "
    "trained token is left out"
)
_PACKED = "examples in one row never see each other here, as with `neat_packing`"
_OPTIMIZERS = (
    "use_galore",
    "use_apollo",
    "use_badam",
    "use_adam_mini",
    "galore_layerwise",
    "apollo_layerwise",
)
_LOSSES = (
    "use_asft_loss",
    "use_eaft_loss",
    "use_llama_pro",
    "mixture_of_depths",
    "shift_attn",
    "pissa_convert",
    "use_kt",
)


def _order(key: FileKey) -> Outcome:
    """`SequentialSampler`, over rows that a held-out part or a stream's buffer has shuffled before."""
    if not is_on(key.value):
        return Drop("off: rows are shuffled in each epoch, as here")
    if is_on(key.of_file("streaming") or False) or key.of_file("val_size"):
        words = (
            "LLaMA-Factory keeps the order of one shuffle, which a held-out part and a stream's buffer need"
        )
        return Ask(
            f"{words}: write `data: {{shuffle: false}}` for the order of the files, or leave it out",
            "data.shuffle",
        )
    return Write({"data.shuffle": False})


_QUANTISED = "weights that are quantised already are not trained: name the original model"

RULES: Rules = {
    "stage": _stage,
    "dataset": listed_datasets(TRAIN),
    "eval_dataset": listed_datasets(("data", "eval")),
    "dataset_dir": Drop(f"the files of `{INFO}` are written with their paths"),
    "template": template,
    "neat_packing": implies({"data.packing": True}, "examples in one row never see each other"),
    "max_samples": _rows_of_each,
    "cutoff_len": lambda key: Write({"data.max_length": key.value}, _CUT),
    **each(
        ("use_v1_kernels", "preprocessing_batch_size", "eval_num_beams"),
        Drop("a matter of LLaMA-Factory's own code"),
    ),
    "tokenized_path": Drop("prepared data are named by their content, in `data.cache_dir`"),
    "interleave_probs": _shares,
    "packing": lambda key: Write({"data.packing": key.value}, _PACKED, Fate.KEPT),
    "finetuning_type": method,
    "pure_bf16": implies({"model.dtype": "bf16", "precision.mixed_precision": "bf16"}),
    "use_muon": implies({"training.optim": "muon"}),
    "buffer_size": same("data.shuffle_buffer_size"),
    "disable_shuffling": _order,
    "plot_loss": Drop("the run card has the curve of the loss"),
    "quantization_method": fine_or(
        ("bnb", "bitsandbytes"), "4 bits are NF4 here, as in bitsandbytes", _QUANTISED, "quantization.load"
    ),
    **each(("use_unsloth", "use_unsloth_gc"), Drop("kernels are chosen in `kernels:`")),
    "use_reentrant_gc": Drop("activation checkpointing is always non-reentrant"),
    "upcast_layernorm": Drop("norms are trained in `model.dtype`, fp32 by default"),
    **each(
        _OPTIMIZERS,
        off_or("off", "this optimizer is not supported: `adamw_torch_8bit` needs less memory too"),
    ),
    "use_dft_loss": implies({"training.loss": "dft"}, DFT),
    **each(_LOSSES, UNSUPPORTED_SWITCH),
    **each(("image_max_pixels", "video_max_pixels", "video_maxlen", "video_fps"), Drop(MEDIA)),
    **each(("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model"), Drop(MEDIA)),
    "default_system": Ask("add the system message to the rows", TRAIN),
    "cp_size": same("parallelism.sp_size"),
    "ray_num_workers": Drop("ranks are started by `fsdp-tune train`"),
    "predict_with_generate": off_or(
        "off", "write `training: {sample: {every: 500, prompts: […]}}` to see answers while training"
    ),
}
"""By name; see `settle_keys.settle_key`."""
TOOL = Tool(
    LLAMA_FACTORY,
    RULES,
    defaults={
        **TRAINER_DEFAULTS,
        "fsdp.activation_checkpointing": "full",
        "training.logging_steps": 500,
        "training.report_to": [],
    },
    adapter_defaults={"lora.r": 8, "lora.target_modules": "all-linear", "precision.mixed_precision": "bf16"},
    # weights are cast to fp32, and computed in it without `bf16`
    full_defaults={"precision.mixed_precision": "no"},
    adapter_switches=("finetuning_type",),
    trains_adapters=True,
    long_rows=CUT_BY_TRL,  # `wrapped`: `stage: pt`
    stream_buffer=16384,
    method=Method("stage", ("sft", "pt"), "preference tuning and reward models"),
)
