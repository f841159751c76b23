"""`chat` and `generate`: the answers of a model to what is typed, or to the prompts of a file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import fsdp_tune
from fsdp_tune.cli.screen import Screen
from fsdp_tune.cli.verbs import verb
from fsdp_tune.core.command import Argument, Option
from fsdp_tune.core.errors import FsdpTuneError, usage_error
from fsdp_tune.core.signals import interrupts_call
from fsdp_tune.jobs.options import GenerateOptions

if TYPE_CHECKING:
    from fsdp_tune.cli.progress import LiveColumns
    from fsdp_tune.data.prompts import Prompt
    from fsdp_tune.jobs.generate import AnsweringModel, AnswerPiece, AskedPrompt, GeneratedAnswer

ModelArgument = Annotated[
    str, Argument("A run, a model directory, a PEFT adapter, or a hub id.", metavar="MODEL")
]
ASK, CONTINUE = "> ", ". "
HELP = (
    "/reset          forget the conversation",
    "/system TEXT    set the system message and forget the conversation; without TEXT there is none",
    "/exit           leave, as Ctrl-D does",
    "A line that ends with a backslash is continued. A message that begins with / is typed as //.",
    "Ctrl-C stops an answer; pressed again, or at the prompt, it leaves.",
)


@verb
def chat(screen: Screen, model: ModelArgument, options: GenerateOptions) -> None:
    """Talk to the model of a run, with its chat template and its stop tokens.

    For a run, the merged model answers, or else its adapter, or else the adapter of its newest complete
    checkpoint. `/help` lists the commands. Ctrl-C stops an answer, and Ctrl-D ends the chat.

    \b
    Examples:
        fsdp-tune chat runs/llama7b
        fsdp-tune chat runs/adapter --base --temperature 0.7
    """
    from fsdp_tune.jobs.generate import generation, open_model

    started = time.monotonic()
    with open_model(model, options, observer=screen) as opened:
        screen.end_phase()
        if options.system is not None and not opened.format.is_chat:
            raise usage_error(
                "usage", "`--system` needs a chat, and this model has none", hint="leave out `--system`"
            )
        conversation = Conversation(screen, opened, options.system)
        screen.message(
            f"{' and '.join(opened.names)} on {opened.device}; ready in {time.monotonic() - started:.1f} s"
        )
        screen.message(f"{opened.format.text}; answers end at {', '.join(opened.format.ends)}")
        screen.message("/help lists the commands, Ctrl-D leaves")
        try:
            conversation.run()
        except KeyboardInterrupt:
            screen.message("")
        screen.document(generation(opened, conversation.answers, time.monotonic() - started))


@verb
def generate(
    screen: Screen,
    model: ModelArgument,
    prompts: Annotated[
        str,
        Option(
            "JSON Lines with `messages`, `prompt` or `text`, or a text file with a prompt on each line.",
            metavar="FILE",
        ),
    ],
    options: GenerateOptions,
    output: Annotated[
        Path | None,
        Option("Write an object for each answer, as JSON Lines.", flags=("--output", "-o"), metavar="FILE"),
    ] = None,
) -> None:
    """Answer the prompts of a file, as `chat` does.

    A `prompt`, or a line of a text file, is formatted as in training; for a chat model, it is a message of
    the user. `messages` are answered after the last message that is not the assistant's. A `text` is
    continued unchanged.

    \b
    Examples:
        fsdp-tune generate runs/llama7b --prompts questions.txt
        fsdp-tune generate runs/adapter --prompts test.jsonl --base --output answers.jsonl
    """
    if output is not None:
        found = fsdp_tune.generate(model, prompts, options, output=output, observer=screen)
        screen.message(f"{len(found.answers):,} answers are in {output}")
    else:
        shown = ShownAnswers(screen)
        found = fsdp_tune.generate(model, prompts, options, piece=shown.piece, observer=screen)
        shown.end()
    screen.document(found)


class Conversation:
    """Reads what is typed, and prints the answers. Each model continues its own conversation."""

    def __init__(self, screen: Screen, opened: AnsweringModel, system: str | None) -> None:
        self._screen, self._opened, self._system = screen, opened, system
        self._turns: tuple[list[dict[str, str]], ...] = tuple([] for _ in opened.names)
        self.answers: list[GeneratedAnswer] = []

    def run(self) -> None:
        """Answer until `/exit` or the end of the input. Raises: KeyboardInterrupt on Ctrl-C at the prompt,
        and on a second one."""
        while (typed := self._read()) is not None:
            if typed.startswith("/") and not typed.startswith("//"):
                if not self._obey(*typed[1:].split(maxsplit=1)):
                    return
            elif typed.strip():
                self._answer(typed.removeprefix("/"))

    def _read(self) -> str | None:
        """Return what is typed up to a line that no backslash continues; None at the end of the input."""
        lines: list[str] = []
        while (line := self._screen.ask(CONTINUE if lines else ASK)) is not None:
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                break
        return "\n".join(lines) if lines else None

    def _obey(self, name: str = "", text: str = "") -> bool:
        """Do what a command says, and return whether the chat continues."""
        if name == "exit":
            return False
        if name == "help":
            for line in HELP:
                self._screen.message(line)
        elif name == "reset":
            self._reset()
        elif name == "system" and not self._opened.format.is_chat:
            self._screen.message("there is no chat template, so there is no system message")
        elif name == "system":
            self._system = text.strip() or None
            self._reset()
        else:
            self._screen.message(f"there is no command /{name}; /help lists them")
        return True

    def _reset(self) -> None:
        for turns in self._turns:
            turns.clear()
        has_system = f", with the system message {self._system!r}" if self._system is not None else ""
        self._screen.message(f"a new conversation{has_system}")

    def _answer(self, text: str) -> None:
        from fsdp_tune.jobs.generate import UNUSABLE, AskedPrompt

        asked = AskedPrompt(tuple(self._prompt(text, turns) for turns in self._turns))
        view = AnswerView(self._screen)
        self._screen.phase("answering")
        try:
            with interrupts_call(self._opened.stop):
                found = list(self._opened.answer([asked], system=self._system, piece=view.add))
        except FsdpTuneError as error:
            if {problem.code for problem in error.problems} != {UNUSABLE}:
                raise
            self._screen.end_phase()
            self._screen.problems(error.problems)
            return
        finally:
            view.end()
        self.answers += found
        # an answer that was stopped is the last one
        for turns, answer in zip(self._turns, found, strict=False):
            turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer.output}]
            if answer.finish_reason != "stop":
                how = (
                    "stopped"
                    if answer.finish_reason == "interrupted"
                    else f"cut at {answer.tokens:,} tokens: `--max-new-tokens`"
                )
                self._screen.message(f"({how})")

    def _prompt(self, text: str, turns: Sequence[dict[str, str]]) -> Prompt:
        from fsdp_tune.data.prompts import Prompt, question

        if not self._opened.format.is_chat:
            return question(text)
        return Prompt("chat", {"messages": [*turns, {"role": "user", "content": text}]})


class ShownAnswers:
    """Prints the prompts of a file with their answers as they come."""

    def __init__(self, screen: Screen) -> None:
        self._screen, self._view = screen, AnswerView(screen)
        self._prompt: AskedPrompt | None = None

    def piece(self, piece: AnswerPiece) -> None:
        if piece.prompt is not self._prompt:
            self.end()
            self._screen.end_phase()
            self._screen.message(f"{piece.prompt.where}{ASK}{piece.prompt.shown}", wraps=False)
            self._prompt = piece.prompt
        self._view.add(piece)

    def end(self) -> None:
        self._view.end()


class AnswerView:
    """Prints the answers to one prompt as they come: next to each other on a wide terminal, else below each
    other."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._columns: LiveColumns | None = None
        self._wrapped = WrappedText(screen.wrap_width)
        self._model: int | None = None
        self._has_text = False

    def add(self, piece: AnswerPiece) -> None:
        if len(piece.names) > 1 and self._screen.is_live and not self._screen.is_narrow:
            self._add_to_column(piece)
            return
        if piece.model != self._model:
            self._end_text()
            self._screen.end_phase()
            if len(piece.names) > 1:
                self._screen.message(f"[{piece.names[piece.model]}]")
            self._model = piece.model
        self._has_text |= bool(piece.text)
        if text := self._wrapped.add(piece.text):
            self._screen.piece(text)

    def end(self) -> None:
        if self._columns is not None:
            self._columns.__exit__(None, None, None)
            self._columns = None
        self._end_text()

    def _add_to_column(self, piece: AnswerPiece) -> None:
        from fsdp_tune.cli.progress import LiveColumns

        if self._columns is None:
            self._screen.end_phase()
            self._columns = LiveColumns(self._screen, piece.names)
            self._columns.__enter__()
        self._columns.add(piece.model, piece.text)

    def _end_text(self) -> None:
        if self._model is not None:
            self._screen.piece((self._wrapped.end() if self._has_text else "(no text)") + "\n")
        self._model, self._has_text = None, False


