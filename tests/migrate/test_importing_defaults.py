"""Short files of other trainers: what each tool does with a key, or where its file lacks one, is what the
recipe does."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.recipe.schema.keys import values_by_key
from tests.migrate.imports import AUTOMODEL_STEP, TORCHTUNE_STEP, from_text, loaded, questions, row

AXOLOTL = "base_model: m\ndatasets: [{path: a, type: completion}]\nmicro_batch_size: 1\n"
AXOLOTL_CHATS = "base_model: m\nmicro_batch_size: 1\ndatasets: [{path: b, type: chat_template}]\n"
AXOLOTL_BOTH = (
    "base_model: g\nsequence_len: 8\ndatasets: [{path: a, type: completion}, {path: b, type: "
    "chat_template}]\n"
)
FACTORY = "model_name_or_path: m\nstage: sft\ndataset: a\ntemplate: default\n"
TRL = "model_name_or_path: m\ndataset_name: d\nassistant_only_loss: true\n"
SWIFT = "swift sft --model m --dataset a.jsonl --max_length 64"
SWIFT_RANKS = f"NPROC_PER_NODE={{}} {SWIFT} --per_device_train_batch_size 2"
RUN_CLM = "python run_clm.py --model_name_or_path m --train_file a.txt"
FMS = "python -m tuning.sft_trainer --model_name_or_path m --training_data_path a.jsonl --output_dir o"
SHARDED = "deepspeed: zero3.json\n"
DEEPSPEED = (
    '{{"zero_optimization": {{"stage": 3}}, "scheduler": {{"type": "WarmupLR", "params": '
    '{{"warmup_max_lr": 1e-4{}}}}}}}'
)
DEEPSPEED_STEP = '{{"train_batch_size": 8, "optimizer": {{"type": "{}", "params": {{{}}}}}}}'
KEEPS_ORDER = "curriculum_sampling: true\nshuffle_merged_datasets: false\n"
SECRET = "a recipe never contains a secret: "


@dataclass(frozen=True)
class Case:
    text: str
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keys of the recipe that is written, as it loads."""
    rows: dict[str, str | tuple[str, str]] = field(default_factory=dict[str, "str | tuple[str, str]"])
    """Keys of the file: what became of them, or also why."""
    asks: dict[str, bool | str] = field(default_factory=dict[str, "bool | str"])
    """Keys of the recipe: whether they are left to the user, or with which words."""
    questions: list[str] | None = None
    """All keys of the file that are questions, if the case is about them."""
    file: str = "config.yaml"
    options: dict[str, Any] = field(default_factory=dict[str, Any])


def command(text: str, values: dict[str, Any], **more: Any) -> Case:
    return Case(text + "\n", values, file="run.sh", **more)


def batch(rows: int | None) -> dict[str, Any]:
    return {"training.global_batch_size": rows}


def dtypes(model: str, computed: str) -> dict[str, Any]:
    return {"model.dtype": model, "precision.mixed_precision": computed}


def packing(is_packed: bool, strategy: str) -> dict[str, Any]:
    return {"data.packing": is_packed, "data.packing_strategy": strategy, "data.loss_on": "all"}


