"""The recipe's tokenizer through transformers: special tokens, templates, errors if it cannot be loaded, and
the tokenizer that is exported with a trained model."""

from __future__ import annotations

import errno
import json
import pickle
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from fsdp_tune.core import hub
from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.core.signals import StoppedBySignal
from fsdp_tune.data.format.formats import Chat
from fsdp_tune.data.format.templates import BUNDLED, bundled_text
from fsdp_tune.data.read.file_access import builtin_rows, builtin_tokenizer
from fsdp_tune.data.tokenise.chat import render_chat
from fsdp_tune.data.tokenise.conversations import ChatTokens, chat_tokens
from fsdp_tune.data.tokenise.exported_tokenizer import save_tokenizer
from fsdp_tune.data.tokenise.tokenizer import TokenizerEncoder, load_encoder, open_tokenizer
from fsdp_tune.recipe.schema.data_section import DataSource
from fsdp_tune.recipe.schema.recipe import Recipe

BUILTIN = "builtin:arithmetic"


def recipe(
    tokenizer: Path | str | None = BUILTIN,
    *,
    tokens: dict[str, Any] | None = None,
    template: str | None = None,
) -> Recipe:
    model = {"tokenizer": str(tokenizer) if tokenizer else None, "tokens": tokens or {}}
    return Recipe.model_validate({"model": model, "data": {"chat_template": template}})


def tokenizer_of(wanted: Recipe) -> Any:
    return open_tokenizer(wanted).tokenizer


def saved(folder: Path, **special: Any) -> Path:
    """An ordinary tokenizer directory with the special tokens given, and no others."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=builtin_tokenizer(BUILTIN), **special).save_pretrained(
        str(folder)
    )
    return folder


def problem(wanted: Recipe) -> Problem:
    with pytest.raises(FsdpTuneError) as caught:
        tokenizer_of(wanted)
    assert caught.value.exit_code == 2
    (found,) = caught.value.problems
    return found


def tokenised(chat: Chat, template: str, encoder: TokenizerEncoder) -> ChatTokens:
    (rendered,) = render_chat(chat, template, encoder, check_repeat=True).examples
    (tokens,) = chat_tokens(rendered, encoder.encode(rendered.pieces), encoder, append_eos=True)
    return tokens


def test_saved_builtin_tokenizer_loads_with_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = tokenizer_of(recipe())
    tokenizer.save_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text(
        '{"model_type": "gpt2", "vocab_size": 384, "bos_token_id": null, "eos_token_id": null}'
    )
    again = AutoTokenizer.from_pretrained(str(tmp_path))
    assert (again.eos_token, again.pad_token, len(again)) == (
        tokenizer.eos_token,
        tokenizer.pad_token,
        len(tokenizer),
    )
    for row in builtin_rows(BUILTIN, "test")[:20]:
        text = row["prompt"] + row["completion"]
        assert again(text).input_ids == tokenizer(text).input_ids
        assert again.decode(again(text).input_ids) == text
    chat = [{"role": "user", "content": "one plus one is"}, {"role": "assistant", "content": "two"}]
    assert (
        again.apply_chat_template(chat, tokenize=False)
        == "<|user|>one plus one is<|end|><|assistant|>two<|endoftext|>"
    )


def test_builtin_template_trains_answers() -> None:
    encoder = load_encoder(recipe())
    messages = [{"role": "user", "content": "one plus one is"}, {"role": "assistant", "content": " two"}]
    assert encoder.chat_template is not None
    tokens = tokenised(Chat(messages, (False, True)), encoder.chat_template, encoder)
    trained = [token for token, flag in zip(tokens.ids, tokens.trained, strict=True) if flag]
    assert encoder.decode(trained) == " two<|endoftext|>"


@pytest.mark.skipif(version("transformers") < "5.23", reason="older ones import torch with any tokenizer")
def test_loading_the_builtin_tokenizer_and_preparing_imports_no_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from fsdp_tune.data.tokenise.tokenizer import load_encoder
from fsdp_tune.data.preparation import prepare
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.data_section import DataSource
data = {{"train": [{{"path": "{BUILTIN}"}}], "max_length": 32, "cache_dir": {str(tmp_path)!r}}}
recipe = Recipe.model_validate({{"model": {{"tokenizer": "{BUILTIN}"}}, "data": data, "launch": {{"num_processes": 1}}}})
prepare(recipe, load_encoder(recipe))
assert not {{"torch", "datasets", "pyarrow"}} & set(sys.modules)
"""  # noqa: E501
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_padding_token_is_chosen_from_unused_tokens_and_reported(tmp_path: Path) -> None:
    opened = open_tokenizer(recipe(saved(tmp_path, eos_token="<|endoftext|>")))
    assert opened.tokenizer.pad_token == "<|pad|>"
    (notice,) = opened.notices
    assert notice.code == "pad-chosen"
    assert "`<|pad|>` is used, an unused token" in notice.message


