"""Bundled chat templates: what each renders, which vocabularies they fit, and which names are suggested."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from jinja2 import TemplateError
from tokenizers import AddedToken

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.data.format import templates as module
from fsdp_tune.data.format.formats import Chat, FormatSettings
from fsdp_tune.data.format.templates import (
    BUNDLED,
    bundled_text,
    fitting_templates,
    resolve_template,
    suggestion,
)
from fsdp_tune.data.read.row_files import BadRow, RowError
from fsdp_tune.data.tokenise.chat import RenderedChat, render_chat, template_for
from fsdp_tune.data.tokenise.rows import RawRow, Tokeniser
from fsdp_tune.data.tokenise.tokenizer import TokenizerEncoder
from fsdp_tune.data.tokenise.unrendered import is_field
from tests.data.real_templates import PUBLISHED, Published
from tests.data.support import CHATML, ByteEncoder
from tests.data.test_templates_real import CONVERSATIONS

SAME = {
    "chatml": ("chatml", 9),
    "qwen2.5": ("qwen 2.5", 8),
    "qwen3": ("qwen 3", 9),
    "llama2": ("llama 2", 6),
    "llama3": ("llama 3", 9),
    "llama3.1": ("llama 3.1", 6),
    "mistral": ("mistral v3 tekken", 6),
    "mistral-v7": ("mistral v7 tekken", 1),
    "gemma3": ("gemma 3", 5),
    "phi3": ("phi 3.5", 6),
    "phi4": ("phi 4", 1),
    "glm4.5": ("glm 4.5", 8),
}
"""For a bundled template: the published one of its family, and in how many conversations both render the same
text, before each answer too. The others differ by default system prompts and by the words about functions."""


def text_or_error(
    encoder: TokenizerEncoder, template: str, conversation: str, *, count: int, prompt: bool, **mode: Any
) -> str | None:
    messages, tools = CONVERSATIONS[conversation]
    try:
        return encoder.render(messages[:count], template, tools=tools, generation_prompt=prompt, **mode)
    except (TemplateError, TypeError):
        return None


def renders_same(name: str, published: Published, conversation: str) -> bool:
    encoder, modes = published.encoder(), ({}, {"enable_thinking": False}, {"enable_thinking": True})
    requests = [
        (count, prompt, mode)
        for count in range(1, len(CONVERSATIONS[conversation][0]) + 1)
        for prompt in (False, True)
        for mode in modes
    ]
    texts = [
        [
            text_or_error(encoder, template, conversation, count=count, prompt=prompt, **mode)
            for count, prompt, mode in requests
        ]
        for template in (published.text(), bundled_text(name))
    ]
    return None not in texts[0] and texts[0] == texts[1]


@pytest.mark.parametrize("name", SAME)
def test_bundled_template_renders_the_text_of_its_family(name: str) -> None:
    family, least = SAME[name]
    same = [
        conversation for conversation in CONVERSATIONS if renders_same(name, PUBLISHED[family], conversation)
    ]
    assert "system" in same
    assert len(same) >= least, same


def rendered(name: str, conversation: str) -> RenderedChat:
    messages, tools = CONVERSATIONS[conversation]
    chat = Chat(messages, tuple(message["role"] == "assistant" for message in messages), tools)
    encoder = Published("trl/qwen3", "</s>", "<s>", BUNDLED[name].tokens).encoder()
    return render_chat(chat, bundled_text(name), encoder, check_repeat=True)


@pytest.mark.parametrize(
    ("part", "conversation"), [("system", "system"), ("tools", "tools"), ("thinking", "reasoning")]
)
@pytest.mark.parametrize("name", BUNDLED)
def test_declared_parts_are_those_that_are_rendered_and_trained(
    name: str, part: module.Part, conversation: str
) -> None:
    if part in BUNDLED[name].parts:
        assert all(is_field(note) for note in rendered(name, conversation).notes)
        return
    with pytest.raises(RowError):
        rendered(name, conversation)


@pytest.mark.parametrize("name", BUNDLED)
def test_declared_tokens_are_written(name: str) -> None:
    template = BUNDLED[name]
    wanted = "tools" if "tools" in template.parts else "system"
    text = "".join(example.whole for example in rendered(name, wanted).examples) + "".join(
        example.whole for example in rendered(name, "system").examples
    )
    assert [token for token in template.tokens if token not in text] == []
    written = set(re.findall(r"<[|｜][^|｜<>]+[|｜]>|\[/?[A-Z_]{3,}\]", text))
    assert written - set(template.tokens) <= (
        {"[INST]", "[/INST]", "<|user|>", "<|assistant|>", "<|system|>"} if not template.tokens else set()
    )


def test_bundled_files_and_names_are_the_same() -> None:
    from importlib import resources

    files = {entry.name for entry in resources.files("fsdp_tune.data.format").joinpath("bundled").iterdir()}
    assert files | {"chatml.jinja", "plain.jinja"} == {f"{name}.jinja" for name in BUNDLED}


def encoder_of(family: str, *more: str) -> TokenizerEncoder:
    encoder = PUBLISHED[family].encoder()
    encoder.tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in more])  # pyright: ignore[reportUnknownMemberType]
    return TokenizerEncoder(encoder.tokenizer)


@pytest.mark.parametrize(
    ("encoder", "first", "with_tools"),
    [
        (encoder_of("qwen 3", "<think>", "<tool_call>"), "qwen3", "qwen3"),
        (encoder_of("qwen 2.5", "<tool_call>"), "qwen2.5", "qwen2.5"),
        (encoder_of("smollm 2"), "chatml", "chatml-tools"),
        (encoder_of("llama 3.1"), "llama3.1", "llama3.1"),
        (encoder_of("mistral v3 tekken"), "mistral", "mistral"),
        (encoder_of("gemma 3"), "gemma3", "plain-tools"),
        (encoder_of("phi 3.5"), "phi3", "plain-tools"),
        (encoder_of("phi 4"), "phi4", "chatml-tools"),
        (encoder_of("glm 4.5"), "glm4.5", "glm4.5"),
        (encoder_of("deepseek r1"), "deepseek-r1", "plain-tools"),
        (encoder_of("llama 2"), "llama2", "plain-tools"),
        (encoder_of("gpt-oss"), "plain", "plain-tools"),
    ],
)
def test_templates_are_suggested_by_the_tokens_of_the_vocabulary(
    encoder: TokenizerEncoder, first: str, with_tools: str
) -> None:
    assert fitting_templates(encoder.encode)[0] == first
    assert fitting_templates(encoder.encode, ["tools"])[0] == with_tools
    assert f"`data.chat_template: {first}`" in suggestion(encoder.encode)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("qwen", ["qwen3", "qwen2.5"]),
        ("qwen_25", ["qwen2.5"]),
        ("Qwen3", ["qwen3"]),
        ("llama-3", ["llama3"]),
        ("llama", ["llama3.1", "llama3", "llama2"]),
        ("mistral_v3_tekken", ["mistral-v7", "mistral"]),
        ("phi_35", ["phi4", "phi3"]),
        ("gemma", ["gemma3"]),
        ("zepyhr", ["zephyr"]),
        ("vicuna", []),
    ],
)
def test_unknown_name_is_refused_without_the_hub_and_names_what_is_meant(
    name: str, meant: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        module, "_from_hub", lambda *_: pytest.fail("a name without an owner is not a model on the hub")
    )
    with pytest.raises(FsdpTuneError) as caught:
        resolve_template(name)
    (problem,) = caught.value.problems
    assert (problem.code, problem.where.key, caught.value.exit_code) == (
        "no-such-template",
        "data.chat_template",
        2,
    )
    hint = problem.hint or ""
    assert [each for each in BUNDLED if f"`{each}`" in hint] == meant
    assert "fsdp-tune templates" in hint
    assert "hf download" not in hint


@pytest.mark.parametrize("content", ["{", "[]", '"text"', '{"chat_template": ["x"]}', "\xff"])
def test_directory_with_a_damaged_tokenizer_config_is_a_usage_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content, encoding="latin-1")
    with pytest.raises(FsdpTuneError) as caught:
        resolve_template(str(tmp_path))
    (problem,) = caught.value.problems
    assert (problem.code, problem.where.key) == ("no-such-template", "data.chat_template")


def test_templates_of_a_directory_without_a_default_are_named(tmp_path: Path) -> None:
    several = [{"name": name, "template": "x"} for name in ("rag", "tool_use")]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    with pytest.raises(FsdpTuneError, match="has the chat templates rag, tool_use, and none is `default`"):
        resolve_template(str(tmp_path))


def test_name_with_an_owner_is_a_model_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_from_hub", lambda name, key: f"{name} {key}")
    assert (
        resolve_template("Qwen/Qwen3-8B", "data.train[0].chat_template")
        == "Qwen/Qwen3-8B data.train[0].chat_template"
    )


def refusal_of(name: str) -> Any:
    with pytest.raises(FsdpTuneError) as caught:
        resolve_template(name, "data.train[0].chat_template")
    (problem,) = caught.value.problems
    assert (problem.code, caught.value.exit_code) == ("no-such-template", 2)
    return problem


def test_template_of_a_file_and_of_a_directory_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("of a file")
    assert resolve_template(str(tmp_path / "mine.jinja")) == "of a file"
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "of the tokenizer"}))
    assert resolve_template(str(tmp_path)) == "of the tokenizer"
    several = [{"name": "tool_use", "template": "for tools"}, {"name": "default", "template": "for chats"}]
    config.write_text(json.dumps({"chat_template": several}))
    assert resolve_template(str(tmp_path)) == "for chats"
    (tmp_path / "chat_template.jinja").write_text("of the model")
    assert resolve_template(str(tmp_path)) == "of the model"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "has no chat template"),
        ({}, "has no chat template"),
        ([], "tokenizer_config.json is not a JSON object"),
        ({"chat_template": [{"name": "tool_use", "template": "for tools"}]}, "and none is `default`"),
        ({"chat_template": [{"name": "default"}, "text"]}, "has no chat template"),
        ('{"chat_template": ', "tokenizer_config.json is not valid JSON: "),
    ],
    ids=["no file", "no template", "no object", "no default", "default without text", "damaged"],
)
def test_directory_without_a_template_is_refused(config: object, words: str, tmp_path: Path) -> None:
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "tokenizer_config.json").write_text(text)
    problem = refusal_of(str(tmp_path))
    assert words in problem.message
    assert problem.where.key == "data.train[0].chat_template"
    assert "`fsdp-tune templates`" in problem.hint


def test_file_that_is_no_template_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    assert f"there is no chat template file `{path}`" in refusal_of(str(path)).message
    path.write_bytes(b"caf\xe9")
    assert "must be UTF-8: unexpected end of data at byte 3" in refusal_of(str(path)).message
    path.write_text("x" * (module.MAX_TEMPLATE_BYTES + 1))
    assert "too many for a chat template" in refusal_of(str(path)).message


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, bool]]:
    """Return what sets a hub: the text or the error of each file, and whether it is reachable."""

    def made(files: dict[str, str | Exception], *, reachable: bool = True) -> dict[str, bool]:
        asked: dict[str, bool] = {}

        def download(name: str, file: str, *, local_files_only: bool) -> str:
            assert name == "org/model"
            asked[file] = local_files_only
            found = files[file]
            if isinstance(found, Exception):
                raise found
            (tmp_path / file).write_text(found)
            return str(tmp_path / file)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        monkeypatch.setattr(module, "hub_is_reachable", lambda: reachable)
        return asked

    return made


NO_FILE, NOT_CACHED = EntryNotFoundError("404"), LocalEntryNotFoundError("not in the cache")
CONFIG = json.dumps({"chat_template": "of the tokenizer"})


@pytest.mark.parametrize("reachable", [True, False])
def test_template_of_a_model_on_the_hub_or_in_its_cache_is_read(
    reachable: bool, hub: Callable[..., dict[str, bool]]
) -> None:
    absent = NO_FILE if reachable else NOT_CACHED
    asked = hub({"chat_template.jinja": absent, "tokenizer_config.json": CONFIG}, reachable=reachable)
    assert resolve_template("org/model") == "of the tokenizer"
    assert set(asked.values()) == {not reachable}
    hub({"chat_template.jinja": "of the model", "tokenizer_config.json": CONFIG}, reachable=reachable)
    assert resolve_template("org/model") == "of the model"


def test_model_without_a_template_differs_from_one_that_cannot_be_reached(
    hub: Callable[..., dict[str, bool]],
) -> None:
    hub({"chat_template.jinja": NO_FILE, "tokenizer_config.json": NO_FILE})
    assert refusal_of("org/model").message == "`org/model` has no chat template"
    hub({"chat_template.jinja": NOT_CACHED, "tokenizer_config.json": NOT_CACHED}, reachable=False)
    with pytest.raises(FsdpTuneError, match="the chat template of `org/model`") as caught:
        resolve_template("org/model")
    assert caught.value.problems[0].code != "no-such-template"


def test_error_of_the_hub_is_explained_and_any_other_error_is_raised(
    hub: Callable[..., dict[str, bool]],
) -> None:
    hub({"chat_template.jinja": ConnectionError("reset"), "tokenizer_config.json": NO_FILE})
    with pytest.raises(FsdpTuneError, match="`org/model`") as caught:
        resolve_template("org/model")
    assert isinstance(caught.value.__cause__, ConnectionError)
    hub({"chat_template.jinja": ZeroDivisionError(), "tokenizer_config.json": NO_FILE})
    with pytest.raises(ZeroDivisionError):
        resolve_template("org/model")


def bad_rows(
    encoder: Any, template: str, *conversations: str, key: str = "data.chat_template"
) -> list[BadRow]:
    settings = FormatSettings(
        "messages", "assistant", template, "", True, encoder.vocabulary_size, template_key=key
    )
    rows = [{"messages": CONVERSATIONS[name][0], "tools": CONVERSATIONS[name][1]} for name in conversations]
    return [
        row
        for _, row in Tokeniser(encoder, (settings,))
        .chunk([RawRow(0, 0, at, row) for at, row in enumerate(rows, 1)])
        .bad
    ]


@pytest.mark.parametrize(
    ("family", "rejected", "conversation", "works"),
    [
        ("qwen 3", bundled_text("chatml"), "tools", "chatml-tools"),
        ("qwen 3", bundled_text("plain"), "tools", "chatml-tools"),
        ("gpt-oss", bundled_text("plain"), "tools", "plain-tools"),
        ("qwen 2.5", PUBLISHED["qwen 2.5"].text(), "reasoning", "chatml-tools"),
        ("deepseek r1", PUBLISHED["deepseek r1"].text(), "think", "deepseek-r1"),
        ("deepseek r1", PUBLISHED["deepseek r1"].text(), "turns", "deepseek-r1"),
        ("llama 3", PUBLISHED["llama 3"].text(), "tools", "llama3.1"),
        ("gemma 2", PUBLISHED["gemma 2"].text(), "system", "gemma3"),
    ],
)
def test_rejected_row_names_a_template_that_renders_it(
    family: str, rejected: str, conversation: str, works: str
) -> None:
    encoder = PUBLISHED[family].encoder()
    (row,) = bad_rows(encoder, rejected, conversation)
    assert row.hint is not None
    assert row.hint.startswith(f"`data.chat_template: {works}` renders this row")
    assert bad_rows(encoder, bundled_text(works), conversation) == []


def test_first_rejected_row_alone_has_the_hint_and_names_the_key_of_the_source() -> None:
    first, second = bad_rows(
        PUBLISHED["qwen 3"].encoder(),
        bundled_text("chatml"),
        "turns",
        "tools",
        "tools",
        key="data.train[1].chat_template",
    )
    assert "`data.train[1].chat_template: chatml-tools`" in (first.hint or "")
    assert second.hint is None


def test_row_that_no_template_renders_gets_no_hint() -> None:
    # half of a character
    chat = Chat(
        [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "hi"}], (False, True)
    )
    assert template_for(chat, ByteEncoder(), CHATML) is None
