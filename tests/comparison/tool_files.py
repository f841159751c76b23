"""A tiny model with rows, the configuration of a trainer over them, and its comparison with the imported
recipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import fsdp_tune
from fsdp_tune.comparison.stages import Observation
from fsdp_tune.jobs.compare_answer import CompareAnswer
from fsdp_tune.jobs.options import CompareOptions
from fsdp_tune.recipe.schema.recipe import Recipe

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ "
    "'<|im_start|>assistant\\n' }}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endif "
    "%}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
}
LLAMA |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "dtype": "float32",
}
TRL: dict[str, Any] = {
    "model_name_or_path": "base",
    "datasets": [{"path": "json", "data_files": "chat.jsonl"}],
    "assistant_only_loss": True,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "max_steps": 30,
    "max_length": 256,
    "bf16": False,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's directory with a tokenizer, and rows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tool")
    alphabet = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|stop|>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder / "base")
    config = LLAMA | {
        "eos_token_id": fast.eos_token_id,
        "pad_token_id": fast.pad_token_id,
        "architectures": ["LlamaForCausalLM"],
    }
    (folder / "base" / "config.json").write_text(json.dumps(config))
    turns = [
        [
            {"role": "user", "content": f"what is {n}?"},
            {"role": "assistant", "content": "it is " + "very " * (n % 7) + f"{n}"},
        ]
        for n in range(24)
    ]
    (folder / "chat.jsonl").write_text(
        "".join(json.dumps({"messages": turn + turns[(n + 1) % 24]}) + "\n" for n, turn in enumerate(turns))
    )
    pairs = [{"prompt": turn[0]["content"] + " ", "completion": turn[1]["content"]} for turn in turns]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    stanford = [
        {"instruction": turn[0]["content"], "input": "x" * (n % 3), "output": turn[1]["content"]}
        for n, turn in enumerate(turns)
    ]
    (folder / "alpaca.jsonl").write_text("".join(json.dumps(row) + "\n" for row in stanford))
    return folder


@pytest.fixture(autouse=True)
def one_thread(files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch

    monkeypatch.chdir(files)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def here(child: Any, recipe: Recipe, until: str, inputs: Path | None = None) -> Observation:
    """Compute a recipe in this process, in place of the child that does."""
    from fsdp_tune.comparison.observe import Side

    request = {
        "recipe": recipe.model_dump(mode="json", by_alias=True),
        "until": until,
        "inputs": inputs,
        **child.settings,
    }
    return Side(request).observe()


def written(files: Path, name: str, options: Mapping[str, Any] = TRL, **changes: Any) -> str:
    values = {key: value for key, value in {**options, **changes}.items() if value is not None}
    (files / f"{name}.yaml").write_text(yaml.safe_dump(values))
    return f"{name}.yaml"


def recipe_of(files: Path, options: Mapping[str, Any] = TRL, **changes: Any) -> str:
    fsdp_tune.import_recipe(
        written(files, "plain", options, **changes), output="recipe.yaml", num_gpus=1, force=True
    )
    return "recipe.yaml"


def unshuffled(files: Path) -> str:
    """Return the recipe whose rows keep the order of their file."""
    text = (files / recipe_of(files)).read_text()
    (files / "sorted.yaml").write_text(text.replace("data:\n", "data:\n  shuffle: false\n"))
    return "sorted.yaml"


def first(found: CompareAnswer) -> str | None:
    return found.first.stage if found.first is not None else None


def keys(found: CompareAnswer) -> list[str]:
    return [key.key for key in found.cause.keys] if found.cause is not None else []


def compared(a: str, b: str, **options: Any) -> CompareAnswer:
    return fsdp_tune.compare(a, b, CompareOptions(python=Path(sys.executable), num_gpus=1, **options))
