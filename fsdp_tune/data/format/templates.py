"""Resolve `data.chat_template` to the text of a chat template: one of the package, a file, or that of a
model."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.core.files import expanded
from fsdp_tune.core.hub import HubResource, hub_is_reachable
from fsdp_tune.core.values import as_mapping, is_list, is_mapping
from fsdp_tune.recipe.references import can_only_be_a_path
from fsdp_tune.recipe.schema.value_kinds import NO_TEMPLATE, is_jinja

MAX_TEMPLATE_BYTES = 1 << 20
KEY = "data.chat_template"
LIST = "`fsdp-tune templates` lists the bundled ones"

Part = Literal["system", "tools", "thinking"]
"""System prompts; functions with their calls and results; reasoning (`reasoning_content`)."""


@dataclass(frozen=True, slots=True)
class BundledTemplate:
    purpose: str
    parts: frozenset[Part]
    """What it renders besides questions and answers."""
    tokens: tuple[str, ...] = ()
    """Special tokens that it writes, other than the end of sequence."""
    signs: tuple[str, ...] = ()
    """Other tokens by which the vocabulary of the family is recognised."""


ALL: frozenset[Part] = frozenset({"system", "tools", "thinking"})
SYSTEM_AND_TOOLS: frozenset[Part] = frozenset({"system", "tools"})
SYSTEM: frozenset[Part] = frozenset({"system"})
CHATML = ("<|im_start|>", "<|im_end|>")
LLAMA3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
MISTRAL = (
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")

BUNDLED: dict[str, BundledTemplate] = {
    "qwen3": BundledTemplate("Qwen 3", ALL, CHATML, ("<think>", "<tool_call>")),
    "qwen2.5": BundledTemplate("Qwen 2.5", SYSTEM_AND_TOOLS, CHATML, ("<tool_call>",)),
    "llama3.1": BundledTemplate("Llama 3.1, 3.2 and 3.3", SYSTEM_AND_TOOLS, LLAMA3, ("<|eom_id|>",)),
    "llama3": BundledTemplate("Llama 3", SYSTEM, LLAMA3),
    "mistral-v7": BundledTemplate(
        "Mistral Small 3 (v7, tekken)", SYSTEM, ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
    ),
    "mistral": BundledTemplate("Mistral Nemo, Ministral (v3, tekken)", SYSTEM_AND_TOOLS, MISTRAL),
    "gemma3": BundledTemplate("Gemma 2 and 3", SYSTEM, ("<start_of_turn>", "<end_of_turn>")),
    "glm4.5": BundledTemplate("GLM 4.5", ALL, GLM),
    "phi4": BundledTemplate("Phi 4", SYSTEM, (*CHATML, "<|im_sep|>")),
    "phi3": BundledTemplate("Phi 3 and 3.5", SYSTEM, ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")),
    "deepseek-r1": BundledTemplate(
        "DeepSeek R1 and distillations; keeps the reasoning",
        frozenset({"system", "thinking"}),
        ("<｜User｜>", "<｜Assistant｜>"),
    ),
    "chatml": BundledTemplate("any vocabulary with ChatML's tokens (SmolLM2)", SYSTEM, CHATML),
    "chatml-tools": BundledTemplate("ChatML with functions and reasoning", ALL, CHATML),
    "llama2": BundledTemplate("Llama 2", SYSTEM, (), ("<s>", "</s>")),
    "zephyr": BundledTemplate("Zephyr, TinyLlama Chat: headers as text", SYSTEM, (), ("<s>", "</s>")),
    "plain": BundledTemplate("any vocabulary: turns as text", SYSTEM),
    "plain-tools": BundledTemplate("any vocabulary: turns and functions as text", SYSTEM_AND_TOOLS),
}
"""The most specific first, as they are suggested."""

_IN_CODE = {
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] "
        "}}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "plain": (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}Assistant: {{ "
        "message['content'] }}{{ eos_token }}\n"
        "{% else %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
}


def bundled_text(name: str) -> str:
    """Return the Jinja text of a bundled template."""
    if name in _IN_CODE:
        return _IN_CODE[name]
    return (
        resources.files("fsdp_tune.data.format")
        .joinpath("bundled", f"{name}.jinja")
        .read_text(encoding="utf-8")
    )


def fitting_templates(
    encode: Callable[[list[str]], list[list[int]]], parts: Collection[Part] = ()
) -> list[str]:
    """Return the bundled templates whose tokens a vocabulary has and that render `parts`, the most specific
    first."""
    tokens = sorted({token for template in BUNDLED.values() for token in (*template.tokens, *template.signs)})
    present = {token for token, ids in zip(tokens, encode(tokens), strict=True) if len(ids) == 1}
    return [
        name
        for name, template in BUNDLED.items()
        if present.issuperset((*template.tokens, *template.signs)) and template.parts.issuperset(parts)
    ]


def missing_tokens(name: str, encode: Callable[[list[str]], list[list[int]]]) -> list[str]:
    """Return the special tokens of a bundled template that a vocabulary does not have."""
    tokens = list(BUNDLED[name].tokens)
    return [token for token, ids in zip(tokens, encode(tokens), strict=True) if len(ids) != 1]


def suggestion(encode: Callable[[list[str]], list[list[int]]], key: str = KEY) -> str:
    """Return a hint for conversations without a chat template: what fits the vocabulary."""
    first, *others = fitting_templates(encode)
    also = f"; {', '.join(f'`{name}`' for name in others)} fit too" if others else ""
    return (
        f"set `{key}: {first}` ({BUNDLED[first].purpose}), which fits the vocabulary{also}; {LIST}. A "
        ".jinja file is possible too"
    )


def template_of_source(name: str | None, key: str, otherwise: str | None) -> str | None:
    """Return the Jinja text for the rows of a source; `otherwise`, that of all rows, if it names none. None:
    they have none.

    Raises: usage error (exit 2).
    """
    if name is None:
        return otherwise
    return None if name == NO_TEMPLATE else resolve_template(name, key)


def resolve_template(name: str, key: str = KEY) -> str:
    """Return the Jinja text of a bundled name, a file, a hub model, or itself. Raises: usage error (exit 2)
    for other names."""
    if name in BUNDLED:
        return bundled_text(name)
    if is_jinja(name):
        return name
    path = expanded(name)
    if path.is_file():
        return _read(path)
    if path.is_dir():
        return _from_files(name, path / "chat_template.jinja", path / "tokenizer_config.json", key)
    if can_only_be_a_path(name):
        raise usage_error(
            "no-such-template", f"there is no chat template file `{name}`", hint=LIST, where=Where(key=key)
        )
    if "/" not in name:
        raise not_bundled(name, key)
    return _from_hub(name, key)


def not_bundled(name: str, key: str | None = None) -> FsdpTuneError:
    """Return the error about a name that is not a bundled template, with those that may be meant."""
    near = _similar(name)
    otherwise = f"{LIST}; a model on the hub is ORG/NAME" if key else LIST
    hint = f"did you mean {' or '.join(f'`{each}`' for each in near)}? {LIST}" if near else otherwise
    message = f"`{name}` is not a bundled chat template" + (", nor a file or directory" if key else "")
    return usage_error("no-such-template", message, hint=hint, where=Where(key=key))


def _similar(name: str) -> list[str]:
    """Return the bundled templates whose name may be meant: of the same family, or spelled similarly."""

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower())

    def family(text: str) -> str:
        return re.sub(r"[^a-z].*", "", text.lower(), flags=re.DOTALL)

    same = [known for known in BUNDLED if plain(known) == plain(name)]
    related = [known for known in BUNDLED if family(name) and family(known) == family(name)]
    return same or related or difflib.get_close_matches(name.lower(), BUNDLED, n=3, cutoff=0.6)


def _read(path: Path) -> str:
    if path.stat().st_size > MAX_TEMPLATE_BYTES:
        raise usage_error(
            "no-such-template",
            f"{path} has more than {MAX_TEMPLATE_BYTES} bytes, too many for a chat template",
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise usage_error(
            "no-such-template", f"{path}: a chat template must be UTF-8: {error.reason} at byte {error.start}"
        ) from error


def _from_files(name: str, template: Path | None, config: Path | None, key: str) -> str:
    if template is not None and template.is_file():
        return _read(template)
    found = _of_config(config, key) if config is not None and config.is_file() else None
    if is_list(found):  # several templates, as a list of {name, template}
        by_name = {str(entry.get("name")): entry.get("template") for entry in map(as_mapping, found)}
        if "default" not in by_name:
            listed = ", ".join(by_name) or "of no name"
            raise usage_error(
                "no-such-template",
                f"`{name}` has the chat templates {listed}, and none is `default`",
                hint=f"write one of them to a file NAME.jinja, and give its path; {LIST}",
                where=Where(key=key),
            )
        found = by_name["default"]
    if not isinstance(found, str):
        raise usage_error(
            "no-such-template", f"`{name}` has no chat template", hint=LIST, where=Where(key=key)
        )
    return found


def _of_config(config: Path, key: str) -> object:
    """Return `chat_template` of a tokenizer_config.json. Raises: usage error if that is not a JSON object."""
    try:
        contents: object = json.loads(config.read_bytes())
    except (ValueError, RecursionError) as error:
        raise usage_error(
            "no-such-template", f"{config} is not valid JSON: {error}", hint=LIST, where=Where(key=key)
        ) from error
    if not is_mapping(contents):
        raise usage_error(
            "no-such-template", f"{config} is not a JSON object", hint=LIST, where=Where(key=key)
        )
    return contents.get("chat_template")


def _from_hub(name: str, key: str) -> str:
    from huggingface_hub import hf_hub_download  # pyright: ignore[reportUnknownVariableType]  its progress bar is untyped
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    wanted = HubResource("chat template of", name, key, "no-such-template", or_else=f" ({LIST})")
    reachable = hub_is_reachable()
    found: dict[str, Path] = {}
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        try:
            found[file] = Path(hf_hub_download(name, file, local_files_only=not reachable))
        except Exception as error:
            model_has_none = isinstance(error, EntryNotFoundError) and not isinstance(
                error, LocalEntryNotFoundError
            )
            if model_has_none or (isinstance(error, LocalEntryNotFoundError) and not reachable):
                continue
            if (problem := wanted.problem(error)) is None:
                raise
            raise problem from error
    if not found and not reachable:
        raise wanted.unreachable()
    return _from_files(name, found.get("chat_template.jinja"), found.get("tokenizer_config.json"), key)
