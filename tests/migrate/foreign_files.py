"""Configurations of other trainers, in the style of their public examples: (name of the file, its text) by
tool."""

from __future__ import annotations

AXOLOTL = """\
# LoRA of a small model on two data sets
base_model: Qwen/Qwen2.5-1.5B  # the base, not Instruct
model_type: AutoModelForCausalLM
load_in_8bit: false
load_in_4bit: true
strict: false

# rows
chat_template: qwen_25
datasets:
  - path: acme/support-chats
    type: chat_template
    field_messages: conversations
    message_property_mappings:
      role: from
      content: value
    split: train
  - path: data/answers.jsonl
    ds_type: json
    type: alpaca
dataset_prepared_path: last_run_prepared
val_set_size: 0.02
output_dir: ./outputs/qlora

adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true

sequence_len: 4096
sample_packing: true
eval_sample_packing: false
pad_to_sequence_len: true
plugins:
  - axolotl.integrations.liger.LigerPlugin
liger_rope: true
liger_fused_linear_cross_entropy: true

wandb_project: support
wandb_watch:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: cosine
cosine_min_lr_ratio: 0.1
learning_rate: 0.0002  # higher than in the paper
bf16: auto
gradient_checkpointing: offload
warmup_ratio: 0.05
evals_per_epoch: 4
saves_per_epoch: 1
some_new_option: 3
special_tokens:
  pad_token: "<|endoftext|>"
  bos_token: "<s>"
fsdp_config:
  fsdp_version: 2
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Qwen2DecoderLayer
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_unheard_of: 1
"""
TRL = """\
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: trl-lib/Capybara
dataset_test_split: test
eval_strategy: steps
eval_steps: 100
learning_rate: 2.0e-4
num_train_epochs: 1
packing: true
max_length: 2048
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
gradient_checkpointing: true
assistant_only_loss: true
eos_token: <|im_end|>
use_peft: true
lora_r: 32
lora_target_modules: [q_proj, v_proj]
dtype: bfloat16
report_to: none
model_init_kwargs:
  attn_implementation: sdpa
"""
TRL_COMMAND = """\
#!/bin/bash
# two GPUs
export WANDB_PROJECT=capybara
GPUS=2
CUDA_VISIBLE_DEVICES=0,1 accelerate launch --config_file fsdp2.yaml --num_processes $GPUS \\
    trl/scripts/sft.py \\
    --model_name_or_path Qwen/Qwen2.5-0.5B \\
    --dataset_name trl-lib/Capybara \\
    --per_device_train_batch_size 4 \\
    --gradient_accumulation_steps $(expr 32 / $GPUS) \\
    --learning_rate=2.0e-5 --packing \\
    --eval_strategy no --output_dir out 2>&1 | tee log
"""
LLAMA_FACTORY = """\
### model
model_name_or_path: Qwen/Qwen2.5-7B-Instruct
trust_remote_code: true

### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
deepspeed: examples/deepspeed/ds_z3_config.json

### dataset
dataset: answers,chats
template: qwen
cutoff_len: 2048
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16

### output
output_dir: saves/qwen/lora
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
report_to: none

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
val_size: 0.1
eval_steps: 500
neat_packing: true
"""
DATASET_INFO = """\
{
  "answers": {"file_name": "answers.json", "columns": {"prompt": "question", "response": "output"}},
  "chats": {
    "hf_hub_url": "acme/chats",
    "subset": "en",
    "formatting": "sharegpt",
    "columns": {"messages": "messages", "tools": "tools"},
    "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "bot"}
  },
  "unused": {"file_name": "x.json"}
}
"""
LLAMA_FACTORY_JSON = (
    '{"model_name_or_path": "gpt2", "stage": "pt", "finetuning_type": "full", "dataset": "wiki", '
    '"cutoff_len": 1024, "fp16": true}\n'
)
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_activation_checkpointing: true
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 16
main_process_ip: 10.0.0.1
main_process_port: 29500
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
use_cpu: false
"""
TORCHTUNE = """\
output_dir: /tmp/out  # change it
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: /models/llama/original/tokenizer.model
  max_seq_len: 8192
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  apply_lora_to_output: False
  lora_rank: 8
  lora_alpha: 16
  lora_dropout: 0.0
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /models/llama/
  checkpoint_files: [model-00001-of-00002.safetensors, model-00002-of-00002.safetensors]
  recipe_checkpoint: null
  output_dir: ${output_dir}
  model_type: LLAMA3
resume_from_checkpoint: False
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  packed: False
  split: train[:95%]
seed: 7
shuffle: True
optimizer:
  _component_: torch.optim.AdamW
  fused: True
  weight_decay: 0.01
  lr: 3e-4
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
epochs: 2
max_steps_per_epoch: 500
batch_size: 2
gradient_accumulation_steps: 8
clip_grad_norm: null
compile: False
metric_logger:
  _component_: torchtune.training.metric_logging.WandBLogger
  project: torchtune
  log_dir: ${output_dir}/logs