SYNTAX = {
    "YAML 1.1 is read as the tools read it": Case(
        "base_model: gpt2\nsequence_len: 1_024\nsample_packing: yes\nlearning_rate: 1e-5\n",
        {"data.max_length": 1024, "data.packing": True, "training.learning_rate": 1e-5},
    ),
    "two keys with different values for one key are a question": Case(
        "base_model: gpt2\nsequence_len: 8\nmax_seq_length: 16\n",
        {"data.max_length": 8},
        {"max_seq_length": ("question", "`data.max_length` has another value from `sequence_len`; keep one")},
    ),
    "unknown and nested keys are questions": Case(
        "base_model: gpt2\nsequence_len: 8\nnested:\n  deep: [{x: 1}, {y: {z: 2}}]\n  flat: []\n",
        questions=["nested.deep[0].x", "nested.deep[1].y.z", "nested.flat"],
    ),
    "null that is the default of the tool is no question": Case(
        "base_model: gpt2\nsequence_len: 8\nwarmup_steps:\nlr_scheduler:\nexcess_length_strategy:\n",
        {"training.warmup_steps": 0.03, "data.overlong": "drop"},
        {"lr_scheduler": ("dropped", "no value")},
    ),
    "variable of the shell in place of a model is a question": command(
        "trl sft --model_name_or_path $MODEL --dataset_name $ROWS --learning_rate 1e-5",
        {"model.name_or_path": "MODEL"},
        rows={"model_name_or_path": "question"},
    ),
    "quotients of a script are computed": command(
        f"n=2\nm=2\n{SWIFT} --gradient_accumulation_steps $(expr 32 / $n / $m)",
        {"training.gradient_accumulation_steps": 8},
    ),
    "word of YAML 1.1 without quotes is the name of a kind": Case(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: NO\nnum_processes: 1\nmixed_precision: bf16\n",
        {"fsdp.sharding_strategy": "NO_SHARD", "launch.num_processes": 1},
    ),
    "number of GPUs that the file contradicts is a question": Case(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8\nnum_machines: "
        "1\nfsdp_config: {fsdp_version: 2}\n",
        {"launch.num_processes": 8},
        asks={"launch.num_processes": "the file says 8 GPUs, and `--num-gpus` 4"},
        options={"num_gpus": 4},
    ),
    "reason names the variable of a tracker's secret": Case(
        TRL + "wandb_api_key: abcdefgh\n",
        rows={"wandb_api_key": ("dropped", SECRET + "set WANDB_API_KEY, or log in with `wandb login`")},
    ),
    "reason names the variable of the hub's secret": Case(
        TRL + "hub_token: abcdefgh\n",
        rows={"hub_token": ("dropped", SECRET + "set HF_TOKEN, or log in with `hf auth login`")},
    ),
    "reason without a known variable": Case(
        TRL + "api_key: abcdefgh\n",
        rows={"api_key": ("dropped", SECRET + "set the variable that its reader takes")},
    ),
}
OF_AXOLOTL = {
    "weights are bf16": Case(AXOLOTL, {"model.dtype": "bf16"}),
    "weights are bf16 with bf16: auto": Case(AXOLOTL + "bf16: auto\n", {"model.dtype": "bf16"}),
    "weights are fp32 without bf16": Case(AXOLOTL + "bf16: false\n", {"model.dtype": "fp32"}),
    "weights are fp32 with float32": Case(AXOLOTL + "float32: true\n", {"model.dtype": "fp32"}),
    "weights of adapters are fp32": Case(AXOLOTL + "adapter: lora\nlora_r: 8\n", {"model.dtype": "fp32"}),
    "weights of adapters are fp32 with bf16": Case(
        AXOLOTL + "bf16: true\nadapter: lora\n", {"model.dtype": "fp32"}
    ),
    "bf16 decides against torch_dtype": Case(
        AXOLOTL + "bf16: true\ntorch_dtype: float32\n", {"model.dtype": "bf16"}, {"torch_dtype": "dropped"}
    ),
    "sharded weights are fp32": Case(AXOLOTL + SHARDED, {"model.dtype": "fp32"}, asks={"model.dtype": False}),
    "sharded weights are fp32 with bf16": Case(
        AXOLOTL + "bf16: true\n" + SHARDED, {"model.dtype": "fp32"}, asks={"model.dtype": False}
    ),
    "offloaded weights are bf16": Case(
        AXOLOTL + "fsdp_version: 2\nfsdp_config: {offload_params: true}\n",
        {"model.dtype": "bf16"},
        asks={"model.dtype": False},
    ),
    "a warmup of one step is two": Case(AXOLOTL + "warmup_steps: 1\n", {"training.warmup_steps": 2}),
    "a warmup of three steps is three": Case(AXOLOTL + "warmup_steps: 3\n", {"training.warmup_steps": 3}),
    "default warmup is a share": Case(AXOLOTL + "max_steps: 1000\n", {"training.warmup_steps": 0.03}),
    "default warmup is at most 100 steps": Case(
        AXOLOTL + "max_steps: 8000\n", {"training.warmup_steps": 100}
    ),
    "batch_size is never the accumulation": Case(
        AXOLOTL + "batch_size: 2\n", batch(1), {"batch_size": "question"}, options={"num_gpus": 1}
    ),
    "batch_size of the accumulation is dropped": Case(
        AXOLOTL + "batch_size: 8\ngradient_accumulation_steps: 8\n",
        batch(8),
        {"batch_size": "dropped"},
        options={"num_gpus": 1},
    ),
    "the last save of a quarter epoch is at its end": Case(
        AXOLOTL + "num_epochs: 0.25\nsaves_per_epoch: 2\n",
        {"training.save_strategy": "epoch", "training.save_steps": 500},
    ),
    "one save of all epochs is at their end": Case(
        AXOLOTL + "num_epochs: 0.5\nsaves_per_epoch: 2\n",
        {"training.save_strategy": "epoch", "training.save_steps": 500},
    ),
    "two saves of an epoch are shares of it": Case(
        AXOLOTL + "num_epochs: 1\nsaves_per_epoch: 2\n",
        {"training.save_strategy": "steps", "training.save_steps": 0.5},
    ),
    "long chats are dropped": Case(AXOLOTL_CHATS, {"data.overlong": "drop"}),
    "long chats are truncated": Case(
        AXOLOTL_CHATS + "excess_length_strategy: truncate\n", {"data.overlong": "truncate"}
    ),
    "long chats are errors": Case(
        AXOLOTL_CHATS + "excess_length_strategy: raise\n", {"data.overlong": "error"}
    ),
    "unknown strategy is a question": Case(
        AXOLOTL_CHATS + "excess_length_strategy: wrap\n", rows={"excess_length_strategy": "question"}
    ),
    "texts are split": Case(AXOLOTL, {"data.overlong": "auto"}),
    "texts are split before rows are dropped": Case(
        AXOLOTL + "excess_length_strategy: drop\n",
        {"data.overlong": "auto"},
        {"excess_length_strategy": "dropped"},
    ),
    "texts are split before rows are errors": Case(
        AXOLOTL + "excess_length_strategy: raise\n",
        {"data.overlong": "auto"},
        {"excess_length_strategy": "dropped"},
    ),
    "texts next to chats are split or truncated": Case(
        AXOLOTL_BOTH + "excess_length_strategy: truncate\n",
        {"data.overlong": "auto"},
        {"excess_length_strategy": "dropped"},
    ),
    "dropping next to texts is a question": Case(
        AXOLOTL_BOTH + "excess_length_strategy: drop\n",
        {"data.overlong": "auto"},
        {"excess_length_strategy": "question"},
    ),
    "errors next to texts are a question": Case(
        AXOLOTL_BOTH + "excess_length_strategy: raise\n",
        {"data.overlong": "auto"},
        {"excess_length_strategy": "question"},
    ),
    "default for long rows next to texts is a question": Case(AXOLOTL_BOTH, asks={"data.overlong": True}),
    "unshuffled data sets are sampled at random": Case(
        AXOLOTL_BOTH + "shuffle_merged_datasets: false\n", {"data.shuffle": True}, questions=[]
    ),
    "shuffled data sets are sampled at random": Case(
        AXOLOTL_BOTH + "shuffle_merged_datasets: true\n", {"data.shuffle": True}, questions=[]
    ),
    "no curriculum is sampled at random": Case(
        AXOLOTL_BOTH + "curriculum_sampling: false\n", {"data.shuffle": True}, questions=[]
    ),
    "curriculum of shuffled data sets is a question": Case(
        AXOLOTL_BOTH + "curriculum_sampling: true\n",
        {"data.shuffle": True},
        questions=["curriculum_sampling"],
    ),
    "curriculum of unshuffled data sets keeps the order": Case(
        AXOLOTL_BOTH + KEEPS_ORDER, {"data.shuffle": False}, questions=[]
    ),
    "packed curriculum keeps the order": Case(
        AXOLOTL_BOTH + KEEPS_ORDER + "sample_packing: true\n", {"data.shuffle": False}, questions=[]
    ),
    "curriculum of one data set keeps the order": Case(
        "base_model: g\nsequence_len: 8\ndatasets: [{path: a}]\ncurriculum_sampling: true\n",
        {"data.shuffle": False},
    ),
    "stream keeps the order": Case(
        "base_model: g\nsequence_len: 8\npretraining_dataset: [{path: a}]\nmax_steps: "
        "5\nshuffle_merged_datasets: false\n",
        {"data.shuffle": False},
    ),
}
OF_LLAMA_FACTORY = {
    "an adapter is trained": Case(
        FACTORY.replace("default", "llama3"),
        {"lora.r": 8, "lora.lora_alpha": 16.0, "data.chat_template": "llama3"},
    ),
    "all parameters are computed in fp32": Case(
        FACTORY + "finetuning_type: full\n", {"precision.mixed_precision": "no"}
    ),
    "adapters are computed in bf16": Case(FACTORY, {"precision.mixed_precision": "bf16"}),
    "bf16 of all parameters": Case(
        FACTORY + "finetuning_type: full\nbf16: true\n", {"precision.mixed_precision": "bf16"}
    ),
    "pure bf16": Case(
        FACTORY + "pure_bf16: true\n", {"precision.mixed_precision": "bf16", "model.frozen_dtype": "bf16"}
    ),
    "template default is a question": Case(FACTORY, rows={"template": "question"}),
    "template that renders otherwise is a question": Case(
        FACTORY.replace("default", "qwen2.5"), rows={"template": "question"}
    ),
    "template chatml is kept": Case(FACTORY.replace("default", "chatml"), rows={"template": "converted"}),
    "template llama3 is kept": Case(FACTORY.replace("default", "llama3"), rows={"template": "converted"}),
    "resized vocabulary is trained with adapters": Case(
        FACTORY + "resize_vocab: true\n", {"lora.modules_to_save": ["embed_tokens", "lm_head"]}
    ),
    "pre-training joins texts": Case(FACTORY.replace("sft", "pt"), packing(True, "wrapped")),
    "pre-training without packing": Case(
        FACTORY.replace("sft", "pt") + "packing: false\n", packing(False, "bfd")
    ),
    "pre-training with packing": Case(
        FACTORY.replace("sft", "pt") + "packing: true\n", packing(True, "wrapped")
    ),
}
OF_SWIFT = {
    "batch is 16 rows of 4 ranks": command(SWIFT_RANKS.format(4), batch(16)),
    "batch is at least the micro-batch of each rank": command(SWIFT_RANKS.format(16), batch(32)),
    "batch is a multiple of the ranks": command(SWIFT_RANKS.format(3), batch(18)),
    "batch with an accumulation": command(
        SWIFT_RANKS.format(1) + " --gradient_accumulation_steps 4", batch(8)
    ),
    "batch without ranks": command(SWIFT + " --per_device_train_batch_size 2", batch(16)),
    "batch with an accumulation but without ranks": command(
        SWIFT + " --per_device_train_batch_size 2 --gradient_accumulation_steps 4", batch(None)
    ),
    "batch without a micro-batch": command(SWIFT, batch(16), options={"num_gpus": 4}),
    "long rows are dropped": command(SWIFT, {"data.overlong": "drop"}),
    "long rows are truncated": command(SWIFT + " --truncation_strategy right", {"data.overlong": "truncate"}),
    "dtype of all parameters is a question": command(
        SWIFT + " --tuner_type full", dtypes("fp32", "bf16"), asks={"model.dtype": True}
    ),
    "bfloat16 of all parameters": command(
        SWIFT + " --tuner_type full --torch_dtype bfloat16",
        dtypes("bf16", "bf16"),
        asks={"model.dtype": False},
    ),
    "float32 of all parameters is computed in fp16": command(
        SWIFT + " --tuner_type full --torch_dtype float32",
        dtypes("fp32", "fp16"),
        asks={"model.dtype": False},
    ),
    "float32 of all parameters with bf16": command(
        SWIFT + " --tuner_type full --torch_dtype float32 --bf16 true",
        dtypes("fp32", "bf16"),
        asks={"model.dtype": False},
    ),
    "adapters": command(SWIFT, dtypes("fp32", "bf16"), asks={"model.dtype": False}),
    "sharded bfloat16": command(
        f"NPROC_PER_NODE=2 {SWIFT} --tuner_type full --deepspeed zero3 --torch_dtype bfloat16",
        dtypes("fp32", "bf16"),
        asks={"model.dtype": False},
    ),
    "sharded without a dtype": command(
        f"NPROC_PER_NODE=2 {SWIFT} --tuner_type full --deepspeed zero3",
        dtypes("fp32", "bf16"),
        asks={"model.dtype": False},
    ),
    "tokens in a file are a question": command(
        SWIFT + " --new_special_tokens tokens.txt", {}, rows={"new_special_tokens": "question"}
    ),
    "tokens are added": command(
        SWIFT + " --new_special_tokens '<a>' '<b>'", {"model.tokens.add": ["<a>", "<b>"]}
    ),
    "module of the command is pre-training": command(
        "torchrun --nproc_per_node 2 -m swift.cli.pt --model m --dataset a.jsonl --max_length 64",
        {"data.loss_on": "all", "launch.num_processes": 2},
    ),
}
OF_OTHERS = {
    "TRL: weights of a sharded run are fp32": Case(
        TRL + "dtype: bfloat16\n" + SHARDED, {"model.dtype": "fp32"}, asks={"model.dtype": False}
    ),
    "TRL: weights have their dtype": Case(
        TRL + "dtype: bfloat16\n", {"model.dtype": "bf16"}, asks={"model.dtype": False}
    ),
    "TRL: sharded without bf16": Case(
        TRL + "dtype: bfloat16\nbf16: false\n" + SHARDED, {"model.dtype": "bf16"}, asks={"model.dtype": False}
    ),
    "fms: weights are bf16": command(FMS, {"model.dtype": "bf16"}),
    "fms: weights of adapters are fp32": command(
        FMS + " --peft_method lora", {"model.dtype": "fp32", "model.frozen_dtype": "auto"}
    ),
    "run_clm: dtype is a question": command(RUN_CLM, {}, asks={"model.dtype": True}),
    "run_clm: dtype is kept": command(
        RUN_CLM + " --torch_dtype float32", {"model.dtype": "fp32"}, asks={"model.dtype": False}
    ),
    "DeepSpeed: warmup without steps": Case(
        DEEPSPEED.format(""), {"training.warmup_steps": 1000}, asks={"training.warmup_steps": True}
    ),
    "DeepSpeed: warmup is logarithmic": Case(
        DEEPSPEED.format(', "warmup_num_steps": 10'),
        {"training.warmup_steps": 10},
        asks={"training.warmup_steps": True},
    ),
    "DeepSpeed: linear warmup": Case(
        DEEPSPEED.format(', "warmup_num_steps": 10, "warmup_type": "linear"'),
        {"training.warmup_steps": 10},
        asks={"training.warmup_steps": False},
        questions=[],
    ),
    "DeepSpeed: logarithmic warmup is a question": Case(
        DEEPSPEED.format(', "warmup_num_steps": 10, "warmup_type": "log"'),
        {"training.warmup_steps": 10},
        {"scheduler.params.warmup_type": "question"},
        asks={"training.warmup_steps": False},
    ),
    "DeepSpeed: decay that is not decoupled is a question": Case(
        DEEPSPEED_STEP.format("Adam", '"weight_decay": 0.1, "adam_w_mode": false, "bias_correction": true'),
        questions=["optimizer.params.adam_w_mode"],
    ),
    "DeepSpeed: AdamW decouples its decay whatever a key says": Case(
        DEEPSPEED_STEP.format("AdamW", '"weight_decay": 0.1, "adam_w_mode": false'), questions=[]
    ),
    "DeepSpeed: averages without correction are a question": Case(
        DEEPSPEED_STEP.format("Adam", '"weight_decay": 0, "adam_w_mode": false, "bias_correction": false'),
        questions=["optimizer.params.bias_correction"],
    ),
}
CASES = {
    **SYNTAX,
    **{f"axolotl: {name}": case for name, case in OF_AXOLOTL.items()},
    **{f"LLaMA-Factory: {name}": case for name, case in OF_LLAMA_FACTORY.items()},
    **{f"ms-swift: {name}": case for name, case in OF_SWIFT.items()},
    **OF_OTHERS,
}