class WrappedText:
    """Breaks a text that comes in pieces at its spaces, so that no word is broken at the edge of a terminal.

    A word is held back until it ends. Scripts without spaces are broken anywhere, and so is a word that is
    wider than the terminal.
    """

    def __init__(self, width: int | None) -> None:
        """`width`: columns; None leaves the text as it is."""
        self._width = width
        self._column, self._word = 0, ""

    def add(self, piece: str) -> str:
        """Return what can be printed now."""
        if self._width is None:
            return piece
        return "".join(map(self._character, piece.replace("\t", "    ")))

    def end(self) -> str:
        """Return the rest, and start a new text."""
        rest = self._flushed()
        self._column = 0
        return rest

    def _character(self, char: str) -> str:
        assert self._width is not None
        if char == "\n":
            rest, self._column = self._flushed(), 0
            return rest + char
        if char == " ":
            rest = self._flushed()
            if self._column >= self._width:
                self._column = 0
                return rest + "\n"
            self._column += 1
            return rest + char
        self._word += char
        return self._flushed() if _cells(char) > 1 or _cells(self._word) >= self._width else ""

    def _flushed(self) -> str:
        assert self._width is not None or not self._word
        word, self._word = self._word, ""
        cells = _cells(word)
        if self._width is not None and self._column + cells > self._width and self._column:
            self._column = cells
            return f"\n{word}"
        self._column += cells
        return word


def _cells(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)