log_every_n_steps: 1
log_peak_memory_stats: True
device: cuda
dtype: bf16
enable_activation_checkpointing: True
enable_activation_offloading: False
profiler:
  _component_: torchtune.training.setup_torch_profiler
  enabled: False
"""
SWIFT = """\
# 22 GiB
NPROC_PER_NODE=2 \\
CUDA_VISIBLE_DEVICES=0,1 \\
swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --tuner_type lora \\
    --dataset 'AI-ModelScope/alpaca-gpt4-data-en#500' acme/chats:en \\
    --torch_dtype bfloat16 \\
    --num_train_epochs 1 \\
    --per_device_train_batch_size 1 \\
    --learning_rate 1e-4 \\
    --lora_rank 8 \\
    --target_modules all-linear \\
    --gradient_accumulation_steps 8 \\
    --split_dataset_ratio 0.01 \\
    --max_length 2048 \\
    --deepspeed zero2 \\
    --attn_impl flash_attn \\
    --system 'You are a helpful assistant.' \\
    --load_from_cache_file true
"""
SWIFT_YAML = (
    "model: Qwen/Qwen2.5-7B\ntuner_type: full\ndataset: [a.jsonl, b.jsonl]\nloss_scale: "
    "last_round\nsplit_dataset_ratio: 0\nquant_bits: 4\n"
)
DEEPSPEED = """\
{
  "train_batch_size": 64,
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": 1.0,
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 2,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "overlap_comm": true,
    "allgather_bucket_size": 2e8
  },
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupDecayLR", "params": {
    "warmup_num_steps": 100, "total_num_steps": 1000, "warmup_min_lr": 0, "warmup_max_lr": "auto"}},
  "steps_per_print": 10,
  "wall_clock_breakdown": false
}
"""  # noqa: E501
EXAMPLE_COMMAND = """\
torchrun --nproc_per_node 4 --nnodes 2 run_clm.py \\
    --model_name_or_path openai-community/gpt2 \\
    --train_file train.txt \\
    --validation_file valid.txt \\
    --per_device_train_batch_size 8 \\
    --block_size 512 \\
    --do_train --do_eval \\
    --fsdp "full_shard auto_wrap" \\
    --fp16 \\
    --output_dir /tmp/test-clm
"""

UNSLOTH = """\
from unsloth import FastLanguageModel
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
import torch

max_seq_length = 1024 * 2
lora_rank = 32

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "unsloth/Qwen2.5-7B-unsloth-bnb-4bit", # any model
    max_seq_length = max_seq_length,
    dtype = torch.bfloat16,
    load_in_4bit = True,
)
model = FastLanguageModel.get_peft_model(
    model,
    r = lora_rank,
    target_modules = ["q_proj", "v_proj"],
    lora_alpha = lora_rank * 2,
    lora_dropout = 0,
    bias = "none",
    use_gradient_checkpointing = "unsloth",
    random_state = 3407,
    loftq_config = None,
)
dataset = load_dataset("acme/chats", split = "train")
trainer = SFTTrainer(
    model = model,
    tokenizer = tokenizer,
    train_dataset = dataset,
    args = SFTConfig(
        per_device_train_batch_size = 2,
        gradient_accumulation_steps = 4,
        max_steps = 60,
        learning_rate = 2e-4,
        fp16 = not torch.cuda.is_bf16_supported(),
        bf16 = torch.cuda.is_bf16_supported(),
        logging_steps = compute_steps(dataset),
        output_dir = "outputs",
        report_to = "none",
    ),
)
if False:
    model, tokenizer = FastLanguageModel.from_pretrained("lora_model")
"""
AUTOMODEL = """\
# To run this recipe: automodel this.yaml
recipe: TrainFinetuneRecipeForNextTokenPrediction

step_scheduler:
  global_batch_size: 64
  local_batch_size: 8
  ckpt_every_steps: 1000
  val_every_steps: 10  # of gradient steps
  num_epochs: 2
dist_env: {backend: nccl, timeout_minutes: 1}
rng:
  _target_: nemo_automodel.components.training.rng.StatefulRNG
  seed: 1111
  ranked: true
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.2-1B
  backend: {attn: te, linear: te}
peft:
  _target_: nemo_automodel.components._peft.lora.PeftConfig
  target_modules: '*_proj'
  dim: 8
  alpha: 32
  use_triton: true
distributed:
  strategy: fsdp2
  dp_size: none
  tp_size: 1
  cp_size: 1
  sequence_parallel: false
  activation_checkpointing: true
loss_fn: {_target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy}
dataset:
  _target_: nemo_automodel.components.datasets.llm.chat_dataset.ChatDataset
  path_or_dataset_id: acme/chats
  split: train
  seq_length: 2048
  padding: do_not_pad
packed_sequence: {packed_sequence_size: 0}
dataloader:
  _target_: torchdata.stateful_dataloader.StatefulDataLoader
  collate_fn: nemo_automodel.components.datasets.utils.default_collater
  shuffle: true
validation_dataset:
  _target_: nemo_automodel.components.datasets.llm.squad.make_squad_dataset
  dataset_name: rajpurkar/squad
  split: validation
  limit_dataset_samples: 64
