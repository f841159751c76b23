"""The tokenizer of a trained model: files that the recipe does not change are the base's, the others load with the ids of the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from fsdp_tune.data.tokenise.exported_tokenizer import save_tokenizer
from fsdp_tune.data.tokenise.tokenizer import load_encoder
from fsdp_tune.recipe.schema import Recipe

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>"]
CONFIG: dict[str, Any] = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<pad>",
    "unk_token": "<|endoftext|>",
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    "model_max_length": 8192,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "chat_template": "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}",
}
TEXT = "It's  3.14 <|im_start|>é<|im_end|> <new>\n x"


def write_base(folder: Path, *, token_map: bool = True, decoder: bool = True, **fields: Any) -> Path:
    """Write a tokenizer as transformers 4 does."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    added = {str(number): {"content": token, **flags} for number, token in enumerate(SPECIAL)}
    config = CONFIG | ({"added_tokens_decoder": added} if decoder else {}) | fields
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if token_map:
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "additional_special_tokens")
        (folder / "special_tokens_map.json").write_text(json.dumps({name: config[name] for name in names if name in config}))
    return folder


def export(base: Path | str, folder: Path, tokens: dict[str, Any] | None = None, template: str | None = None) -> tuple[Any, dict[str, Any]]:
    """Return the encoder of the training and the exported tokenizer_config.json."""
    fields: dict[str, Any] = {"model": {"tokenizer": str(base), "tokens": tokens or {}}}
    if template is not None:
        fields["data"] = {"train": [{"path": "x"}], "chat_template": template}
    encoder = load_encoder(Recipe.model_validate(fields))
    folder.mkdir()
    save_tokenizer(folder, encoder.tokenizer, encoder.origin)
    return encoder, json.loads((folder / "tokenizer_config.json").read_text())


def assert_same_tokens(encoder: Any, folder: Path) -> None:
    again = AutoTokenizer.from_pretrained(folder)
    assert again(TEXT)["input_ids"] == encoder.tokenizer(TEXT)["input_ids"]
    assert again.special_tokens_map == encoder.tokenizer.special_tokens_map
    assert again.chat_template == encoder.tokenizer.chat_template
    assert again.decode(again(TEXT)["input_ids"], skip_special_tokens=True) == encoder.tokenizer.decode(
        again(TEXT)["input_ids"], skip_special_tokens=True
    )


def test_unchanged_tokenizer_is_copied(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    (base / "tokenizer_config.json").write_text(json.dumps({name: value for name, value in CONFIG.items() if name != "chat_template"}))
    (base / "chat_template.jinja").write_text(CONFIG["chat_template"])
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "rag.jinja").write_text("rag")
    (base / "config.json").write_text('{"model_type": "llama"}')
    encoder, _ = export(base, tmp_path / "out")
    names = {path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file()} - {"config.json"}
    assert {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()} == names
    assert all((tmp_path / "out" / name).read_bytes() == (base / name).read_bytes() for name in names)
    assert encoder.origin.folder == base


@pytest.mark.parametrize("token_map", [True, False])
def test_changed_special_token_is_written_in_each_file_that_names_it(token_map: bool, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", token_map=token_map)
    encoder, config = export(base, tmp_path / "out", {"eos": "<|endoftext|>"})
    assert config == json.loads((base / "tokenizer_config.json").read_text()) | {"eos_token": "<|endoftext|>"}
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    path = tmp_path / "out" / "special_tokens_map.json"
    assert path.exists() == token_map
    assert not token_map or json.loads(path.read_text())["eos_token"] == "<|endoftext|>"
    assert_same_tokens(encoder, tmp_path / "out")


def test_chosen_padding_is_written(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", pad_token=None, token_map=False)
    encoder, config = export(base, tmp_path / "out")
    assert config["pad_token"] == "<pad>"
    assert_same_tokens(encoder, tmp_path / "out")


@pytest.mark.parametrize("decoder", [True, False])
def test_added_tokens_keep_the_configuration_of_the_base(decoder: bool, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", decoder=decoder)
    encoder, config = export(base, tmp_path / "out", {"add": ["<new>"]})
    assert (config["tokenizer_class"], config["additional_special_tokens"]) == ("PreTrainedTokenizerFast", ["<|im_start|>", "<|im_end|>"])
    number = str(encoder.tokenizer.convert_tokens_to_ids("<new>"))
    assert not decoder or config["added_tokens_decoder"][number]["content"] == "<new>"
    assert not decoder or len(config["added_tokens_decoder"]) == len(SPECIAL) + 1
    assert_same_tokens(encoder, tmp_path / "out")


@pytest.mark.parametrize("is_in_config", [True, False])
def test_changed_template_replaces_each_copy(is_in_config: bool, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    if not is_in_config:
        (base / "chat_template.jinja").write_text(CONFIG["chat_template"])
        (base / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "chat_template"}))
    file = tmp_path / "other.jinja"
    file.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    encoder, config = export(base, tmp_path / "out", template=str(file))
    assert ("chat_template" in config) == is_in_config
    assert config.get("chat_template", file.read_text()) == file.read_text()
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == file.read_text()
    assert_same_tokens(encoder, tmp_path / "out")


def test_templates_of_which_the_default_is_trained_are_kept(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": CONFIG["chat_template"]}, {"name": "rag", "template": "rag"}]
    base = write_base(tmp_path / "base", chat_template=templates)
    _, config = export(base, tmp_path / "out")
    assert config["chat_template"] == templates


def test_tokenizer_without_files_is_written_with_names_of_transformers_4(tmp_path: Path) -> None:
    encoder, config = export("builtin:arithmetic", tmp_path / "out", {"add": ["<new>"]})
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not {"backend", "is_local", "local_files_only", "extra_special_tokens"} & config.keys()
    assert_same_tokens(encoder, tmp_path / "out")


def test_names_of_transformers_5_are_replaced(tmp_path: Path) -> None:
    own = {"tokenizer_class": "TokenizersBackend", "backend": "tokenizers", "is_local": True}
    base = write_base(tmp_path / "base", token_map=False, decoder=False, **own)
    path = base / "tokenizer_config.json"
    config = json.loads(path.read_text())
    extra = config.pop("additional_special_tokens")
    path.write_text(json.dumps({**config, "extra_special_tokens": extra}))
    encoder, exported = export(base, tmp_path / "out")
    assert exported == CONFIG
    assert_same_tokens(encoder, tmp_path / "out")


def test_link_to_outside_of_the_base_is_not_copied(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", token_map=False)
    (tmp_path / "secret").write_text("secret")
    (base / "vocab.txt").symlink_to(tmp_path / "secret")
    export(base, tmp_path / "out")
    assert not (tmp_path / "out" / "vocab.txt").exists()
