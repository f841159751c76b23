"""Answer prompts with a trained model, or with it and its base: one after another in a chat, or those of a file."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

from fsdp_tune.answer.examples import (
    AnswerSettings,
    ModelsRequest,
    ModelToEvaluate,
    ReferenceAnswer,
    ReferenceTokens,
    ScoredTokens,
    ScoreRequest,
    find_model,
    run_of_model,
)
from fsdp_tune.core.atomic import check_output_file, write_file
from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.core.errors import NOWHERE, FsdpTuneError, Notice, Problem, Where, failed_error, usage_error
from fsdp_tune.core.files import expanded
from fsdp_tune.core.processes import QUIET_LIBRARIES, JsonChild
from fsdp_tune.data.preparation import Prepared
from fsdp_tune.data.prompts import Prompt, PromptDescription, prompt_of_row
from fsdp_tune.data.read.row_files import BadRow, RowError
from fsdp_tune.data.read.sources import find_source
from fsdp_tune.jobs.evaluate import device_of, lines_of
from fsdp_tune.jobs.evaluated_recipes import recipe_of_model, recipe_of_run
from fsdp_tune.jobs.observer import Observer, session
from fsdp_tune.jobs.options import GenerateOptions
from fsdp_tune.jobs.recipes import refuse_code
from fsdp_tune.launch.command.resume import read_resolved
from fsdp_tune.merge import merging
from fsdp_tune.merge.merge_options import MergeOptions, hints_with_command
from fsdp_tune.merge.quantised import rounding_notices
from fsdp_tune.merge.source import newer_checkpoint
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.sections import DataSource
from fsdp_tune.run.directory import RunDir, checkpoint_step, latest_checkpoint, run_of

ANSWER = (sys.executable, "-P", "-m", "fsdp_tune.answer.generate")
UNUSABLE = "prompt-unusable"
"""Code of the problem of a prompt that cannot be answered."""
FinishReason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True, slots=True)
class GeneratedAnswer(JsonAnswer):
    """The answer of one model to one prompt."""

    model: str
    row: str | None
    """File and line of the prompt; null in a chat."""
    prompt: str
    """All that the model received, with special tokens."""
    output: str
    prompt_tokens: int
    tokens: int
    """Generated, with the token that ended the answer."""
    finish_reason: FinishReason
    """stop: the model ended the answer. length: `--max-new-tokens`, or the last position of the model. interrupted: Ctrl-C."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Generation(JsonAnswer):
    """The result, and the document of `generate --json` and `chat --json`."""

    model: str
    base: str | None
    format: str
    """How prompts are formatted."""
    ends: list[str]
    """Tokens after which an answer ends."""
    answers: list[GeneratedAnswer]
    """In the order of the prompts; of each prompt, that of the model and then that of the base."""
    seconds: float
    device: str


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """A prompt for the model and its base, and its position in a file."""

    of_models: tuple[Prompt, ...]
    """One for each model, since in a chat each continues its own answers; the last one is for all that follow."""
    where: Where = NOWHERE

    @property
    def shown(self) -> str:
        return self.of_models[0].shown


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """The next part of an answer that is being generated."""

    prompt: AskedPrompt
    names: tuple[str, ...]
    """Of all models that answer."""
    model: int
    """Index of the name of the model that answers."""
    text: str
    """Empty when the answer begins."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What answers: the models to load, and the run that gives the format of prompts."""

    models: tuple[ModelToEvaluate, ...]
    names: tuple[str, ...]
    """Of the answers: the model, and the base if it answers too."""
    run: RunDir | None

    @property
    def adapter_off(self) -> bool:
        return len(self.names) > len(self.models)


@contextmanager
def open_model(name: str | Path, options: GenerateOptions, *, observer: Observer = Observer()) -> Iterator[AnsweringModel]:
    """Load a model in a child process, and yield it.

    `name` is a run (its merged model, else its adapter, else the adapter of its newest complete checkpoint), a model directory, an adapter
    or a hub id. Raises: FsdpTuneError, with exit code 1 for a model that cannot be run.
    """
    _check(options)
    device = device_of(options.device)
    with ExitStack() as stack:
        chosen = _choose(str(name), options, observer, stack)
        prepared = None if chosen.run is None else Prepared.read(chosen.run.data_json)
        request = ModelsRequest(
            models=list(chosen.models),
            adapter_off=chosen.adapter_off,
            recipe=_settings(chosen, options).model_dump(mode="json", by_alias=True),
            data=None if prepared is None else prepared.report.model_dump(mode="json"),
            settings=AnswerSettings(options.max_new_tokens, options.temperature, options.top_p, options.seed, options.show_special_tokens),
            device=device,
            dtype=options.dtype,
            trust_remote_code=options.allowed.remote_code,
        )
        yield stack.enter_context(AnsweringModel.start(request, chosen.names, observer))


