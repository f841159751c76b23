"""Publish a merged model or an adapter: results of `evaluate` in its model card, and the upload to the
Hugging Face hub.

The licence of the base is on the card before a model is uploaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_tune.core.atomic import write_file
from fsdp_tune.core.errors import NOWHERE, FsdpTuneError, Notice, Where, failed_error, usage_error
from fsdp_tune.core.files import read_regular
from fsdp_tune.core.library_errors import first_line
from fsdp_tune.core.ownership import temporary_directory
from fsdp_tune.core.tensors.peft_config import CONFIG_FILE
from fsdp_tune.merge.config_and_tokenizer import CONFIG_NAME, read_folder, refuse_outside
from fsdp_tune.merge.model_card import CARD_NAME, card_cell, without_folders
from fsdp_tune.merge.weight_formats import INDEX_NAME
from fsdp_tune.run.base_model import BASE_FILE
from fsdp_tune.run.directory import MERGE_RECORD
from fsdp_tune.run.written_files import require_unchanged_output, unsealed


@dataclass(frozen=True, slots=True)
class CardResult:
    """A metric on one set, as a model card has it."""

    name: str
    """Of the set: its label, or that of its data."""
    data: str
    """Where its rows come from: a hub id, a file, `builtin:NAME`."""
    split: str
    metric: str
    value: float
    interval: tuple[float, float]
    """At 95 %."""
    rows: int
    base: tuple[str, float] | None = None
    """Another model on the same rows, and its value."""
    config: str | None = None
    """Configuration of a hub data set."""
    revision: str | None = None
    """Commit, branch or tag of a hub data set."""


EVALUATION = "## Evaluation"
_SECTION = re.compile(rf"^{EVALUATION}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def add_results(path: Path, results: Sequence[CardResult]) -> None:
    """Write results into the metadata of a card, which the hub shows, and as a table; those of the same
    metric and rows are replaced.

    Raises: ValueError or YAMLError for a card whose metadata cannot be read, OSError.
    """
    from huggingface_hub import EvalResult, ModelCard

    found: Any = ModelCard(path.read_text(encoding="utf-8"))
    new = [
        EvalResult(
            task_type="text-generation",
            dataset_type=str(without_folders(each.data)),
            dataset_name=str(without_folders(each.name)),
            dataset_config=each.config,
            dataset_split=each.split,
            dataset_revision=each.revision,
            metric_type=each.metric,
            metric_value=_rounded(each.value),
            metric_args={
                "interval": [_rounded(edge) for edge in each.interval],
                "interval_level": 0.95,
                "rows": each.rows,
                **(
                    {"base": without_folders(each.base[0]), "base_value": _rounded(each.base[1])}
                    if each.base is not None
                    else {}
                ),
            },
        )
        for each in results
    ]
    replaced = {_result_identity(each) for each in new}
    every = [
        *(each for each in found.data.eval_results or [] if _result_identity(each) not in replaced),
        *new,
    ]
    _keep_apart(every)
    found.data.eval_results = every
    found.data.model_name = found.data.model_name or _metric_title(found.text)
    columns = {name: cell for name, cell in _COLUMNS.items() if any(cell(each) for each in every)}
    lines = [EVALUATION, "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(card_cell(cell(each)) for cell in columns.values())} |" for each in every]
    section = "\n".join(lines) + "\n\n"
    text = _SECTION.sub("", found.text)
    head, recipe, tail = text.partition("## Recipe\n")
    found.text = f"{head.rstrip()}\n\n{section}{recipe}{tail}" if recipe else f"{text.rstrip()}\n\n{section}"
    write_file(path, str(found))


_METADATA = re.compile(r"^model-index:\n(?:[ -].*\n)*", re.MULTILINE)


def without_results(card: str) -> str:
    """Return the text of a card without what `add_results` wrote, for a model with other weights."""
    return _METADATA.sub("", _SECTION.sub("", card), count=1)


def _keep_apart(results: Sequence[Any]) -> None:
    """Give sets of the same data and split their names as configurations: the metadata has one entry for the
    three."""
    names: dict[object, str] = {}
    for each in results:
        if names.setdefault(each.unique_identifier, each.dataset_name) != each.dataset_name:
            each.dataset_config = each.dataset_name


def _base(result: Any) -> str:
    more = result.metric_args or {}
    return f"{more['base_value']} ({more['base']})" if "base" in more else ""


_COLUMNS: dict[str, Callable[[Any], str]] = {
    "set": lambda each: each.dataset_name if each.dataset_name != each.dataset_type else "",
    "data": lambda each: each.dataset_type,
    "split": lambda each: each.dataset_split or "",
    "metric": lambda each: each.metric_type,
    "value": lambda each: str(each.metric_value),
    "95 % interval": lambda each: " to ".join(map(str, (each.metric_args or {}).get("interval", ()))),
    "rows": lambda each: str((each.metric_args or {}).get("rows", "")),
    "base": _base,
}
"""Of the table; those that are empty for all results are left out."""


def _result_identity(result: Any) -> tuple[str | None, ...]:
    """Return what two results on the same rows have in common. A configuration that is the set's name is of
    `_keep_apart`."""
    config = None if result.dataset_config == result.dataset_name else result.dataset_config
    return (
        result.dataset_type,
        result.dataset_name,
        config,
        result.dataset_split,
        result.dataset_revision,
        result.metric_type,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _metric_title(text: str) -> str:
    return next(
        (line.removeprefix("# ").strip() for line in text.splitlines() if line.startswith("# ")), "model"
    )


STALE = ("*.safetensors", "*.safetensors.index.json", "adapter_config.json")
"""Files of an earlier push that loaders would prefer: transformers reads `model.safetensors` before the index
of shards."""
PROVENANCE = (MERGE_RECORD, CONFIG_FILE, BASE_FILE)
"""Files that name directories of this machine, for later commands here."""
LOGIN = "log in with `hf auth login` and a token that may write, or set HF_TOKEN"


@dataclass(frozen=True, slots=True)
class HubTarget:
    repository: str
    """OWNER/NAME, or NAME in the namespace of the token."""
    is_public: bool = False
    """Visibility of a new repository; a public one that exists is written to only with this."""
    revision: str | None = None
    """Branch, created if needed; None = main."""


@dataclass(frozen=True, slots=True)
class Pushed:
    url: str
    """Of the commit."""
    notices: tuple[Notice, ...] = ()


def check_access(target: HubTarget) -> None:
    """Check that the hub is reachable and knows the account. Raises: usage error."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(target.repository)
        HfApi(library_name="fsdp-tune").whoami()
    except HFValidationError as error:
        raise _not_a_name(target, Where(key="training.hub_model_id")) from error
    except Exception as error:
        message = f"the model could not be pushed to `{target.repository}` at the end: {first_line(error)}"
        hint = f"{LOGIN}; or leave `training.push_to_hub` out and run `fsdp-tune push RUN` later"
        raise usage_error(
            "push-no-access", message, where=Where(key="training.push_to_hub"), hint=hint
        ) from error