def test_padding_is_the_end_of_sequence_when_nothing_is_unused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>").save_pretrained(str(tmp_path))
    opened = open_tokenizer(recipe(tmp_path))
    assert opened.tokenizer.pad_token_id == opened.tokenizer.eos_token_id
    assert "its end-of-sequence token" in opened.notices[0].message


def test_tokenizer_with_padding_gives_no_notice() -> None:
    assert open_tokenizer(recipe()).notices == ()


def test_missing_eos_token_is_an_error_fixed_by_naming_one(tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert problem(recipe(path)).code == "no-eos"
    tokenizer = tokenizer_of(recipe(path, tokens={"eos": "<|end|>", "pad": "<|pad|>"}))
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|end|>", "<|pad|>")


def test_tokens_are_added_and_can_be_end_and_padding() -> None:
    before = len(tokenizer_of(recipe()))
    tokenizer = tokenizer_of(recipe(tokens={"add": ["<|new|>", "<|end2|>"], "eos": "<|end2|>"}))
    assert len(tokenizer) == before + 2
    assert tokenizer.eos_token_id == before + 1
    assert len(tokenizer("<|new|>").input_ids) == 1


def test_unknown_token_error_suggests_close_matches() -> None:
    found = problem(recipe(tokens={"eos": "<|endoftxt|>"}))
    assert found.code == "unknown-token"
    assert "did you mean `<|endoftext|>`" in (found.hint or "")


def test_recipes_template_is_saved_with_the_tokenizer(tmp_path: Path) -> None:
    assert tokenizer_of(recipe(template="chatml")).chat_template == bundled_text("chatml")
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    assert tokenizer_of(recipe(template=str(tmp_path / "mine.jinja"))).chat_template == "{{ messages }}"
    assert problem(recipe(template="missing.jinja")).code == "no-such-template"


@pytest.mark.parametrize("template", sorted(BUNDLED))
def test_bundled_templates_are_prefix_stable(template: str) -> None:
    encoder = load_encoder(recipe(tokens={"add": list(BUNDLED[template].tokens)}, template=template))
    turns = [
        {"role": role, "content": f"{role} says"}
        for role in ("system", "user", "assistant", "user", "assistant")
    ]
    chat = Chat(turns, (False, False, True, False, True))
    examples = render_chat(chat, bundled_text(template), encoder, check_repeat=True).examples
    tokens = [
        tokens
        for text in examples
        for tokens in chat_tokens(text, encoder.encode(text.pieces), encoder, append_eos=True)
    ]
    trained = [
        encoder.decode([token for token, flag in zip(each.ids, each.trained, strict=True) if flag])
        for each in tokens
    ]
    assert sum(text.count("assistant says") for text in trained) == 2
    assert not any("user says" in text for text in trained)
    assert trained[-1].endswith("<|endoftext|>")


def test_tokens_of_a_bundled_template_that_the_vocabulary_lacks_are_reported() -> None:
    (notice,) = load_encoder(recipe(template="chatml")).notices
    assert (notice.code, notice.where.key) == ("template-tokens-missing", "data.chat_template")
    assert "`<|im_start|>`, `<|im_end|>`" in notice.message
    assert "`phi3`" in (notice.hint or "")
    assert (
        load_encoder(recipe(template="chatml", tokens={"add": ["<|im_start|>", "<|im_end|>"]})).notices == ()
    )
    assert load_encoder(recipe(template="phi3")).notices == ()
    of_source = recipe().model_copy(deep=True)
    of_source.data.train.append(DataSource(path="a.jsonl", chat_template="qwen3"))
    (notice,) = load_encoder(of_source).notices
    assert notice.where.key == "data.train[0].chat_template"


def test_run_directory_gives_the_tokenizer_of_its_model(tmp_path: Path) -> None:
    saved(tmp_path / "run" / "model", eos_token="<|endoftext|>", pad_token="<|pad|>")
    (tmp_path / "run" / "checkpoint-5").mkdir()
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoint-5"):
        assert tokenizer_of(recipe(path)).eos_token == "<|endoftext|>"


def test_missing_tokenizer_is_distinguished_from_unreachable_hub(tmp_path: Path) -> None:
    assert problem(recipe(None)).code == "no-tokenizer"
    assert problem(recipe(tmp_path)).code == "tokenizer-not-found"
    assert problem(recipe("./nowhere")).code == "tokenizer-not-found"
    found = problem(recipe("meta-llama/Llama-2-7b-hf"))
    assert found.code == "hub-unreachable"
    assert "`meta-llama/Llama-2-7b-hf`" in found.message
    assert found.ways_out[0] == "give a local path in `model.tokenizer`"
    (tmp_path / "tokenizer.json").write_text("{")
    assert problem(recipe(tmp_path)).code == "tokenizer-unreadable"
    # tokenizers raises a plain Exception
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [], "model": {"type": "Other"}}')
    assert problem(recipe(tmp_path)).code == "tokenizer-unreadable"