class AnsweringModel:
    """A child process that has loaded the models and answers prompts."""

    def __init__(self, child: JsonChild, names: Sequence[str], device: str) -> None:
        self.names, self.device = tuple(names), device
        self.format = PromptDescription(is_chat=False, text="", ends=())
        self._child = child

    @classmethod
    @contextmanager
    def start(cls, request: ModelsRequest, names: Sequence[str], observer: Observer) -> Iterator[Self]:
        """Load the models, and yield what answers. Raises: FsdpTuneError with the child's problems."""
        observer.phase("importing torch and transformers")
        with JsonChild(ANSWER, os.environ | QUIET_LIBRARIES) as child:
            loaded = cls(child, names, request.device)
            loaded._load(request, observer)
            yield loaded

    def _load(self, request: ModelsRequest, observer: Observer) -> None:
        self._send(request.as_json())
        for line in self._lines():
            if "phase" in line:
                observer.phase(line["phase"])
                continue
            raw = line["format"]
            self.format = PromptDescription(raw["is_chat"], raw["text"], tuple(raw["ends"]))
            observer.notices([Notice(each["code"], each["message"], hint=each["hint"]) for each in line["notices"]])
            return

    def answer(
        self, prompts: Sequence[AskedPrompt], *, system: str | None = None, piece: Callable[[AnswerPiece], None] | None = None
    ) -> Iterator[GeneratedAnswer]:
        """Yield the answers to a list of prompts: of each model to the first, then to the second …

        All prompts are encoded before the first is answered. `system`: the system message of each.
        Raises: FsdpTuneError with every prompt that cannot be answered.
        """
        last = len(self.names) - 1
        asked = [[each.of_models[min(model, len(each.of_models) - 1)] for model in range(last + 1)] for each in prompts]
        self._send(json.dumps([[{**asdict(each), "system": system} for each in of_models] for of_models in asked]))
        for line in self._lines():
            self._refuse_bad(line, prompts)
            if "end" in line:
                return
            prompt, model = prompts[int(line["prompt"])], int(line["model"])
            if "piece" in line and piece is not None:
                piece(AnswerPiece(prompt, self.names, model, line["piece"]))
            if "answer" in line:
                yield GeneratedAnswer(model=self.names[model], row=str(prompt.where) or None, **line["answer"])

    def refer(self, prompts: Sequence[AskedPrompt], max_new_tokens: int) -> tuple[ReferenceTokens, list[ReferenceAnswer]]:
        """Return the special tokens, and what the model makes of each prompt.

        Raises: FsdpTuneError with every prompt that cannot be answered.
        """
        sent = [asdict(each.of_models[0]) for each in prompts]
        first, *lines = list(self._object({"references": sent, "max_new_tokens": max_new_tokens}, prompts))
        return ReferenceTokens(**first["special"]), [ReferenceAnswer(**line["reference"]) for line in lines]

    def scores(self, answers: Sequence[ScoreRequest]) -> list[ScoredTokens]:
        """Return the model's log-probabilities of each answer."""
        return [ScoredTokens(**line["score"]) for line in self._object({"scores": [asdict(each) for each in answers]})]

    def texts(self, every: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each list of ids."""
        return [line["text"] for line in self._object({"decode": [list(ids) for ids in every]})]

    def _object(self, request: dict[str, object], prompts: Sequence[AskedPrompt] = ()) -> Iterator[dict[str, Any]]:
        self._send(json.dumps(request))
        for line in self._lines():
            self._refuse_bad(line, prompts)
            if "end" in line:
                return
            yield line

    def _refuse_bad(self, line: dict[str, Any], prompts: Sequence[AskedPrompt]) -> None:
        """Raises: FsdpTuneError with every prompt that cannot be answered."""
        if "bad" in line:
            raise FsdpTuneError(*(Problem("prompt-unusable", why, prompts[int(number)].where, hint) for number, why, hint in line["bad"]))

    def stop(self) -> None:
        """End the answer that is being generated; it is returned as far as it is."""
        self._child.interrupt()

    def _send(self, line: str) -> None:
        self._child.send(line)

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Yield the child's lines. Raises: FsdpTuneError with its problems, or if it ends."""
        yield from lines_of(self._child)
        message = f"the model could not be run: {self._child.failure()}"
        raise failed_error("generation-failed", message, hint="`fsdp-tune env` shows the installation")


def generate(
    model: str | Path,
    prompts: str | Path,
    options: GenerateOptions = GenerateOptions(),
    *,
    output: Path | None = None,
    piece: Callable[[AnswerPiece], None] | None = None,
    observer: Observer = Observer(),
) -> Generation:
    """Answer the prompts of a file: rows with `messages`, `prompt` or `text`, or a text file with a prompt on each line.

    With `output`, an object for each answer is written there as JSON Lines, once all are generated. `piece` receives the answers as they
    come; without it there is a progress bar. Raises: FsdpTuneError with file and line of every prompt that cannot be answered.
    """
    with session():
        started = time.monotonic()
        if output is not None:
            check_output_file(output, replaces=True)
        found = read_prompts(str(prompts))
        with open_model(model, options, observer=observer) as opened:
            total = len(found) * len(opened.names)
            answers: list[GeneratedAnswer] = []
            with nullcontext() if piece is not None else observer.progress("generating", total, "answers") as bar:
                for answer in opened.answer(found, system=options.system, piece=piece):
                    answers.append(answer)
                    if bar is not None:
                        bar.advance()
            made = generation(opened, answers, time.monotonic() - started)
        if output is not None:
            write_file(output, "".join(json.dumps(answer.as_dict(), ensure_ascii=False) + "\n" for answer in answers))
        return made


def generation(opened: AnsweringModel, answers: Sequence[GeneratedAnswer], seconds: float) -> Generation:
    """Return the result for the answers of an opened model."""
    return Generation(
        model=opened.names[0],
        base=opened.names[1] if len(opened.names) > 1 else None,
        format=opened.format.text,
        ends=list(opened.format.ends),
        answers=list(answers),
        seconds=round(seconds, 3),
        device=opened.device,
    )


def read_prompts(path: str) -> list[AskedPrompt]:
    """Return the prompts of a file. Raises: usage error with file and line of every row that has none."""
    if not path:
        raise usage_error("usage", "`--prompts` is empty", hint="name a file")
    source = find_source(DataSource(path=path), "--prompts")
    found: list[AskedPrompt] = []
    problems: list[Problem] = []
    for file, row in source.read():
        is_line = bool(source.files) and source.files[file].kind == "text"
        if not isinstance(row, BadRow):
            if is_line and not str(row[1]["text"]).strip():
                continue
            try:
                prompt = prompt_of_row(row[1], is_line=is_line)
                found.append(AskedPrompt((prompt,), Where(source.names[file], row[0])))
                continue
            except RowError as error:
                row = error.bad_row(row[0])
        problems.append(Problem("prompt-unusable", row.reason, Where(source.names[file], row.number, row.column), row.hint))
    if problems:
        raise FsdpTuneError(*problems)
    if not found:
        raise usage_error("no-rows", "it holds no prompts", where=Where(source.names[0]))
    return found


def _check(options: GenerateOptions) -> None:
    """Raises: usage error for a temperature or a share that is out of range."""
    if not (math.isfinite(options.temperature) and options.temperature >= 0):
        raise usage_error("wrong-value", f"`--temperature {options.temperature}` is not 0 or more", hint="0 is greedy; 0.7 is common")
    if not 0 < options.top_p <= 1:
        raise usage_error("wrong-value", f"`--top-p {options.top_p}` is not above 0 and at most 1", hint="--top-p 0.95")
    if options.top_p < 1 and options.temperature == 0:
        raise usage_error("wrong-value", "`--top-p` has no effect at temperature 0", hint="add `--temperature 0.7`, or leave it out")


def _settings(chosen: _Chosen, options: GenerateOptions) -> Recipe:
    """Return the recipe that formats prompts. Raises: usage error if it runs code that is not allowed."""
    recipe = recipe_of_run(chosen.run) if chosen.run is not None else recipe_of_model(chosen.models[0], options.allowed)
    raw = recipe.model_dump(by_alias=True)
    # Callbacks, loaders and the kernels of attention and experts in training are not used here.
    raw |= {"extensions": {}}
    raw["model"]["attn_implementation"] = "auto"
    raw["kernels"]["experts"] = "auto"
    raw["data"] |= {"eval": None, "mixture": {}, "curriculum": []}
    raw["data"]["train"] = [each | {"loader": None, "loader_options": {}} for each in raw["data"]["train"]]
    recipe = Recipe.model_validate(raw)
    refuse_code(recipe, options.allowed, starts_ranks=False)
    return recipe


# ---- Which model answers.


def _choose(name: str, options: GenerateOptions, observer: Observer, stack: ExitStack) -> _Chosen:
    path = expanded(name)
    run = run_of(path) if path.is_dir() else None
    if run is not None:
        return _of_run(run, name, _step(path, options), options, observer, stack)
    if options.checkpoint is not None:
        raise usage_error("usage", f"`--checkpoint` chooses a checkpoint of a run, and `{name}` is none", hint="give the run directory")
    model = find_model(name)
    run = run_of_model(model)
    if run is not None:
        folder = Path(model.adapter or model.weights)
        observer.notices([*newer_checkpoint(run, folder), *rounding_notices(read_resolved(run), folder, run)])
    return _with_base(model, run, options)


def _step(path: Path, options: GenerateOptions) -> int | None:
    """Return the step of the checkpoint that is named: by `--checkpoint 500` or `checkpoint-500`, or as the model."""
    given = None if options.checkpoint is None else options.checkpoint.rstrip("/").rpartition("/")[2].removeprefix("checkpoint-")
    if given is not None and not given.isdecimal():
        raise usage_error("wrong-value", f"`--checkpoint {options.checkpoint}` is not a step", hint="--checkpoint 500")
    return checkpoint_step(path) if given is None else int(given)


def _of_run(run: RunDir, name: str, step: int | None, options: GenerateOptions, observer: Observer, stack: ExitStack) -> _Chosen:
    """Return the merged model of a run, else its adapter, else that of a checkpoint.

    With `--base` an adapter comes first, since it has its base in the same weights.
    """
    is_adapter = read_resolved(run).lora is not None
    folders = (run.adapter, run.merged) if is_adapter and options.base else (run.merged, run.adapter)
    exported = next((folder for folder in folders if _is_exported(folder)), None)
    if is_adapter and (step is not None or exported is None or (options.base and exported == run.merged)):
        return _with_base(_of_checkpoint(run, step, observer, stack), run, options)
    if step is not None or exported is None:
        _refuse_unmerged(run, name, step)
    observer.notices([*newer_checkpoint(run, exported), *rounding_notices(read_resolved(run), exported, run)])
    model = find_model(str(exported))
    return _with_base(replace(model, name=name), run, options)


def _is_exported(folder: Path) -> bool:
    return any((folder / file).is_file() for file in ("config.json", "adapter_config.json"))


def _refuse_unmerged(run: RunDir, name: str, step: int | None) -> NoReturn:
    """Raises: usage error with the commands that merge a run, or one of its checkpoints."""
    if step is None and latest_checkpoint(run)[0] is not None:
        find_model(name)
    folder = run.path if step is None else run.path / f"merged-{step}"
    shown, output = shlex.quote(str(run.path)), shlex.quote(str(folder))
    if step is None:
        message = f"`{name}` has neither a merged model nor a complete checkpoint"
        raise usage_error("run-not-merged", message, hint=f"`fsdp-tune status {shown}` shows what it has")
    ways = (f"fsdp-tune merge-checkpoint {shown} --step {step} --output {output}", f"fsdp-tune chat {output}")
    raise usage_error("run-not-merged", f"checkpoint-{step} of `{run.path}` is sharded, and has to be merged first", ways_out=ways)


def _of_checkpoint(run: RunDir, step: int | None, observer: Observer, stack: ExitStack) -> ModelToEvaluate:
    """Return the adapter of a checkpoint, written as PEFT's files into a temporary directory. Raises: FsdpTuneError."""
    observer.phase("reading the adapter of a checkpoint")
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fsdp-tune-"))) / "adapter"
    with hints_with_command(run.path):
        merged = merging.merge_checkpoint(run.path, MergeOptions(output=folder, step=step, adapter=True), observer.progress)
    observer.notices(merged.notices)
    return replace(find_model(str(folder)), name=str(merged.source))


def _with_base(model: ModelToEvaluate, run: RunDir | None, options: GenerateOptions) -> _Chosen:
    """Add the base to a model, if `--base` wants it. Raises: usage error for a model without a base."""
    if not options.base:
        return _Chosen((model,), (model.name,), run)
    if model.adapter is not None:
        weights = Path(model.weights)
        shown = weights.relative_to(Path.cwd()) if weights.is_relative_to(Path.cwd()) else model.weights
        return _Chosen((model,), (model.name, f"{shown} (without the adapter)"), run)
    start = read_resolved(run).model if run is not None else None
    if start is None or start.name_or_path is None:
        reason = "is neither a run nor an adapter" if run is None else "was trained from random weights"
        raise usage_error("no-base", f"`--base`: `{model.name}` {reason}, so it has no base", hint="leave out `--base`")
    base = replace(find_model(start.name_or_path), revision=start.revision)
    return _Chosen((model, base), (model.name, base.name), run)
