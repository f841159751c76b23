"""Pairs of sides for `compare`, with one planted cause or spelled otherwise: the table of
docs/evidence/comparison.md."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import fsdp_tune
from fsdp_tune.jobs.compare_answer import CompareAnswer
from fsdp_tune.jobs.options import CompareOptions
from fsdp_tune.run.records import ReadBack
from tests.jobs.sides import LLAMA
from tests.pages.written import training_line, written

RECIPE: dict[str, Any] = {
    "model": {
        "name_or_path": "base",
        "tokenizer": "builtin:arithmetic",
        "tokens": {"add": ["<|im_start|>", "<|im_end|>"]},
    },
    "data": {"train": [{"path": "chat.jsonl"}], "max_length": 128, "chat_template": "chatml"},
    "precision": {"mixed_precision": "no"},
    "training": {
        "global_batch_size": 4,
        "per_device_train_batch_size": 2,
        "max_steps": 30,
        "learning_rate": 1e-3,
        "report_to": [],
    },
    "launch": {"device": "cpu", "num_processes": 2},
}


def write_sides(folder: Path) -> None:
    """Write a recipe, its rows, copies of them, and the configuration of its model."""
    (folder / "base").mkdir()
    (folder / "base" / "config.json").write_text(json.dumps(LLAMA))
    turns = [
        [
            {"role": "user", "content": f"what is {n}?"},
            {"role": "assistant", "content": "it is " + "very " * (n % 7) + f"{n}"},
        ]
        for n in range(24)
    ]
    rows = [{"messages": turn + turns[(at + 1) % len(turns)]} for at, turn in enumerate(turns)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "spaced.jsonl").write_text(
        "".join(json.dumps(row, separators=(" , ", " : ")) + "\n" for row in rows)
    )
    shutil.copy(folder / "chat.jsonl", folder / "copy.jsonl")
    (folder / "a.yaml").write_text(yaml.safe_dump(RECIPE))
    training = RECIPE["training"] | {"data_seed": 1}
    (folder / "lora.yaml").write_text(yaml.safe_dump(RECIPE | {"lora": {"r": 8}, "training": training}))
    evaluated = RECIPE["training"] | {"eval_strategy": "steps", "eval_steps": 10, "save_steps": 10}
    (folder / "eval.yaml").write_text(
        yaml.safe_dump(RECIPE | {"data": RECIPE["data"] | {"eval": {"rows": 4}}, "training": evaluated})
    )
    (folder / "best.yaml").write_text(
        yaml.safe_dump(
            RECIPE
            | {
                "data": RECIPE["data"] | {"eval": {"rows": 4}},
                "training": evaluated | {"load_best_model_at_end": True},
            }
        )
    )
    (folder / "warm.yaml").write_text(
        yaml.safe_dump(RECIPE | {"training": RECIPE["training"] | {"warmup_steps": 2}})
    )
    (folder / "kept.yaml").write_text(yaml.safe_dump(RECIPE | {"data": RECIPE["data"] | {"shuffle": False}}))
    freeze = {"freeze": ["model.embed_tokens.*"]}
    (folder / "frozen.yaml").write_text(yaml.safe_dump(RECIPE | {"model": RECIPE["model"] | freeze}))
    tokens = RECIPE["model"]["tokens"] | {"eos": "<|im_end|>"}
    (folder / "turns.yaml").write_text(
        yaml.safe_dump(RECIPE | {"model": RECIPE["model"] | {"tokens": tokens}})
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA), dtype=torch.float32)
    for name in ("weighted", "copied"):
        model.save_pretrained(folder / name)
    (folder / "weighted.yaml").write_text(
        yaml.safe_dump(RECIPE | {"model": RECIPE["model"] | {"name_or_path": "weighted"}})
    )


RECIPES = [
    ("data.chat_template=zephyr", "tokens", "data.chat_template"),
    ("data.loss_on=last_assistant", "labels", "data.loss_on"),
    ("data.packing=true", "rows", "data.packing"),
    ("data.max_length=32", "rows", "data.max_length"),
    ("data.eval={rows: 8}", "rows", "data.eval"),
    ("data.train=[{path: chat.jsonl, max_rows: 20}]", "tokens", "data.train[0].max_rows"),
    ("training.global_batch_size=8", "batch", "training.global_batch_size"),
    ("training.data_seed=7", "order", "training.data_seed"),
    ("data.shuffle=false", "order", "data.shuffle"),
    ("model.dtype=bf16", "dtypes", "model.dtype"),
    ("model.freeze=['model.embed_tokens.*']", "dtypes", "model.freeze"),
    ("model.config_overrides={rope_theta: 500000.0}", "model", "model.config_overrides.rope_theta"),
    ("precision.mixed_precision=bf16", "logits", "precision.mixed_precision"),
    ("training.label_smoothing_factor=0.1", "row_losses", "training.label_smoothing_factor"),
    ("model.config_overrides={attention_dropout: 0.5}", "model", "model.config_overrides.attention_dropout"),
    ("training.max_grad_norm=0.25", "clipping", "training.max_grad_norm"),
    ("training.learning_rate=2e-3", "rate", "training.learning_rate"),
    ("training.lr_scheduler_type=cosine", "rate", "training.lr_scheduler_type"),
    ("training.warmup_steps=5", "rate", "training.warmup_steps"),
    ("training.weight_decay=0.1", "update", "training.weight_decay"),
    ("training.adam_beta2=0.95", "update", "training.adam_beta2"),
    ("training.optim=sgd", "update", "training.optim"),
    (
        "training.parameter_groups=[{match: ['*norm*'], weight_decay: 0.1}]",
        "update",
        "training.parameter_groups",
    ),
]
"""(`--set` of B, first stage, its cause)."""
ADAPTERS = [
    ("lora.lora_alpha=8", "gradients"),
    ("lora.r=4", "model"),
    ("training.seed=7", "weights"),
    ("lora.use_dora=true", "model"),
    ("lora.use_rslora=true", "gradients"),
    ("lora.lora_dropout=0.3", "gradients"),
    ("lora.target_modules=[q_proj]", "model"),
    ("lora.init_lora_weights=gaussian", "weights"),
]
MORE = [
    ("training.adam_epsilon=1e-4", "update", "training.adam_epsilon"),
    ("training.optim=muon", "update", "training.optim"),
    ("training.optim_args=state_dtype=bf16", "update", "training.optim_args"),
    (
        "training.parameter_groups=[{match: ['*q_proj*'], learning_rate: 1e-5}]",
        "update",
        "training.parameter_groups",
    ),
    ("model.rope_scaling={rope_type: linear, factor: 2.0}", "logits", "model.rope_scaling"),
    (
        "model.config_overrides={tie_word_embeddings: true}",
        "model",
        "model.config_overrides.tie_word_embeddings",
    ),
    ("model.freeze=['model.layers.3.*']", "dtypes", "model.freeze"),
    ("data.train=[{path: chat.jsonl, max_rows: 23}]", "tokens", "data.train[0].max_rows"),
]
"""As `RECIPES`; slow, since the same laws have cheaper pairs there."""
UNSEEN: list[tuple[str, tuple[str, ...]]] = [
    ("eval.yaml", ("training.load_best_model_at_end=true",)),
    ("eval.yaml", ("training.metric_for_best_model=loss",)),
    ("best.yaml", ("training.eval_steps=5", "training.save_steps=5")),
    ("a.yaml", ("merge.dtype=bf16",)),
    ("a.yaml", ("training.tf32=true",)),
    ("a.yaml", ("launch.env={NVIDIA_TF32_OVERRIDE: '1'}",)),
    ("a.yaml", ("training.on_nonfinite=skip",)),
    ("a.yaml", ("training.neftune_noise_alpha=5",)),
    ("a.yaml", ("model.tokens.pad=<|im_end|>",)),
    ("eval.yaml", ("training.early_stopping={patience: 1}",)),
]
"""(Recipe, `--set` of B): keys that change the result, which no stage shows."""
SPELLINGS: list[tuple[str, str, tuple[str, ...]]] = [
    ("ranks, with the same global batch", "a.yaml", ("launch.num_processes=1",)),
    (
        "four ranks with half the micro-batch",
        "a.yaml",
        ("launch.num_processes=4", "training.per_device_train_batch_size=1"),
    ),
    ("micro-batches of one row", "a.yaml", ("training.per_device_train_batch_size=1",)),
    ("padding to another multiple", "a.yaml", ("data.pad_to_multiple_of=16",)),
    ("the same bytes at another path", "a.yaml", ("data.train=[{path: copy.jsonl}]",)),
    ("the same rows with other white space", "a.yaml", ("data.train=[{path: spaced.jsonl}]",)),
    ("all rows by their number", "a.yaml", ("data.train=[{path: chat.jsonl, max_rows: 24}]",)),
    ("a longer max_length that no row reaches", "a.yaml", ("data.max_length=256",)),
    ("end of text where the template ends turns", "turns.yaml", ("data.append_eos=false",)),
    ("epochs in place of steps", "a.yaml", ("training.max_steps=-1", "training.num_train_epochs=5")),
    ("warm-up as a share of the steps", "warm.yaml", ("training.warmup_steps=0.05",)),
    ("a copy of the model", "weighted.yaml", ("model.name_or_path=copied",)),
    ("another output directory", "a.yaml", ("output_dir=elsewhere",)),
    ("logging and saving", "a.yaml", ("training.logging_steps=1", "training.save_steps=7")),
    ("evaluations that choose nothing", "eval.yaml", ("training.eval_steps=5",)),
    ("transport of NCCL", "a.yaml", ("launch.env={NCCL_DEBUG: INFO}",)),
    ("another strategy", "a.yaml", ("fsdp.sharding_strategy=SHARD_GRAD_OP",)),
    ("recomputation", "a.yaml", ("fsdp.activation_checkpointing=full",)),
    (
        "defaults of TrainingArguments written out",
        "a.yaml",
        (
            "training.weight_decay=0.0",
            "training.adam_beta1=0.9",
            "training.max_grad_norm=1.0",
            "training.lr_scheduler_type=linear",
        ),
    ),
    ("Adam's update without the fused kernel", "a.yaml", ("training.optim=adamw_torch",)),
    (
        "the same parameters frozen by another pattern",
        "frozen.yaml",
        ("model.freeze=['model.embed_tokens.weight']",),
    ),
    (
        "a group of parameters with the values of the others",
        "a.yaml",
        ("training.parameter_groups=[{match: ['*norm*'], weight_decay: 0.0}]",),
    ),
    (
        "all linear layers by name",
        "lora.yaml",
        ("lora.target_modules=[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]",),
    ),
    ("sequence parallelism", "a.yaml", ("parallelism.sp_size=2",)),
    ("a format that is recognised", "a.yaml", ("data.format=messages",)),
    ("another seed of an order that is kept", "kept.yaml", ("training.data_seed=9",)),
]
"""(What differs, recipe, `--set` of B): equal."""


def compare_recipes(recipe: str, *overrides: str, **options: Any) -> CompareAnswer:
    """Compare a recipe of `write_sides`, in the working directory, with itself under overrides."""
    return fsdp_tune.compare(recipe, recipe, CompareOptions(**options), overrides=overrides)


Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class RunPair:
    name: str
    stage: str | None
    """The first that differs; None: the runs are equal."""
    cause: str = ""
    """In the text of the cause."""
    change: Callable[[Lines], Lines] | None = None
    """Of the lines of B."""
    run: Callable[[int], dict[str, Any]] = lambda _: {}
    """Arguments of `written` for A (0) and B (1)."""
    order: tuple[str, str] = ("o1", "o1")
    verdict: str = ""

    @property
    def expected(self) -> str:
        return self.verdict or ("equal" if self.stage is None else "different")


def lines_of_run() -> Lines:
    """Return the lines of a run of 20 steps with an evaluation every ten."""
    found: Lines = []
    for step in range(1, 21):
        found.append(training_line(step))
        if step % 10 == 0:
            found.append(
                {
                    "step": step,
                    "time": 0.0,
                    "eval_loss": 4.0 / step,
                    "eval_code_loss": 3.0 / step,
                    "eval_seconds": 1.0,
                }
            )
    return found


def _changed(kind: str, field: str, change: Callable[[Any], Any], first: int = 1) -> Callable[[Lines], Lines]:
    return lambda lines: [
        line | {field: change(line[field])}
        if kind in line and field in line and line["step"] >= first
        else line
        for line in lines
    ]


def _joined(lines: Lines) -> Lines:
    """Return the lines of the same run with `logging_steps: 2`."""
    training = [line for line in lines if "loss" in line]
    pairs = [
        second | {"supervised_tokens": 1000, "loss": (first["loss"] + second["loss"]) / 2}
        for first, second in zip(training[::2], training[1::2], strict=True)
    ]
    return [*pairs, *(line for line in lines if "eval_loss" in line)]


def _later(lines: Lines) -> Lines:
    return [line | {"step": line["step"] + 100} for line in lines]


def _drifted(line: dict[str, Any]) -> dict[str, Any]:
    return line | {"loss": line["loss"] * (1 + 1e-4 * line["step"])} if "loss" in line else line


def _worlds(which: int) -> dict[str, Any]:
    return {"per_device_train_batch_size": 4 - 2 * which}


HUB = {"name_or_path": "org/model", "tokenizer": "builtin:arithmetic"}
RUNS = (
    RunPair(
        "other bytes of the data",
        "data",
        "the files of the data",
        run=lambda which: {"data_key": f"k{which}"},
    ),
    RunPair("another order of the rows", "data_order", "", order=("o1", "o2")),
    RunPair(
        "other weights of the base at one path",
        "base",
        "its weight files",
        run=lambda which: {"model": HUB, "base": f"blake2b:{which}"},
    ),
    RunPair(
        "300 more trained tokens on each line",
        "steps",
        "",
        _changed("loss", "supervised_tokens", lambda count: count + 300),
    ),
    RunPair(
        "one token more from step 7 on", "steps", "", _changed("loss", "tokens", lambda count: count + 1, 7)
    ),
    RunPair(
        "a rate that is 0.05 % off",
        "steps",
        "schedule",
        _changed("loss", "learning_rate", lambda rate: rate * 1.0005),
    ),
    RunPair(
        "a loss from step 12 on",
        "steps",
        "environments are equal",
        _changed("loss", "loss", lambda loss: loss + 0.01, 12),
    ),
    RunPair("a loss that is 0.3 % off", "steps", "", _changed("loss", "loss", lambda loss: loss * 1.003, 3)),
    RunPair(
        "a gradient norm at step 5", "steps", "", _changed("loss", "grad_norm", lambda norm: norm * 1.01, 5)
    ),
    RunPair("an infinite gradient norm", "steps", "", _changed("loss", "grad_norm", lambda _: "inf", 9)),
    RunPair(
        "steps without an update",
        "steps",
        "",
        lambda lines: [line | {"skipped_steps": 2} if line["step"] > 5 else line for line in lines],
    ),
    RunPair("a loss that drifts", "steps", "", lambda lines: [_drifted(line) for line in lines]),
    RunPair(
        "lines after a resume that differ",
        "steps",
        "",
        lambda lines: [*lines[:12], *map(_drifted, lines[8:])],
    ),
    RunPair("a loss that is NaN", "steps", "", _changed("loss", "loss", lambda _: "nan", 9)),
    RunPair(
        "an evaluation at one step",
        "evaluations",
        "",
        _changed("eval_loss", "eval_loss", lambda loss: loss + 0.5, 20),
    ),
    RunPair(
        "an evaluation of one set",
        "evaluations",
        "",
        _changed("eval_loss", "eval_code_loss", lambda loss: loss + 0.1, 10),
    ),
    RunPair(
        "another torch and another loss",
        "steps",
        "torch",
        _changed("loss", "loss", lambda loss: loss * 1.01, 2),
        run=lambda which: {"torch": f"2.{which}"},
    ),
)
EQUAL_RUNS = (
    RunPair("the same run", None),
    RunPair("logging every two steps", None, change=_joined, run=lambda which: {"logging_steps": 1 + which}),
    RunPair(
        "other ranks, whose sums round otherwise",
        None,
        change=_changed("loss", "loss", lambda loss: loss * (1 + 2e-6)),
        run=_worlds,
    ),
    RunPair("a run that ended half-way", None, change=lambda lines: lines[:11]),
    RunPair("lines of a resume that repeat others", None, change=lambda lines: [*lines[:12], *lines[8:]]),
    RunPair(
        "other throughput and time",
        None,
        change=_changed("loss", "tokens_per_second_per_device", lambda rate: rate * 3),
    ),
    RunPair(
        "evaluations in one run alone", None, change=lambda lines: [line for line in lines if "loss" in line]
    ),
    RunPair(
        "a line of the file lost", None, change=lambda lines: [line for line in lines if line["step"] != 6]
    ),
)
NOT_COMPARABLE = (
    RunPair("no lines", None, change=lambda _: [], verdict="not_comparable"),
    RunPair(
        "lines at other steps",
        None,
        change=lambda lines: [line | {"step": line["step"] + 100} for line in lines],
        verdict="not_comparable",
    ),
)


def compare_run_pair(pair: RunPair, folder: Path) -> CompareAnswer:
    """Write both runs of a pair into a folder and compare them."""
    lines = lines_of_run()
    for which, name in enumerate(("one", "two")):
        own = pair.change(lines) if which and pair.change is not None else lines
        run = written(folder / name, own, **{"logging_steps": 1} | pair.run(which))
        ReadBack.from_dict(
            {"ranks": [], "differences": [], "warnings": [], "data_order_digest": pair.order[which]}
        ).write(run.readback_json)
    return fsdp_tune.compare(folder / "one", folder / "two")