def _not_a_name(target: HubTarget, where: Where = NOWHERE) -> FsdpTuneError:
    message = f"`{target.repository}` is not the name of a repository"
    return usage_error("push-name", message, where=where, hint="write `OWNER/NAME`")


def upload(folder: Path, target: HubTarget, retry: str) -> Pushed:
    """Upload the files of a model or adapter directory that its merge.json lists. `retry` is the command that
    repeats the push.

    An interrupted upload continues where it stopped: the hub skips what it has. Files of an earlier model
    that loaders prefer are removed. Raises: FsdpTuneError; the local directory is unchanged except for the
    licence in its card.
    """
    files = _listed(folder)
    require_unchanged_output(folder)
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    api = HfApi(library_name="fsdp-tune")
    try:
        name = api.create_repo(target.repository, private=not target.is_public, exist_ok=True).repo_id
        _refuse_public(api, name, target)
        if target.revision is not None:
            api.create_branch(name, branch=target.revision, exist_ok=True)
        notices = [*_unlisted(folder, files), *_add_licence(api, folder)]
        with _published(folder, files) as stage:
            commit = api.upload_folder(
                repo_id=name,
                folder_path=stage,
                revision=target.revision,
                commit_message="Upload model",
                delete_patterns=list(STALE),
            )
    except FsdpTuneError:
        raise
    except HFValidationError as error:
        raise _not_a_name(target) from error
    except Exception as error:
        raise failed_error(
            "push-failed",
            f"the model could not be pushed to `{target.repository}`: {first_line(error)}; it is "
            "complete on this machine",
            where=Where(str(folder)),
            hint=f"check the network, {LOGIN}, then: {retry}",
        ) from error
    return Pushed(str(commit.commit_url), tuple(notices))


