"""Resolve `data.chat_template` to the text of a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from fsdp_tune.core.errors import FsdpTuneError, usage_error
from fsdp_tune.core.hub import HubResource, hub_is_reachable
from fsdp_tune.recipe.paths import can_only_be_a_path

MAX_TEMPLATE_BYTES = 1 << 20
BUNDLED = {
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "plain": (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}Assistant: {{ message['content'] }}{{ eos_token }}\n"
        "{% else %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
}
"""`chatml` is for tokenizers with <|im_start|> and <|im_end|>; `plain` needs no special token but the end of sequence."""
KEY = "data.chat_template"


def resolve_template(name: str) -> str:
    """Return the Jinja text of a bundled name, a file, or a hub model. Raises: usage error (exit 2) if it is none of them."""
    if name in BUNDLED:
        return BUNDLED[name]
    path = Path(name).expanduser()
    if path.is_file():
        return _read(path)
    if path.is_dir():
        return _from_files(name, path / "chat_template.jinja", path / "tokenizer_config.json")
    if can_only_be_a_path(name):
        raise usage_error("no-such-template", f"there is no chat template file `{name}`", hint=f"bundled ones: {', '.join(BUNDLED)}")
    return _from_hub(name)


def _read(path: Path) -> str:
    if path.stat().st_size > MAX_TEMPLATE_BYTES:
        raise usage_error("no-such-template", f"{path} has more than {MAX_TEMPLATE_BYTES} bytes, too many for a chat template")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise usage_error("no-such-template", f"{path}: a chat template must be UTF-8: {error.reason} at byte {error.start}") from error


def _from_files(name: str, template: Path | None, config: Path | None) -> str:
    if template is not None and template.is_file():
        return _read(template)
    contents: dict[str, Any] = json.loads(config.read_bytes()) if config is not None and config.is_file() else {}
    found: Any = contents.get("chat_template")
    if isinstance(found, list):  # several templates, as a list of {name, template}
        found = next((entry["template"] for entry in cast(list[dict[str, Any]], found) if entry.get("name") == "default"), None)
    if not isinstance(found, str):
        raise usage_error("no-such-template", f"`{name}` has no chat template", hint=f"bundled ones for `{KEY}`: {', '.join(BUNDLED)}")
    return found


def _from_hub(name: str) -> str:
    from huggingface_hub import hf_hub_download  # pyright: ignore[reportUnknownVariableType]  its progress bar is untyped
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    wanted = HubResource("chat template of", name, KEY, "no-such-template", or_else=f" (bundled ones: {', '.join(BUNDLED)})")
    reachable = hub_is_reachable()
    found: dict[str, Path] = {}
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        try:
            found[file] = Path(hf_hub_download(name, file, local_files_only=not reachable))
        except FsdpTuneError:  # a signal that ends the command may arrive here
            raise
        except Exception as error:
            model_has_none = isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError)
            if model_has_none or (isinstance(error, LocalEntryNotFoundError) and not reachable):
                continue
            if (problem := wanted.problem(error)) is None:
                raise
            raise problem from error
    if not found and not reachable:
        raise wanted.unreachable()
    return _from_files(name, found.get("chat_template.jinja"), found.get("tokenizer_config.json"))