@pytest.mark.parametrize("name", CASES)
def test_short_file_means_the_same_here(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    options = {"tool": "DeepSpeed", **case.options} if case.text.startswith("{") else case.options

    found = from_text(tmp_path, case.text, case.file, **options)

    recipe, decisions = values_by_key(loaded(found)), dict(found.decisions)
    assert {key: recipe.get(key) for key in case.values} == case.values
    for key, fate in case.rows.items():
        assert row(found, key) == fate if isinstance(fate, tuple) else row(found, key)[0] == fate
    for key, asked in case.asks.items():
        assert decisions[key] == asked if isinstance(asked, str) else (key in decisions) is asked
    assert case.questions is None or questions(found) == case.questions


@pytest.mark.parametrize("text", [TORCHTUNE_STEP, AUTOMODEL_STEP], ids=["torchtune", "automodel"])
def test_weight_decay_is_that_of_the_class_and_a_question_for_adam(tmp_path: Path, text: str) -> None:
    for kind, decay in (("Adam", 0.0), ("AdamW", 0.01), ("SGD", 0.0)):
        found = values_by_key(from_text(tmp_path, text.format(f"torch.optim.{kind}", "")).recipe)
        assert (found.get("training.weight_decay") or 0.0) == decay
    rows = from_text(tmp_path, text.format("torch.optim.Adam", ", weight_decay: 0.1")).rows
    asked = [
        each.targets
        for each in rows
        if each.fate.value == "question" and "Adam adds the decay" in each.reason
    ]
    assert asked == [(("training", "optim"),)]


@pytest.mark.parametrize(
    ("value", "fates"),
    [
        ("{split_batches: true, dispatch_batches: false}", {"question", "dropped"}),
        ("{split_batches: false, even_batches: true}", {"dropped"}),
        ("{gradient_accumulation_kwargs: {num_steps: 4}}", {"question"}),
        ("{}", {"dropped"}),
        ("accelerator.json", {"question"}),
    ],
)
def test_settings_of_accelerate_that_change_a_step_are_questions(
    tmp_path: Path, value: str, fates: set[str]
) -> None:
    found = from_text(tmp_path, TRL + f"accelerator_config: {value}\n")
    assert {each.fate.value for each in found.rows if each.path[0] == "accelerator_config"} == fates