def _listed(folder: Path) -> list[Path]:
    """Return the files that the record of the merge lists and that are there. Raises: usage error without a
    sound record."""
    record = folder / MERGE_RECORD
    try:
        document = json.loads(read_regular(record))
        files = document["files"] if "files" in document else _files_before_the_list(folder, document)
        paths = [_path_in(folder, str(name)) for name in files]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        message = f"it has no {MERGE_RECORD} that can be read, so it is not a complete output of a merge"
        raise usage_error(
            "push-not-merged",
            message,
            where=Where(str(folder)),
            hint="merge again: `fsdp-tune merge-checkpoint RUN`",
        ) from error
    present = [path for path in paths if path.is_file()]
    for path in present:
        refuse_outside(path, folder)
    return present


def _path_in(folder: Path, name: str) -> Path:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{name!r} is not a file of its directory")
    return folder / name


def _files_before_the_list(folder: Path, record: dict[str, Any]) -> set[str]:
    """Return the files of an output of an earlier version, whose record lists only the files of tensors."""
    weights = {str(tensor["file"]) for tensor in record["tensors"].values()}
    rest = {name for name in (INDEX_NAME, CONFIG_FILE, BASE_FILE) if (folder / name).is_file()}
    companions = read_folder(folder)
    return (
        weights
        | rest
        | set(companions.files)
        | {MERGE_RECORD, CARD_NAME}
        | ({CONFIG_NAME} if companions.config is not None else set())
    )


def _unlisted(folder: Path, files: Sequence[Path]) -> Iterator[Notice]:
    """Report the other files of the directory: whatever fell into it must not be published."""
    others = sorted(
        {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
        - _names(folder, files)
    )
    if others:
        message = (
            f"{len(others)} files are not published, because {MERGE_RECORD} does not list them: "
            f"{', '.join(map(repr, others[:5]))}"
        )
        hint = "if one belongs to the model, upload it by name: `hf upload OWNER/NAME FILE`"
        yield Notice("push-unlisted", message + (", …" if others[5:] else ""), Where(str(folder)), hint)


def _names(folder: Path, files: Sequence[Path]) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in files}


@contextmanager
def _published(folder: Path, files: Sequence[Path]) -> Iterator[Path]:
    """Yield a directory of links to `files` of `folder`, where the files that name folders of this machine
    are copies without them."""
    with temporary_directory("push-") as scratch:
        stage = scratch / "files"  # next to the record of the owner
        stage.mkdir()
        for path in files:
            copy = stage / path.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.name in PROVENANCE:
                document = unsealed(without_folders(json.loads(read_regular(path))))
                write_file(copy, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
            else:
                copy.symlink_to(path.resolve())
        yield stage


def _refuse_public(api: Any, name: str, target: HubTarget) -> None:
    """Refuse to publish by accident: `create_repo` leaves the visibility of an existing repository as it
    is."""
    if not target.is_public and not api.model_info(name).private:
        message = f"`{name}` exists and is public: everyone could download the model"
        ways_out = ("--public, or `training.hub_private_repo: false`", "--to OWNER/ANOTHER")
        raise usage_error("push-public", message, ways_out=ways_out)


def _add_licence(api: Any, folder: Path) -> list[Notice]:
    """Write the licence of the base into the card, which must name one before a model is shared."""
    from huggingface_hub import ModelCard

    card: Any = ModelCard.load(folder / CARD_NAME)
    base = card.data.base_model
    if card.data.license:
        return []
    if not isinstance(base, str):
        message = "the card names no base on the hub, and so no licence"
        return [Notice("licence-unknown", message, Where(str(folder / CARD_NAME)), "add `license:` to it")]
    try:
        found = api.model_info(base).card_data
    except Exception:  # noqa: BLE001  the licence of a base that cannot be asked for is unknown
        found = None
    if found is None or found.license is None:
        return [
            Notice(
                "licence-unknown",
                f"the licence of the base `{base}` is unknown, so the card names none",
                Where(str(folder / CARD_NAME)),
            )
        ]
    card.data.license = found.license
    for name in ("license_name", "license_link"):  # of a licence that is not in the hub's list
        if found.get(name):
            setattr(card.data, name, found.get(name))
    card.save(folder / CARD_NAME)
    return []
