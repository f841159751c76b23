"""Inspect model and data of a resolved recipe without GPUs: each stage alone, with what a mistake of another
one does not concern.

The model is inspected in a child process, since this one never imports torch, unless the inspection of an
earlier one still holds; the first rows of each source are read here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fsdp_tune.core import processes as children
from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem
from fsdp_tune.core.hub import download_model
from fsdp_tune.core.units import parse_seconds
from fsdp_tune.data.format.templates import resolve_template
from fsdp_tune.data.inputs import opened_inputs
from fsdp_tune.data.tokenise.sample_prompts import sample_prompts
from fsdp_tune.data.tokenise.tokenizer import load_encoder, stand_in_encoder
from fsdp_tune.jobs.first_rows import CheckedSource, bad_first_rows, read_first_rows
from fsdp_tune.merge.lora.adapt import merge_problems
from fsdp_tune.merge.read.base import carried_problems
from fsdp_tune.model import kept_inspections
from fsdp_tune.model.model_files import ModelFacts, ModelInspection
from fsdp_tune.recipe.schema.recipe import Recipe

if TYPE_CHECKING:
    from fsdp_tune.data.tokenise.encoder_protocol import Encoder

INSPECT = (sys.executable, "-P", "-m", "fsdp_tune.model.loading.inspect")
INSPECT_SECONDS = 300.0
_UNREACHABLE = re.compile(
    r"couldn't connect|offline mode|connection error|could not reach|max retries|timed out|name resolution",
    re.IGNORECASE,
)


@dataclass(slots=True)
class Inspection:
    """Findings in the model, in the data, or in both."""

    model: ModelFacts | None = None
    """None if the model could not be built."""
    vocabulary_size: int | None = None
    """Tokens of the tokenizer; None if it could not be loaded."""
    inputs: list[CheckedSource] = field(default_factory=list[CheckedSource])
    problems: list[Problem] = field(default_factory=list[Problem])
    notices: list[Notice] = field(default_factory=list[Notice])
    unchecked: list[str] = field(default_factory=list[str])
    """What could not be inspected without network, one sentence each."""
    is_data_reachable: bool = True

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Add the problems of an error in the block, so that what follows is still inspected."""
        try:
            yield
        except FsdpTuneError as error:
            self.add(error)

    def add(self, error: FsdpTuneError) -> None:
        """Record the problems of the data. A hub that cannot be reached is not a mistake in the recipe."""
        for problem in error.problems:
            if problem.code == "hub-unreachable":
                self.is_data_reachable = False
                self.unchecked.append(problem.message)
            else:
                self.problems.append(problem)


def inspect(recipe: Recipe, *, offline: bool = False) -> Inspection:
    """Inspect model and data at the same time: each takes seconds to import what it needs."""
    with children.threads(1) as pool:
        running = pool.submit(inspect_model, recipe, offline=offline)
        data = inspect_data(recipe)
        found = running.result()
    return Inspection(
        found.model,
        data.vocabulary_size,
        data.inputs,
        [*found.problems, *data.problems],
        [*found.notices, *data.notices],
        list(dict.fromkeys([*found.unchecked, *data.unchecked])),
        data.is_data_reachable,
    )


def inspect_model(
    recipe: Recipe, *, offline: bool = False, answer: Callable[[float], str] | None = None
) -> Inspection:
    """Return parameters, layer classes, FSDP units and every problem of the model, found on the meta device.

    `answer` waits some seconds for the document of an inspection that has already been started. Empty: there
    is none. Its process may be a rank that hangs, of which the user learns when the ranks start.
    """
    limit_seconds = min(INSPECT_SECONDS, parse_seconds(recipe.launch.hang_timeout))
    text = answer(limit_seconds) if answer is not None else ""
    document = ModelInspection.from_json(text) if text else _inspect_in_child(recipe, offline=offline)
    found = Inspection(document.facts, notices=list(document.notices))
    for problem in document.problems:
        if problem.code == "model-not-found" and (offline or _UNREACHABLE.search(problem.message)):
            found.unchecked.append(
                f"the model `{recipe.model.name_or_path}`: the hub cannot be reached, and its files "
                "are not in the cache"
            )
        else:
            found.problems.append(problem)
    if found.model is not None and not found.problems:
        found.problems += merge_problems(recipe, found.model) or carried_problems(recipe, found.model)
    elif found.model is None and found.problems:
        found.unchecked.append(
            "checks that need the complete model, such as the merge of adapters and the size of the embedding"
        )
    if found.model is not None and found.model.has_unread_tensors:
        name = recipe.model.name_or_path
        found.unchecked.append(
            f"the tensors of `{name}`: its weights are not on this machine; `fsdp-tune prepare "
            "--download` fetches them"
        )
    return found


