"""Files of other trainers over a tiny model and local rows, as users write them, and the answers to their
questions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

ROWS = 8


@dataclass(frozen=True)
class Imported:
    tool: str
    name: str
    file: str
    text: str
    answers: tuple[str, ...] = ()
    """`--set` for the questions of the file."""
    beside: tuple[tuple[str, str], ...] = ()
    """Other files, as (name, text)."""
    losses: int = 0
    """How many steps are compared with the tool's own: adapters are drawn by another generator after the
    first."""


BASE = ("model.name_or_path=base",)
ONE = ("training.global_batch_size=8",)
CHATS = ("data.train=[{path: chat.jsonl}]", "data.loss_on=assistant")
AXOLOTL = (
    "base_model: base\nmicro_batch_size: 8\ngradient_accumulation_steps: 1\nlearning_rate: "
    "1e-3\nsequence_len: 256\nval_set_size: 0\n"
)
AXOLOTL_CHATS = "datasets:\n  - path: json\n    data_files: chat.jsonl\n    type: chat_template\n"
TRL = (
    "model_name_or_path: base\nper_device_train_batch_size: 8\nlearning_rate: 1e-3\nbf16: "
    "false\nuse_cpu: true\nlogging_steps: 1\n"
)
TRL += "max_steps: 2\nsave_steps: 2\nreport_to: none\nmax_length: 256\n"
TRL_CHATS = "datasets:\n  - path: json\n    data_files: chat.jsonl\nassistant_only_loss: true\n"
TRL_PAIRS = "datasets:\n  - path: json\n    data_files: pairs.jsonl\n"
FACTORY = (
    "model_name_or_path: base\nstage: sft\ndo_train: true\ntemplate: chatml\ncutoff_len: "
    "256\nlearning_rate: 1.0e-3\nbf16: false\n"
)
FACTORY += "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n"
INFO = json.dumps(
    {
        "rows": {"file_name": "../alpaca.jsonl"},
        "texts": {"file_name": "../texts.jsonl", "columns": {"prompt": "text"}},
        "chats": {
            "file_name": "../chat.jsonl",
            "formatting": "sharegpt",
            "columns": {"messages": "messages"},
            "tags": {
                "role_tag": "role",
                "content_tag": "content",
                "user_tag": "user",
                "assistant_tag": "assistant",
            },
        },
    }
)
SWIFT = (
    "swift sft --model base --dataset chat.jsonl --torch_dtype float32 --learning_rate 1e-3 "
    "--per_device_train_batch_size 8"
)
SWIFT += " --max_length 256"
TORCHTUNE = """\
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: base/tokenizer.model, max_seq_len: 256}
model: {_component_: torchtune.models.llama3_2.llama3_2_1b}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: base, model_type: LLAMA3_2}
optimizer: {_component_: torch.optim.AdamW, fused: true, lr: 1e-3}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
batch_size: 8
gradient_accumulation_steps: 1
epochs: 1
dtype: fp32
output_dir: out
"""  # noqa: E501
TUNE_CHATS = (
    "dataset: {_component_: torchtune.datasets.chat_dataset, source: json, data_files: chat.jsonl, "
    "conversation_column: messages, "
)
TUNE_CHATS += "conversation_style: openai, split: train}\n"

FILES = (
    Imported("TRL", "chats", "c.yaml", TRL + TRL_CHATS, ONE, losses=2),
    Imported(
        "TRL",
        "prompts and answers, accumulated",
        "c.yaml",
        (TRL + TRL_PAIRS).replace("batch_size: 8", "batch_size: 4") + "gradient_accumulation_steps: 2\n",
        (*ONE, "data.loss_on=completion"),
        losses=2,
    ),
    Imported(
        "TRL",
        "cosine, decay, betas",
        "c.yaml",
        TRL + TRL_CHATS + "lr_scheduler_type: cosine\nweight_decay: 0.1\nadam_beta2: 0.95\n",
        answers=ONE,
        losses=2,
    ),
    Imported(
        "TRL",
        "label smoothing",
        "c.yaml",
        TRL + TRL_CHATS + "label_smoothing_factor: 0.1\nmax_grad_norm: 0.25\n",
        answers=ONE,
        losses=2,
    ),
    Imported(
        "TRL",
        "LoRA by a command",
        "run.sh",
        "LR=2e-4\ntrl sft --config c.yaml --use_peft --lora_r 4 --lora_target_modules q_proj v_proj "
        "--seed 7 # $LR\n",
        answers=ONE,
        beside=(("c.yaml", TRL + TRL_CHATS),),
        losses=1,
    ),
    Imported("axolotl", "chats", "c.yaml", AXOLOTL + AXOLOTL_CHATS, ONE),
    Imported(
        "axolotl",
        "LoRA, packed",
        "c.yaml",
        AXOLOTL.replace("size: 8", "size: 1")
        + AXOLOTL_CHATS
        + "adapter: lora\nlora_r: 4\nlora_alpha: 8\nlora_target_linear: true\nsample_packing: true\n",
        ("training.global_batch_size=1",),
    ),
    Imported(
        "axolotl",
        "alpaca",
        "c.yaml",
        AXOLOTL + "datasets:\n  - path: alpaca.jsonl\n    ds_type: json\n    type: alpaca\nbf16: auto\n",
        ONE,
    ),
    Imported(
        "axolotl",
        "texts",
        "c.yaml",
        AXOLOTL + "datasets: [{path: texts.jsonl, ds_type: json, type: completion}]\nwarmup_ratio: 0.1\n",
        ONE,
    ),
    Imported(
        "axolotl",
        "written by its script",
        "run.sh",
        f"cat > c.yaml <<'EOF'\n{AXOLOTL}{AXOLOTL_CHATS}EOF\naxolotl train c.yaml --num-epochs 1\n",
        ONE,
    ),
    Imported(
        "LLaMA-Factory",
        "alpaca",
        "c.yaml",
        FACTORY + "finetuning_type: full\ndataset: rows\n",
        ONE,
        (("data/dataset_info.json", INFO),),
    ),
    Imported(
        "LLaMA-Factory",
        "chats, LoRA",
        "c.yaml",
        FACTORY + "finetuning_type: lora\nlora_rank: 4\nlora_target: all\ndataset: chats\n",
        ONE,
        (("data/dataset_info.json", INFO),),
    ),
    Imported(
        "LLaMA-Factory",
        "texts",
        "c.yaml",
        (FACTORY + "finetuning_type: full\ndataset: texts\n")
        .replace("stage: sft", "stage: pt")
        .replace("size: 4", "size: 1")
        .replace("steps: 2", "steps: 1"),
        ("training.global_batch_size=1",),
        (("data/dataset_info.json", INFO),),
    ),
    Imported(
        "LLaMA-Factory",
        "JSON",
        "c.json",
        json.dumps(
            {
                "model_name_or_path": "base",
                "stage": "sft",
                "template": "chatml",
                "cutoff_len": 256,
                "finetuning_type": "full",
                "dataset": "rows",
                "mask_history": True,
                "train_on_prompt": False,
            }
        ),
        ("training.global_batch_size=8", "training.gradient_accumulation_steps=1"),
        (("data/dataset_info.json", INFO),),
    ),
    Imported(
        "LLaMA-Factory",
        "command",
        "run.sh",
        "FORCE_TORCHRUN=1 llamafactory-cli train --stage sft --model_name_or_path base --dataset "
        "chats --template chatml \\\n"
        "  --finetuning_type full --cutoff_len 256 --per_device_train_batch_size 8 --learning_rate 1e-3\n",
        ONE,
        (("data/dataset_info.json", INFO),),
    ),
    Imported(
        "ms-swift",
        "LoRA",
        "run.sh",
        f"CUDA_VISIBLE_DEVICES=0 \\\n{SWIFT} --train_type lora --lora_rank 4 --target_modules "
        "all-linear --gradient_accumulation_steps 1\n",
        ONE,
    ),
    Imported(
        "ms-swift",
        "full",
        "run.sh",
        f"{SWIFT} --train_type full --weight_decay 0 --gradient_accumulation_steps 1 "
        "--split_dataset_ratio 0\n",
        ONE,
    ),
    Imported(
        "ms-swift",
        "of two ranks",
        "run.sh",
        f"NPROC_PER_NODE=2 {SWIFT.replace('size 8', 'size 2')} --tuner_type full "
        "--gradient_accumulation_steps $(expr 8 / 2 / 2)\n",
    ),
    Imported(
        "ms-swift",
        "YAML",
        "c.yaml",
        "model: base\ndataset: [alpaca.jsonl]\ntuner_type: full\ntorch_dtype: float32\nmax_length: "
        "256\nlearning_rate: 1e-3\n"
        "per_device_train_batch_size: 8\ngradient_accumulation_steps: 1\nsplit_dataset_ratio: 0\n",
        ONE,
    ),
    Imported(
        "ms-swift",
        "notebook",
        "n.ipynb",
        json.dumps(
            {
                "cells": [
                    {
                        "cell_type": "code",
                        "source": f"!{SWIFT} --train_type full --gradient_accumulation_steps 1",
                    }
                ]
            }
        ),
        ONE,
    ),
    Imported("torchtune", "chats", "c.yaml", TORCHTUNE + TUNE_CHATS, (*ONE, *BASE)),
    Imported(
        "torchtune",
        "alpaca",
        "c.yaml",
        TORCHTUNE + "dataset: {_component_: torchtune.datasets.instruct_dataset, source: json, data_files: "
        "alpaca.jsonl, "
        "column_map: {input: instruction, output: output}}\n",
        (*ONE, *BASE),
    ),
    Imported(
        "torchtune",
        "texts",
        "c.yaml",
        TORCHTUNE + "dataset: {_component_: torchtune.datasets.text_completion_dataset, source: json, "
        "data_files: texts.jsonl}\n",
        (*ONE, *BASE),
    ),
    Imported(
        "torchtune",
        "LoRA",
        "c.yaml",
        TORCHTUNE.replace(
            "llama3_2_1b}",
            "lora_llama3_2_1b, lora_attn_modules: [q_proj, v_proj], lora_rank: 4, lora_alpha: 8}",
        )
        + TUNE_CHATS,
        (*ONE, *BASE),
    ),
    Imported(
        "torchtune",
        "command",
        "run.sh",
        "tune run full_finetune_single_device --config c.yaml batch_size=4 gradient_accumulation_steps=2\n",
        (*ONE, *BASE),
        (("c.yaml", TORCHTUNE + TUNE_CHATS),),
    ),
)


def write_rows(folder: Path) -> None:
    """Write chats, prompts, instructions and texts of `ROWS` rows, and weights for the model of the
    directory."""
    turns = [(f"what is {n}?", "it is " + "very " * (n % 5) + f"{n}") for n in range(ROWS)]
    chats = [
        {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": told}]}
        for ask, told in turns
    ]
    kinds: dict[str, list[dict[str, Any]]] = {
        "chat": chats,
        "pairs": [{"prompt": f"{ask} ", "completion": told} for ask, told in turns],
        "alpaca": [{"instruction": ask, "input": "", "output": told} for ask, told in turns],
        "texts": [{"text": f"{ask} {told}"} for ask, told in turns],
    }
    for name, rows in kinds.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder / "base")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "base")