validation_dataloader: {_target_: torchdata.stateful_dataloader.StatefulDataLoader, batch_size: 4}
optimizer:
  _target_: torch.optim.Adam
  betas: [0.9, 0.95]
  eps: 1e-8
  lr: 1.0e-5
  weight_decay: 0
lr_scheduler: {lr_decay_style: cosine, min_lr: 1.0e-6}
checkpoint: {enabled: true, checkpoint_dir: checkpoints/, model_save_format: safetensors}
wandb: {project: acme, name: run}
ci: {recipe_owner: someone, time: 00:30:00}
"""
SOUP = """\
# Soup: chats
base: meta-llama/Llama-3.1-8B-Instruct
task: sft
# backend: unsloth
data:
  train: ./data/train.jsonl
  format: alpaca
  val_split: 0.1
  max_length: 2048
training:
  epochs: 3
  lr: 2e-5
  batch_size: auto
  gradient_accumulation_steps: 8
  lora:
    r: 64
    alpha: 16
    target_modules: [q_proj, v_proj]
  quantization: 4bit
  use_galore: false
output: ./output
"""
FMS = """\
{
  "model_name_or_path": "bigscience/bloom-560m",
  "training_data_path": "/data/input/twitter_complaints.json",
  "output_dir": "/data/output/tuning/bloom-twitter",
  "num_train_epochs": 10.0,
  "per_device_train_batch_size": 4,
  "gradient_accumulation_steps": 4,
  "learning_rate": 1e-05,
  "peft_method": "lora",
  "r": 4,
  "target_modules": ["query_key_value"],
  "response_template": "\\n### Label:",
  "dataset_text_field": "output",
  "use_flash_attn": false
}
"""
FMS_COMMAND = """\
accelerate launch --num_processes=8 \\
  --module tuning.sft_trainer \\
  --model_name_or_path bigscience/bloom-560m \\
  --tokenizer_name_or_path bigscience/bloom-560m \\
  --data_config_path data_config.yaml \\
  --torch_dtype bfloat16 \\
  --output_dir out \\
  --num_train_epochs 5 \\
  --learning_rate 1e-5
"""
FMS_DATA = """\
dataprocessor:
  type: default
  sampling_stopping_strategy: first_exhausted
  seed: 66
datasets:
  - name: first
    sampling: 0.3
    data_paths: [a.jsonl]
    data_handlers:
      - name: tokenize_and_apply_input_masking
        arguments:
          remove_columns: all
          fn_kwargs: {input_column_name: question, output_column_name: answer}
  - name: second
    sampling: 0.7
    data_paths: [b.jsonl]
    data_handlers:
      - name: apply_tokenizer_chat_template
        arguments: {fn_kwargs: {formatted_text_column_name: text}}
"""

ARGUMENTS_OF_UNSLOTH = [
    *(f"from_pretrained.{name}" for name in ("model_name", "max_seq_length", "dtype", "load_in_4bit")),
    *(
        f"get_peft_model.{name}"
        for name in (
            "r",
            "target_modules",
            "lora_alpha",
            "lora_dropout",
            "bias",
            "use_gradient_checkpointing",
        )
    ),
    *(
        "get_peft_model.random_state",
        "get_peft_model.loftq_config",
        "load_dataset[0].path",
        "load_dataset[0].split",
    ),
    *(f"SFTTrainer.{name}" for name in ("model", "tokenizer", "train_dataset", "args")),
    *(
        f"SFTConfig.{name}"
        for name in (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "max_steps",
            "learning_rate",
        )
    ),
    *(f"SFTConfig.{name}" for name in ("fp16", "bf16", "logging_steps", "output_dir", "report_to")),
]
FILES: dict[str, tuple[str, str, str]] = {
    "axolotl": ("axolotl", "axolotl.yaml", AXOLOTL),
    "trl": ("TRL", "sft.yaml", TRL),
    "trl-command": ("TRL", "train.sh", TRL_COMMAND),
    "llama-factory": ("LLaMA-Factory", "qwen_lora.yaml", LLAMA_FACTORY),
    "llama-factory-json": ("LLaMA-Factory", "pretrain.json", LLAMA_FACTORY_JSON),
    "accelerate": ("Accelerate", "fsdp2.yaml", ACCELERATE),
    "torchtune": ("torchtune", "8B_lora.yaml", TORCHTUNE),
    "ms-swift": ("ms-swift", "sft.sh", SWIFT),
    "ms-swift-yaml": ("ms-swift", "sft.yaml", SWIFT_YAML),
    "deepspeed": ("DeepSpeed", "ds_z2.json", DEEPSPEED),
    "transformers": ("transformers examples", "run.sh", EXAMPLE_COMMAND),
    "unsloth": ("unsloth", "train.py", UNSLOTH),
    "automodel": ("NeMo Automodel", "llama.yaml", AUTOMODEL),
    "soup": ("Soup", "soup.yaml", SOUP),
    "fms": ("fms-hf-tuning", "config.json", FMS),
    "fms-command": ("fms-hf-tuning", "fms.sh", FMS_COMMAND),
}
"""Name of the test → the tool, the name of the file, and its text."""