def with_tensors(recipe: Recipe, found: Inspection, report: Callable[[str], None]) -> Inspection:
    """Return an inspection that knows the tensors of a base on the hub: from headers, or from its files,
    which are downloaded now.

    Files of `torch.save` have no headers that could be read remotely. Without the account of its tensors, a
    merge would lose those that
    are not trained. Raises: usage error for a model that cannot be downloaded.
    """
    if found.model is None or not found.model.has_unread_tensors or found.problems:
        return found
    report(f"the model is in {download_model(str(recipe.model.name_or_path), recipe.model.revision)}")
    return inspect_model(recipe)


def _inspect_in_child(recipe: Recipe, *, offline: bool) -> ModelInspection:
    """Return the document of `fsdp_tune.model.loading.inspect`, kept or new, or one with the reason why there
    is none."""
    environment = kept_inspections.without_session(os.environ) | ({"HF_HUB_OFFLINE": "1"} if offline else {})
    environment |= {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    raw = kept_inspections.inspected_part(recipe).model_dump_json(by_alias=True)
    entry = kept_inspections.entry_path(INSPECT, raw, environment)
    if entry is not None and (document := kept_inspections.kept(entry)) is not None:
        return document
    command = (*INSPECT, *([str(entry), str(time.time_ns())] if entry is not None else []))
    child = children.start(
        command, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        output, errors = child.communicate(raw, timeout=INSPECT_SECONDS)
    except subprocess.TimeoutExpired:
        return ModelInspection(
            None,
            (Problem("model-not-inspected", f"inspecting the model took more than {INSPECT_SECONDS:.0f} s"),),
        )
    finally:
        children.end(child)
    try:
        return ModelInspection.from_json(output)
    except ValueError:
        return ModelInspection(None, (_crashed(child.returncode, errors),))


def _crashed(exit_code: int, errors: str) -> Problem:
    is_killed = exit_code < 0
    hint = (
        "out of host memory? The kernel then kills a process: see `dmesg`"
        if is_killed
        else "`fsdp-tune env` shows the installation"
    )
    return Problem(
        "model-not-inspected",
        f"the model could not be inspected: {children.describe_failure(exit_code, errors)}",
        hint=hint,
    )


def inspect_data(recipe: Recipe, *, has_tokenizer: bool = True) -> Inspection:
    """Load the tokenizer, open every source and read its first rows; write nothing.

    Without tokenizer or template the rows are still read and converted, but not encoded. `has_tokenizer`:
    whether the keys of the tokenizer are right.
    """
    found = Inspection()
    encoder = _encoder(recipe, found, has_tokenizer=has_tokenizer)
    is_encoding = encoder is not None
    if encoder is None:
        encoder = stand_in_encoder()
    else:
        with found.collected():
            sample_prompts(recipe, encoder)
    inputs, errors = opened_inputs(recipe, encoder)
    for error in errors:
        found.add(error)
    first = [read_first_rows(opened, encoder, is_encoding=is_encoding) for opened in inputs]
    for each in first:
        found.inputs.append(each.checked)
        if each.error is not None:
            found.add(each.error)
    bad = bad_first_rows(inputs, first)
    found.problems.extend(bad.problems(recipe.data))
    found.notices.extend(bad.notices(recipe.data))
    if inputs and not is_encoding:
        found.unchecked.append("the rows as tokens: encoding them needs the tokenizer and its chat template")
    return found


def _encoder(recipe: Recipe, found: Inspection, *, has_tokenizer: bool) -> Encoder | None:
    """Return the encoder; None, with the problems in `found`, if the tokenizer or the chat template of the
    recipe cannot be used."""
    has_template = recipe.data.chat_template is None
    with found.collected():
        if recipe.data.chat_template is not None:
            resolve_template(recipe.data.chat_template)
            has_template = True
    if not has_tokenizer:
        return None
    plain = recipe.model_copy(update={"data": recipe.data.model_copy(update={"chat_template": None})})
    with found.collected():
        encoder = load_encoder(recipe if has_template else plain)
        found.vocabulary_size = encoder.vocabulary_size
        found.notices.extend(encoder.notices)
        return encoder if has_template else None
    return None
