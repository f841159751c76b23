"""F010: contradictions name both keys with their lines; keys without effect are notices, strict ones."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from fsdp_tune.recipe.read import loader
from fsdp_tune.recipe.rules.contradictions import RULES
from fsdp_tune.recipe.rules.without_effect import INACTIVE
from fsdp_tune.recipe.schedule import SCHEDULE_ARGUMENTS
from fsdp_tune.recipe.schema.keys import Finding, Rule
from fsdp_tune.recipe.schema.optimizers import OPTIMIZERS
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import TRAINING_FIELDS
from fsdp_tune.recipe.schema.unsupported_values import NOT_YET
from tests.recipe.loading import MINIMAL, load, load_with, one_problem, problems, problems_with

CONTRADICTIONS = [
    ("checkpoint:\n  mirror: memory://runs", 4, "not a URL"),
    ("checkpoint:\n  mirror: file:///runs/one/copy\noutput_dir: /runs/one", 4, "is to outlive"),
    ("launch:\n  min_machines: 3\n  num_machines: 2", 4, "line 5"),
    (
        "launch:\n  min_machines: 1\n  shared_directory: false\n  num_machines: 2\n  max_restarts: 1",
        4,
        "line 5",
    ),
    ("fsdp:\n  offload_params: true\n  sharding_strategy: NO_SHARD", 4, "line 5"),
    ("fsdp:\n  reshard_after_forward: true\n  sharding_strategy: SHARD_GRAD_OP", 4, "line 5"),
    ("fsdp:\n  reshard_after_forward: false\n  sharding_strategy: HYBRID_SHARD", 4, "line 5"),
    ("fsdp:\n  offload_params: true\n  reshard_after_backward: false", 5, "line 4"),
    ("fsdp:\n  reshard_after_backward: false\n  version: 1", 4, "line 5"),
    ("precision: {reduce_dtype: bf16}\nfsdp: {sharding_strategy: NO_SHARD}", 3, "line 4"),
    ("fsdp:\n  backward_prefetch: BACKWARD_POST\n  version: 2", 4, "line 5"),
    ("fsdp:\n  backward_prefetch: 2\n  version: 1", 4, "line 5"),
    ("fsdp:\n  forward_prefetch: 2\n  version: 1", 4, "line 5"),
    (
        "fsdp:\n  version: 1\n  activation_checkpointing_offload: true\n  activation_checkpointing: full",
        5,
        "line 4",
    ),
    ("fsdp:\n  version: 1\nkernels:\n  compile: true", 6, "line 4"),
    ("fsdp:\n  version: 1\ntraining:\n  on_nonfinite: skip", 6, "line 4"),
    (
        "fsdp: {activation_checkpointing: selective, activation_checkpointing_offload: "
        "true}\nkernels: {compile: true}",
        3,
        "line 4",
    ),
    ("launch: {device: cpu}\nkernels: {liger: true}", 4, "for CUDA GPUs"),
    ("launch: {device: xpu}\nkernels: {liger: true}", 4, "for CUDA GPUs"),
    ("parallelism: {sp_size: 2}\nfsdp: {version: 1}", 4, "line 3"),
    ("fsdp: {ep_size: 2}\nkernels: {compile: true}", 4, "line 3"),
    ("parallelism: {sp_size: 2}\nkernels: {compile: true}", 4, "line 3"),
    ("parallelism: {sp_size: 2}\nprecision: {mixed_precision: fp8, fp8_recipe: tensorwise}", 4, "line 3"),
    ("parallelism: {sp_size: 2}\nlora: {lora_dropout: 0.1}", 4, "rank that holds the token"),
    ("parallelism: {sp_size: 2}\ntraining: {neftune_noise_alpha: 5}", 4, "length of the row"),
    ("kernels:\n  mlp_slice_tokens: 512\n  compile: true", 5, "one graph"),
    ("kernels: {mlp_slice_tokens: 512}\nprecision: {mixed_precision: fp8}", 4, "one scale"),
    ("kernels: {mlp_slice_tokens: 512}\nfsdp: {activation_checkpointing: selective}", 4, "all slices"),
    ("kernels: {mlp_slice_tokens: 512}\nfsdp: {version: 1}", 3, "needs FSDP2"),
    ("lora: {}\nfsdp: {version: 1}", 4, "line 3"),
    ("lora:\n  use_dora: true\n  init_lora_weights: false", 5, "line 4"),
    ("lora: {r: 8}\nprecision: {mixed_precision: fp8}", 4, "line 3"),
    ("lora:\n  lora_dropout: 0.1\n  target_parameters: [experts.down_proj]", 4, "line 5"),
    ("lora:\n  use_dora: true\n  target_parameters: [experts.down_proj]", 4, "line 5"),
    ("lora: {target_parameters: [experts.down_proj]}\nkernels: {compile: true}", 4, "line 3"),
    ("lora: {target_parameters: [experts.down_proj]}\nkernels: {liger: true}", 4, "line 3"),
    ("lora: {init_lora_weights: pissa}", 3, "change the base"),
    ("quantization: {load: nf4}", 3, "`lora:` is missing"),
    ("lora: {}\nquantization: {}\nmerge: {dtype: keep}", 5, "in 4 bits"),
    ("lora: {}\nquantization: {load: nf4, double_quant: true}", 4, "several ranks"),
    ("quantization: {load: null}", 3, "quantises nothing"),
    ("lora: {}\nquantization: {load: nf4, train: int4}", 4, "holds frozen ones in 4 bits"),
    ("quantization: {train: int4, group_size: 1}", 3, "a scale for each weight"),
    ("lora: {}\nquantization: {train: int8-int4}", 4, "line 3"),
    ("quantization: {train: int4}\nprecision: {mixed_precision: fp8}", 4, "line 3"),
    ("quantization: {train: int4}\nkernels: {mlp_slice_tokens: 512}", 4, "line 3"),
    (
        "quantization: {train: int4}\nkernels: {compile: true}\nprecision: {mixed_precision: bf16}",
        4,
        "scales in fp32",
    ),
    ("quantization: {train: int4}\nmerge: {quantise: true, dtype: fp16}", 4, "rounds weights of bf16"),
    ("launch: {device: cpu}\nkernels: {loss: liger}", 4, "for CUDA GPUs"),
    ("precision: {mixed_precision: fp16}\nkernels: {loss: liger}", 4, "loss scale"),
    ("training: {loss: dft, label_smoothing_factor: 0.1}", 3, "no single target"),
    ("training: {loss: dft}\nkernels: {loss: liger}", 4, "weights each token"),
    ("fsdp: {auto_wrap_policy: MODULE_NAMES_WRAP}", 3, "empty"),
    ("training:\n  warmup_steps: 10\n  max_steps: 10", 4, "line 5"),
    ("training: {eval_strategy: steps}", 3, "no `data.eval`"),
    ("training: {load_best_model_at_end: true}", 3, "no `data.eval`"),
    ("training: {early_stopping: {patience: 1}}", 3, "no `data.eval`"),
    ("training: {save_strategy: best}", 3, "no `data.eval`"),
    ("training: {report_to: [wandbb]}", 3, "`wandbb`"),
    ("training: {optim_args: momentum=0.9}", 3, "does not take"),
    ("training: {optim: sgd, optim_args: momentum=x}", 3, "takes a number"),
    ("training: {optim_args: bf16_stochastic_round=true}", 3, "`model.dtype` is fp32"),
    ("precision: {mixed_precision: fp8}\nfsdp: {version: 1}", 3, "line 4"),
    (
        "precision: {mixed_precision: fp8, fp8_recipe: tensorwise}\nfsdp: {offload_params: true}",
        3,
        "the scale is lost (`fsdp.offload_params` on line 4)",
    ),
    (
        "precision: {mixed_precision: fp8, fp8_recipe: tensorwise}\nfsdp: {reshard_after_forward: 2}",
        3,
        "cannot do with fp8",
    ),
    ("fsdp: {version: 1}\ntraining: {optim_args: state_dtype=bf16}", 4, "line 3"),
    ("training: {push_to_hub: true, hub_strategy: checkpoint}", 3, "once, at the end"),
    ("training: {push_to_hub: true, hub_always_push: true}", 3, "once, at the end"),
    ("training: {push_to_hub: true}\nmerge: {at_end: false}", 3, "`merge.at_end` is false"),
    ("fsdp: {version: 1}\ntraining: {optim: muon}", 4, "flat tensor without rows"),
    ("fsdp: {version: 1}\ntraining: {optim: adafactor}", 4, "flat tensor without rows"),
    ("training: {optim: muon}\nlora: {target_parameters: [experts.down_proj]}", 3, "line 4"),
    ("training: {parameter_groups: [{match: [], learning_rate: 1.0e-3}]}", 3, "match` is empty"),
    ("training: {parameter_groups: [{match: [lm_head.*]}]}", 3, "neither"),
    ("fsdp: {state_dict_type: FULL_STATE_DICT}\ntraining: {optim: adamw_torch_8bit}", 4, "line 3"),
    ("training: {report_to: all}", 3, "`all`"),
    ("training: {lr_scheduler_type: cosine_with_min_lr}", 3, "`min_lr` or `min_lr_rate`"),
    (
        "training: {lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 0.1, "
        "min_lr_rate: 0.1}}",
        3,
        "both set",
    ),
    (
        "training: {lr_scheduler_type: cosine, lr_scheduler_kwargs: {num_cycle: 2}}",
        3,
        "has `num_cycle`, which",
    ),
    ("training: {optim: sgd, adam_beta1: 0.8}", 3, "does not read `training.adam_beta1`"),
    ("training: {lr_scheduler_kwargs: 'num_cycles=2'}", 3, "is text; it takes a mapping"),
    (
        "training: {lr_scheduler_kwargs: {num_cycles: 2}}",
        3,
        "`training.lr_scheduler_type: linear` does not take",
    ),
    ("training: {per_device_train_batch_tokens: 2048}", 3, "`training.global_batch_size` is missing"),
    (
        "training: {global_batch_size: 8, per_device_train_batch_tokens: 2000}",
        3,
        "the longest row would not fit",
    ),
    (
        "training: {global_batch_size: 8, per_device_train_batch_tokens: 6000}",
        3,
        "not a multiple of `data.max_length: 2048`",
    ),
    (
        "training:\n  global_batch_size: 8\n  per_device_train_batch_tokens: 8192\n  "
        "per_device_train_batch_size: 2",
        *(6, "is 2 (`training.per_device_train_batch_tokens` on line 5)"),
    ),
    ("training: {lr_scheduler_type: warmup_stable_decay}", 3, "`num_decay_steps`"),
    ("training: {lr_scheduler_type: cosine, lr_scheduler_kwargs: {num_cycles: many}}", 3, "not a number"),
    (
        "training: {max_steps: 6, lr_scheduler_type: polynomial, lr_scheduler_kwargs: {lr_end: 1}}",
        3,
        "must be below",
    ),
    (
        "training: {max_steps: 6, lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 1}}",
        3,
        "rises to 1",
    ),
    ("fsdp:\n  reshard_after_forward: 2\n  version: 1", 4, "line 5"),
    ("output_dir: runs/{nmae}", 3, "`{nmae}`"),
    ('output_dir: "runs/{seed:>999999999}"', 3, "`{seed:>999999999}`"),
    ('output_dir: "runs/{name.x}"', 3, "`{name.x}`"),
    ('output_dir: "runs/{name"', 3, "`{name`"),
    ("output_dir: ~/runs/x", 3, "~"),
    ('output_dir: "runs\\0x"', 3, r"`\x00`"),
    ('checkpoint: {mirror: "file:///m\\0x"}', 3, r"`\x00`"),
    ("output_dir: $SCRATCH/runs/{name}", 3, "`$SCRATCH`"),
    ("output_dir: runs/${USER}", 3, "`${USER}`"),
    ("launch: {env: {MY_API_KEY: x}}", 3, "secret"),
    ("launch: {env: {HF_TOKEN: x}}", 3, "secret"),
    ("launch: {env: {DB_PASS: x}}", 3, "secret"),
    ("launch: {env: {WANDB_NAME: 0123456789abcdef0123456789abcdef01234567}}", 3, "secret"),
    ("training: {hub_model_id: hf_abcdefghijklmnopqrstuvwxyz}", 3, "a token"),
    ("launch: {env: {FSDP_VERSION: 1}}", 3, "set by the launcher itself"),
    ("launch: {env: {RANK: 1}}", 3, "set by the launcher itself"),
    ("launch: {env: {CUDA_VISIBLE_DEVICES: 0}}", 3, "would hide devices from the ranks only"),
    ("launch: {env: {1A: x}}", 3, "not a name"),
    ('launch: {env: {TZ: "x\\0y"}}', 3, r"`\x00`"),
    ("launch: {device: mps}", 3, "no collectives"),
    ("launch: {device: cpu}\nfsdp: {version: 1, cpu_ram_efficient_loading: true}", 4, "line 3"),
    ("launch: {device: cpu}\nfsdp: {version: 1, offload_params: true}", 4, "line 3"),
]
STREAM = (
    "model: {name_or_path: a}\ndata: {train: [{path: a}], streaming: true, packing: true}\ntraining:\n  "
    "max_steps: 9\n"
)
SCALED = (
    "model: {name_or_path: a, rope_scaling: {rope_type: llama3, factor: 4}}\ndata: {train: [{path: b}]}\n"
)
EVALUATED = "model: {name_or_path: a}\ndata: {train: [{path: b}], eval: {rows: 2}}\n"
_SET = "evaluation:\n  sets: [{path: rows.jsonl, label: sums, metric: exact_match}]\n"
_BY_SCORE = f"{_SET}training:\n  metric_for_best_model: sums/exact_match\n"

OF_EVALUATIONS = [
    ("evaluation:\n  sets: [{path: a.jsonl}, {path: b/a.jsonl}]", "both named `a`"),
    ("evaluation:\n  sets: [{path: a.jsonl}]\n  tasks: [a]", "both named `a`"),
    ("evaluation:\n  sets: [{path: a.jsonl, label: a/b}]", "letters, digits"),
    ("evaluation:\n  sets: [{path: json}]", "data_files` is missing"),
    ("evaluation:\n  sets: [{path: a.jsonl, weight: 2.0}]", "for training rows"),
    ("evaluation:\n  sets: [{path: a.jsonl, loader: mine}]", "for training rows"),
    ("evaluation:\n  sets: [{path: a.jsonl, max_new_tokens: 8}]", "read by exact_match"),
    ("evaluation:\n  task_rows: 8\n  sets: [{path: a.jsonl}]", "there are none"),
    ("evaluation:\n  every: 500", "nothing to evaluate"),
    (f"{_SET}  every: 750", "is not a multiple of `training.save_steps: 500`"),
    (f"{_SET}training: {{save_strategy: 'no'}}", "`training.save_strategy` is no"),
    (f"{_SET}launch: {{num_machines: 2, num_processes: 2, shared_directory: false}}", "no machine has one"),
    (f"{_SET}training: {{metric_for_best_model: sums/perplexity}}", "is not a score"),
    ("training: {metric_for_best_model: sums/exact_match}", "is not a score"),
    (
        f"{_BY_SCORE}  early_stopping: {{}}\ndata: {{train: [{{path: a}}], eval: {{rows: 8}}}}",
        "cannot end the run by it",
    ),
    (
        f"{_BY_SCORE}  save_strategy: best\ndata: {{train: [{{path: a}}], eval: {{rows: 8}}}}",
        "cannot save by it",
    ),
    (
        "evaluation:\n  sets: [{path: a.jsonl}]\ntraining: {metric_for_best_model: a/perplexity, "
        "greater_is_better: true}",
        "would keep the worst",
    ),
    (
        "evaluation:\n  tasks: [wikitext]\ntraining: {metric_for_best_model: wikitext/bits_per_byte}",
        "`training.greater_is_better` is missing",
    ),
    (f"{_BY_SCORE}  greater_is_better: false\n", "is better when it is greater"),
    ("evaluation:\n  tasks: [mine.yaml]", "would run the code"),
    ("evaluation:\n  tasks: [arc_easy, folder/mine]", "would run the code"),
    (
        f"{_SET}  every: 1000\ntraining: {{metric_for_best_model: sums/exact_match, max_steps: 900}}",
        "evaluates no checkpoint of them",
    ),
    (
        f"{_SET}  every: 10\ntraining: {{metric_for_best_model: sums/exact_match, save_strategy: epoch}}",
        "no saved step may be one of them",
    ),
    (
        f"{_SET}  every: 10\ntraining: {{metric_for_best_model: sums/exact_match, save_steps: 0.5}}",
        "no saved step may be one of them",
    ),
]
"""Problems of `evaluation:` after `MINIMAL`, or of what needs its scores."""


COMPLETE = [
    (
        "model: {name_or_path: a, dtype: bf16}\ndata: {train: [{path: b}]}\nfsdp: "
        "{sharding_strategy: HYBRID_SHARD}\n"
        "training: {optim: adamw_torch_8bit, optim_args: bf16_stochastic_round=true}",
        "would drift apart",
    ),
    (
        "model: {name_or_path: a, attn_implementation: flex_attention}\ndata: {train: [{path: "
        "b}]}\nlaunch: {device: cpu}",
        "cannot train on the CPU",
    ),
    (
        "model: {name_or_path: a, attn_implementation: torch_varlen}\ndata: {train: [{path: "
        "b}]}\nlaunch: {device: cpu}",
        "`model.attn_implementation: torch_varlen` cannot train on the CPU",
    ),
    ("model: {name_or_path: a}\ndata: {train: [{path: $DATA/x.jsonl}]}", "`$DATA`"),
    (
        "model: {name_or_path: a}\ndata: {train: [{path: json, data_files: 'https://me:pass@host/x.jsonl'}]}",
        "`data.train[0].data_files` contains",
    ),
    (
        "model: {name_or_path: a, attn_implementation: flash_attention2}\ndata: {train: [{path: b}]}",
        "`flash_attention2`",
    ),
    ("data: {train: [{path: a}]}\nmodel: {}", "`model.name_or_path` is missing"),
    (STREAM.replace("max_steps: 9", "seed: 1"), "`training.max_steps` is missing"),
    (STREAM.replace("packing", "eval: {rows: 5}, packing"), "would hold out"),
    (
        STREAM.replace("packing: true", "packing: false")
        + "  global_batch_size: 2\n  per_device_train_batch_tokens: 2048\n",
        "forms batches",
    ),
    (STREAM.replace("packing", "mixture: {temperature: 2.0}, packing"), "the sizes of the sources"),
    (
        "model: {name_or_path: a}\ndata: {train: [{path: b}]}\nlaunch: {device: cpu}\nkernels: "
        "{experts: sonicmoe}",
        "`kernels.experts: sonicmoe` has kernels for CUDA",
    ),
    (
        "model: {name_or_path: a, dtype: fp32}\ndata: {train: [{path: b}]}\nfsdp: "
        "{sharding_strategy: NO_SHARD}\n"
        "kernels: {experts: sonicmoe}",
        "`kernels.experts: sonicmoe` computes in 16 bits, and without sharding the weights that it "
        "is given are in fp32",
    ),
    (
        "model: {name_or_path: a}\ndata: {train: [{path: b}]}\nprecision: {mixed_precision: "
        "'no'}\nkernels: {experts: sonicmoe}",
        "computes in 16 bits",
    ),
    (
        "model: {name_or_path: a}\ndata: {train: [{path: b}]}\nkernels: {experts: eager, compile: true}",
        "would compile for each set of them",
    ),
    (
        STREAM.replace("packing", "drop_duplicates: true, packing"),
        "`data.drop_duplicates: true` compares all rows",
    ),
    (STREAM.replace("{path: a}", "{path: a, max_rows: 5}"), "`max_rows` has no meaning"),
    (STREAM + "  save_strategy: epoch\n", "has none before the last step"),
    (STREAM.replace("{path: a}", "{path: a, weight: 1}, {path: b}"), "`data.train[1]` has no `weight`"),
    (
        STREAM.replace(
            "packing", "curriculum: [{until_step: 5, weights: [1]}, {until_step: 5, weights: [2]}], packing"
        ),
        "the stage before it",
    ),
    (STREAM.replace("packing", "curriculum: [{until_step: 5, weights: [1, 2]}], packing"), "has 2 values"),
    (
        STREAM.replace("streaming: true", "streaming: false").replace("{path: a}", "{path: a, repeats: 2}"),
        "limits the passes over a stream",
    ),
    ("data: {train: [{path: a}]}\nmodel: {name_or_path: a, from_config: b}", "random weights"),
    ("data: {train: [{path: a}]}\nmodel: {from_config: {model_type: gpt2}}", "`model.tokenizer` is missing"),
    (
        "data: {train: [{path: a}]}\nmodel: {from_config: {n_embd: 4}, tokenizer: t}",
        "`model_type` is missing",
    ),
    ("model: {name_or_path: a}", "`data.train` is missing"),
    ("model: {name_or_path: a}\ndata: {train: []}", "`data.train` is missing"),
    ("model: {name_or_path: a}\ndata: {train: [{path: json}]}", "`data.train[0].data_files` is missing"),
    ("model: {name_or_path: a}\ndata: {train: [{path: b}], eval: []}", "empty list"),
    (
        "model: {name_or_path: a}\ndata: {train: [{path: b}], eval: [{path: c, label: x}, {path: d, "
        "label: x}]}",
        "two evaluation sets",
    ),
    (
        "model: {name_or_path: a}\ndata: {train: [{path: b, label: x, weight: 1}, {path: c, label: "
        "x, weight: 1}]}",
        "two training sources",
    ),
    (
        "model: {name_or_path: a}\ndata: {train: [{path: b, label: '1', weight: 1}, {path: c, weight: 1}]}",
        "the label `1` is the name of source 1",
    ),
    (
        "model: {name_or_path: a, dtype: bf16}\ndata: {train: [{path: b}]}\nprecision: "
        "{mixed_precision: fp16}",
        "bf16 weights",
    ),
    (EVALUATED + "training: {metric_for_best_model: accuracy}", "is not measured"),
    (EVALUATED + "training: {metric_for_best_model: loss, greater_is_better: true}", "keep the worst"),
    (EVALUATED + "training: {load_best_model_at_end: true, greater_is_better: true}", "eval_loss chooses"),
    (EVALUATED + "training: {early_stopping: {}, eval_strategy: no}", "needs evaluations"),
    (
        EVALUATED + "training: {load_best_model_at_end: true, eval_strategy: epoch, save_strategy: steps}",
        "a save with every evaluation",
    ),
    (
        EVALUATED
        + "training: {load_best_model_at_end: true, early_stopping: {}, eval_steps: 10, save_steps: 20}",
        "`eval_steps` is 10, and `save_steps` is 20",
    ),
    (EVALUATED + "training: {load_best_model_at_end: true, save_strategy: no}", "`save_strategy` is no"),
    (
        "model: {name_or_path: a}\ndata: {train: [{path: b}], max_length: 512, packing: true}\n"
        "training: {global_batch_size: 8, per_device_train_batch_tokens: 1024}",
        "every row is as long as",
    ),
    (
        "model: {name_or_path: a}\ndata: {train: [{path: b}], max_length: 1000}\nparallelism: {sp_size: 16}",
        "write 992 or 1008",
    ),
    (
        "model: {name_or_path: a}\ndata: {train: [{path: b}], pad_to_multiple_of: 8}\nparallelism: "
        "{sp_size: 16}",
        "is not a multiple of 16",
    ),
    (
        "model: {name_or_path: a, attn_implementation: flex_attention}\ndata: {train: [{path: "
        "b}]}\nparallelism: {sp_size: 2}",
        "does not support `model.attn_implementation: flex_attention`",
    ),
    (
        "model: {from_config: {model_type: gpt2}, tokenizer: t}\ndata: {train: [{path: b}]}\nlora: {}",
        "starts from random weights",
    ),
    (
        "model: {name_or_path: a, freeze: ['*wte*']}\ndata: {train: [{path: b}]}\nlora: {}",
        "`model.freeze` has no effect with `lora:`",
    ),
    (SCALED.replace("factor: 4", "factor: 4, beta_fast: 16"), "does not read `beta_fast`"),
    (
        SCALED.replace("factor: 4", "factor: 4, low_freq_factor: 4.0"),
        "`low_freq_factor` is 4 and `high_freq_factor` is 4",
    ),
    (
        SCALED.replace("model: {n", "model: {config_overrides: {max_position_embeddings: 4096}, n"),
        "sets `max_position_embeddings`",
    ),
    *(
        (f"model: {{name_or_path: gpt2}}\n{extra}" if "\ndata:" in extra else MINIMAL + extra, words)
        for extra, words in OF_EVALUATIONS
    ),
]


FROZEN = (
    "fsdp: {version: 1}\ndata: {train: [{path: some/set}]}\nmodel: {name_or_path: gpt2, freeze: "
    "['*wte*'], frozen_dtype: bf16}"
)


def test_frozen_parameters_of_another_dtype_are_refused_under_fsdp1() -> None:
    problem = one_problem(problems(FROZEN))
    assert problem.message.startswith("`model.frozen_dtype: bf16` with `model.dtype: fp32` needs FSDP2")
    assert load(FROZEN.replace("bf16", "fp32"))


@pytest.mark.parametrize(("extra", "line", "words"), CONTRADICTIONS)
def test_contradiction_is_reported_with_both_lines(extra: str, line: int, words: str) -> None:
    problem = one_problem(problems_with(extra))
    assert problem.where.line == line
    assert words in problem.message


@pytest.mark.parametrize(("text", "words"), COMPLETE)
def test_incomplete_recipe_is_reported_with_what_is_missing(text: str, words: str) -> None:
    problem = one_problem(problems(text))
    assert words in f"{problem.message}; {problem.hint}"


def test_every_finding_of_every_rule_has_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: set[tuple[str, int]] = set()

    def recorded(rule: Rule) -> Rule:
        def run(recipe: Recipe) -> Iterator[Finding]:
            found: Any = rule(recipe)
            for finding in found:
                reached.add((rule.__name__, found.gi_frame.f_lineno))
                yield finding

        return run

    monkeypatch.setattr(loader, "RULES", tuple(map(recorded, RULES)))
    for text in (FROZEN, *(MINIMAL + extra for extra, *_ in CONTRADICTIONS), *(text for text, _ in COMPLETE)):
        problems(text)
    for rule in RULES:
        lines, first = inspect.getsourcelines(rule)
        yields = [node for node in ast.walk(ast.parse("".join(lines))) if isinstance(node, ast.Yield)]
        spans = [range(first + node.lineno - 1, first + (node.end_lineno or 0)) for node in yields]
        assert [span for span in spans if not any((rule.__name__, line) in reached for line in span)] == [], (
            rule.__name__
        )


def test_both_precision_flags_of_the_trainer_are_refused() -> None:
    found = problems_with("training:\n  bf16: true\n  fp16: true\n")
    assert [(p.code, p.where.line) for p in found] == [("owned-field", 4), ("owned-field", 5)]


INACTIVE_EXAMPLES = [
    "fsdp: {min_num_params: 5}",
    "fsdp: {modules_to_wrap: [a]}",
    "fsdp: {auto_wrap_policy: NO_WRAP, transformer_layer_cls_to_wrap: A}",
    "fsdp: {activation_checkpointing_every: 2}",
    "fsdp: {activation_checkpointing_offload: true}",
    "fsdp: {sharding_strategy: NO_SHARD, version: 2}",
    "parallelism: {dp_shard_size: 1}\nfsdp: {sharding_strategy: NO_SHARD}",
    "training: {gradient_accumulation_steps: 2}\nfsdp: {sharding_strategy: NO_SHARD, "
    "reshard_after_backward: false}",
    "fsdp: {reshard_after_backward: false}",
    "fsdp: {reshard_after_backward: auto}\ntraining: {gradient_accumulation_steps: 1}",
    "training: {max_steps: 5, num_train_epochs: 2}",
    "training: {save_strategy: epoch, save_steps: 5}",
    "training: {eval_steps: 5}",
    "training: {per_device_eval_batch_size: 5}",
    "training: {hub_model_id: a/b}",
    "precision: {fp8_recipe: tensorwise}",
    "launch: {main_process_ip: 10.0.0.1}",
    "launch: {num_machines: 2, num_processes: 8, min_machines: 1}",
    "launch: {replacement_timeout: 1m}",
    "launch: {shared_directory: false}",
    "launch: {device: cpu, enable_cpu_affinity: true}",
    "merge: {adapter: both}",
    "merge: {quantise: true}",
    "quantization: {train: int4, scales: bf16}",
    "lora: {}\nquantization: {group_size: 16}",
]


@pytest.mark.parametrize("extra", INACTIVE_EXAMPLES)
def test_key_without_effect_is_one_strict_notice_with_its_line(extra: str) -> None:
    notice = one_problem(load_with(extra).notices)  # type: ignore[arg-type]
    assert (notice.code, notice.strict) == ("inactive-key", True)  # type: ignore[attr-defined]
    assert notice.where.line is not None
    assert "has no effect: " in notice.message


def test_weight_by_has_no_effect_without_weights() -> None:
    text = "model: {name_or_path: a}\ndata: {train: [{path: b%s}, {path: c%s}], mixture: {weight_by: tokens}}"
    assert [notice.code for notice in load(text % ("", "")).notices] == ["inactive-key"]
    assert load(text % (", weight: 1", ", weight: 2")).notices == ()


def test_end_of_a_mixture_has_no_effect_without_weights_or_in_a_stream() -> None:
    text = (
        "model: {name_or_path: a}\ntraining: {max_steps: 3}\n"
        "data: {train: [{path: b%s}, {path: c%s}], mixture: {stopping_strategy: first_exhausted}%s}"
    )
    weights = (", weight: 1", ", weight: 2")
    assert [notice.code for notice in load(text % ("", "", "")).notices] == ["inactive-key"]
    streamed = load(text % (*weights, ", streaming: true"))
    assert [notice.code for notice in streamed.notices] == ["inactive-key"]
    assert load(text % (*weights, "")).notices == ()


def test_key_at_its_default_gives_no_notice() -> None:
    assert load_with("fsdp: {sharding_strategy: NO_SHARD}").notices == ()


@pytest.mark.parametrize("row", INACTIVE, ids=lambda row: row.keys[0])
def test_every_inactive_row_can_be_active(row: object) -> None:
    """A row that is always true would call a working key dead."""
    texts = [
        "model: {name_or_path: a}\ndata: {train: [{path: b, weight: 1}, {path: c, weight: 2}],"
        " eval: {rows: 2}, packing: true, on_bad_row: skip}\n"
        f"fsdp: {{activation_checkpointing: full, auto_wrap_policy: {policy}}}\n"
        "launch: {num_machines: 2, max_restarts: 1, min_machines: 1}\n"
        "training: {eval_strategy: steps, gradient_accumulation_steps: 2}\nprecision: {mixed_precision: fp8}"
        for policy in ("SIZE_BASED_WRAP", "MODULE_NAMES_WRAP\n  , modules_to_wrap: [a]")
    ]
    recipes = [load(text).recipe for text in texts] + [
        load_with("fsdp: {sharding_strategy: NO_SHARD}").recipe
    ]
    # none of the recipes streams, adapts or uploads
    never_here = {
        "data.shuffle_buffer_size",
        "merge.adapter",
        "training.hub_model_id",
    }
    never_here |= {"quantization.scales", "quantization.group_size", "merge.quantise"}  # or quantises
    assert row.keys[0] in never_here or not all(row.when(recipe) for recipe in recipes)  # type: ignore[attr-defined]


def test_pure_bf16_weights_give_a_notice() -> None:
    loaded = load("model: {name_or_path: a, dtype: bf16}\ndata: {train: [{path: b}]}")
    assert [(notice.code, notice.strict) for notice in loaded.notices] == [("pure-bf16", False)]
    assert "twice the memory" in (loaded.notices[0].hint or ""), "16 bytes a parameter against 8"
    rounded = load(
        "model: {name_or_path: a, dtype: bf16}\ndata: {train: [{path: b}]}\ntraining: {optim_args: "
        "bf16_stochastic_round=true}"
    )
    assert rounded.notices == ()


NOT_YET_EXAMPLES = {
    "training.debug": "training: {debug: underflow_overflow}",
    "training.lr_scheduler_type": "training: {lr_scheduler_type: reduce_lr_on_plateau}",
    "parallelism.tp_size": "parallelism: {tp_size: 2}",
    "parallelism.cp_size": "parallelism: {cp_size: 2}",
}


@pytest.mark.parametrize("name", sorted(set(TRAINING_FIELDS.enums["OptimizerNames"]) - OPTIMIZERS.keys()))
def test_other_optimizers_of_transformers_are_refused_with_the_reason(name: str) -> None:
    problem = one_problem(
        problems(
            f"model: {{name_or_path: gpt2}}\ndata: {{train: [{{path: a}}]}}\ntraining: {{optim: {name}}}\n"
        )
    )
    assert (problem.code, problem.where.key) == ("not-yet", "training.optim")
    assert f"`training.optim: {name}`" in problem.message


@pytest.mark.parametrize("row", NOT_YET, ids=lambda row: row.key)
def test_unsupported_key_is_refused(row: object) -> None:
    optimizers = [name for name in TRAINING_FIELDS.enums["OptimizerNames"] if name not in row.works]  # type: ignore[attr-defined]
    extra = (
        f"training: {{optim: {min(optimizers)}}}"
        if row.key == "training.optim"
        else NOT_YET_EXAMPLES[row.key]
    )  # type: ignore[attr-defined]
    head = "model: {name_or_path: gpt2}\n" + (
        "" if extra.startswith("data:") else "data: {train: [{path: a}]}\n"
    )
    problem = one_problem(problems(head + extra))
    assert (problem.code, problem.where.key) == ("not-yet", row.key)  # type: ignore[attr-defined]
    assert problem.where.line is not None
    assert problem.hint


def test_arguments_of_schedules_are_those_of_transformers() -> None:
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    ours = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    for kind, function in TYPE_TO_SCHEDULER_FUNCTION.items():
        if kind.value not in ("reduce_lr_on_plateau", "greedy"):
            assert (
                set(SCHEDULE_ARGUMENTS[kind.value]) == set(inspect.signature(function).parameters) - ours
            ), kind