def test_disk_error_while_a_tokenizer_is_read_is_that_os_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As hf_xet reports a full disk during a download."""

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("Data processing error: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", full)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(OSError, match="No space left") as caught:
        tokenizer_of(recipe(tmp_path))
    assert caught.value.errno == errno.ENOSPC


def test_missing_network_is_detected_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("http_proxy", raising=False)
    monkeypatch.delenv("HTTP_PROXY", raising=False)
    assert not hub.hub_is_reachable.__wrapped__()


def test_encoder_equals_tokenizer_without_special_tokens_and_pickles() -> None:
    encoder = pickle.loads(pickle.dumps(load_encoder(recipe())))
    texts = ["one plus two", "", "x<|endoftext|>"]
    assert encoder.encode(texts) == tokenizer_of(recipe())(texts, add_special_tokens=False)["input_ids"]
    assert encoder.digest == load_encoder(recipe()).digest


def test_bos_added_by_tokenizer_is_its_prefix(tmp_path: Path) -> None:
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    backend = builtin_tokenizer(BUILTIN)
    begin = backend.token_to_id("<|system|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", begin)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|system|>", eos_token="<|endoftext|>", pad_token="<|pad|>"
    ).save_pretrained(str(tmp_path))
    encoder = load_encoder(recipe(tmp_path))
    assert encoder.prefix_ids == (begin,)
    assert encoder.bos_id == begin
    assert begin not in encoder.encode(["one"])[0]
    assert load_encoder(recipe()).prefix_ids == ()


def test_digests_distinguish_tokenizers(tmp_path: Path) -> None:
    digests = {
        load_encoder(wanted).digest
        for wanted in (
            recipe(),
            recipe(tokens={"add": ["<|new|>"]}),
            recipe(tokens={"eos": "<|end|>"}),
            recipe(template="chatml"),
        )
    }
    assert len(digests) == 4


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
    vocabulary = {
        token: number for number, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
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
        (folder / "special_tokens_map.json").write_text(
            json.dumps({name: config[name] for name in names if name in config})
        )
    return folder


def export(
    base: Path | str, folder: Path, tokens: dict[str, Any] | None = None, template: str | None = None
) -> tuple[Any, dict[str, Any]]:
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
    (base / "tokenizer_config.json").write_text(
        json.dumps({name: value for name, value in CONFIG.items() if name != "chat_template"})
    )
    (base / "chat_template.jinja").write_text(CONFIG["chat_template"])
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "rag.jinja").write_text("rag")
    (base / "config.json").write_text('{"model_type": "llama"}')
    encoder, _ = export(base, tmp_path / "out")
    names = {path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file()} - {
        "config.json"
    }
    assert {
        path.relative_to(tmp_path / "out").as_posix()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    } == names
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
    assert (config["tokenizer_class"], config["additional_special_tokens"]) == (
        "PreTrainedTokenizerFast",
        ["<|im_start|>", "<|im_end|>"],
    )
    number = str(encoder.tokenizer.convert_tokens_to_ids("<new>"))
    assert not decoder or config["added_tokens_decoder"][number]["content"] == "<new>"
    assert not decoder or len(config["added_tokens_decoder"]) == len(SPECIAL) + 1
    assert_same_tokens(encoder, tmp_path / "out")


@pytest.mark.parametrize("is_in_config", [True, False])
def test_changed_template_replaces_each_copy(is_in_config: bool, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    if not is_in_config:
        (base / "chat_template.jinja").write_text(CONFIG["chat_template"])
        (base / "tokenizer_config.json").write_text(
            json.dumps({k: v for k, v in CONFIG.items() if k != "chat_template"})
        )
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


def test_stop_signal_while_a_tokenizer_loads_is_not_a_damaged_tokenizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise StoppedBySignal(signal.SIGTERM)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", stopped)
    with pytest.raises(StoppedBySignal):
        load_encoder(recipe("owner/name"))
