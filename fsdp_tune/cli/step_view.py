"""The lines of a training while it runs: one for each logged step and event, above the bar on a terminal."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from fsdp_tune.cli.progress import ScreenBar
from fsdp_tune.cli.terminal import Terminal
from fsdp_tune.cli.terminal_text import TREND, trend
from fsdp_tune.run.events import FirstStep, Stopping, TrainStarted, number, read_event
from fsdp_tune.run.metrics_event import AnyEvent
from fsdp_tune.run.time_left import TimeLeft

ENDED_PHASES = ("finished", "failed")
TRAINING_PHASES = ("training", "forward", "backward", "optimizer step")


class StepView:
    """Print a line for each step and event of metrics.jsonl, above the bar on a terminal."""

    def __init__(self, screen: Terminal, bar: ScreenBar) -> None:
        self._screen = screen
        self._bar = bar
        self._total = 0
        self._at = 0
        self._start = 0
        """Finished steps when the ranks started."""
        self._has_started = False
        self._detail = ""
        """Text next to the bar."""
        self._loss, self._last_evaluation = "", ""
        self._losses: deque[float] = deque(maxlen=TREND)
        self._evaluations: list[float] = []
        """Losses that are numbers, oldest first."""
        self._left = TimeLeft()
        bar.estimate_by(lambda: self._left.seconds_left(self._at))
        bar.enter("starting the ranks")

    def show(self, line: dict[str, object]) -> None:
        """Show a line of metrics.jsonl: an event, a step or an evaluation."""
        self._left.add(line)
        if (event := read_event(line)) is not None:
            self._event(event)
        elif "loss" in line:
            self._step(line)
        elif "eval_loss" in line:
            self._evaluated(line)

    def _evaluated(self, line: dict[str, object]) -> None:
        """Show an evaluation next to the bar, and print it with the loss of each set if there are several."""
        self._last_evaluation = f"eval loss {_number(line['eval_loss'], '.4f')}"
        if (value := number(line["eval_loss"])) is not None:
            self._evaluations.append(value)
        self._detail = self._beside_the_bar()
        self._bar.at(self._at, self._detail, self._losses)
        sets = [
            f"{name.removeprefix('eval_').removesuffix('_loss')} {_number(each, '.4f')}"
            for name, each in line.items()
            if _is_eval_of_a_set(name)
        ]
        self._screen.message(
            f"step {line['step']}: {self._last_evaluation}"
            + (f" ({', '.join(sets)})" if len(sets) > 1 else "")
        )

    def _beside_the_bar(self) -> str:
        """Return the loss, and last, best and trend of the evaluation loss."""
        if not self._last_evaluation:
            return self._loss
        best = f" (best {min(self._evaluations):.4f})" if self._evaluations else ""
        drawn = trend(self._evaluations, is_narrow=True) if self._screen.draws else ""
        return "  ".join(part for part in (self._loss, f"{self._last_evaluation}{best}", drawn) if part)

    def move(self, step: int, phase: str, done: int, planned: int) -> None:
        """Move the bar to the step of the first rank, and show its phase if that is not the training
        itself."""
        if self._total:  # heartbeats are read later than lines
            self._at = min(max(step, self._at), self._total)
            self._left.see(self._at)
            self._bar.at(self._at, self._detail, self._losses)
        if phase in TRAINING_PHASES:
            phase = "first step" if self._at == self._start else ""
        elif phase in ENDED_PHASES:
            phase = "ending the ranks"
        self._bar.enter(f"{phase} {done}/{planned} batches" if planned else phase)

    def _event(self, event: AnyEvent) -> None:
        shown = event.shown() if event.is_shown else []
        if isinstance(event, TrainStarted):
            self._total, self._at, self._start = event.total_steps, event.step, event.step
            self._bar.enter("first step")
            self._bar.start(self._at, self._total)
        elif isinstance(event, FirstStep) and not self._has_started:
            # The ranks count from their launch; every other time on the screen is that of the command.
            self._has_started = True
            elapsed = time.monotonic() - self._screen.began - (time.time() - (event.time or time.time()))
            shown = event.shown(max(0.0, elapsed - sum(event.phase_seconds.values())))
        elif isinstance(event, Stopping):
            self._bar.at(event.step, self._detail, self._losses)
        write = self._screen.warn if event.level == "alarm" else self._screen.message
        for text in shown:
            write(text)

    def _step(self, line: dict[str, Any]) -> None:
        """Print one line: the step, the time left and the loss first, then what a narrow terminal leaves
        out."""
        step = int(line["step"])
        loss = f"loss {_number(line['loss'], '.4f')}"
        if self._at == self._start:
            self._bar.enter("")
        self._at, self._loss = step, loss
        self._detail = self._beside_the_bar()
        self._losses.append(float(line["loss"]))
        self._bar.at(step, self._detail, self._losses)
        left, end = self._bar.left(), self._bar.end()
        ends = [end] if end and step < self._total else []
        first = [
            f"step {step}{f'/{self._total}' if self._total else ''}",
            *([left] if left and step < self._total else []),
            loss,
        ]
        norm, rate = _number(line.get("grad_norm"), ".3f"), f"lr {_number(line.get('learning_rate'), '.2e')}"
        speed = _number(line.get("tokens_per_second_per_device"), ",.0f")
        mfu = [f"MFU {line['mfu']:.0%}"] if line.get("mfu") is not None else []
        memory = line.get("peak_reserved_gib") or line.get("peak_host_gib")
        gib = [f"{_number(memory, '.2f')} GiB"] if memory is not None else []
        shares = _shares(line)
        wide = [", ".join(f"{name} {share:.0%}" for name, share in shares.items())] if shares else []
        short = (
            [" ".join(f"{SHORT_SHARES[name]} {share:.0%}" for name, share in shares.items())]
            if shares
            else []
        )
        slow = (
            [f"rank {line['slow_rank']} costs {line['slow_rank_share']:.0%} ({line['slow_rank_part']})"]
            if "slow_rank" in line
            else []
        )
        first += slow
        self._screen.fields(
            [
                *first,
                f"grad norm {norm}",
                rate,
                f"{speed} tokens/s/device",
                *mfu,
                *gib,
                *(f"({text})" for text in wide),
                *ends,
            ],
            narrow=[*first, f"{speed} tok/s", *short, *gib, *mfu, f"grad {norm}", rate],
        )


SHORT_SHARES = {"data": "data", "communication": "comm", "optimizer": "opt"}
"""Names of the shares on a narrow terminal."""


def _shares(line: dict[str, Any]) -> dict[str, float]:
    """Return the shares of a step that are not forward and backward."""
    named = (
        ("data", "data_wait_seconds", "step_seconds"),
        ("communication", "exposed_communication_seconds", "last_step_seconds"),
        ("optimizer", "optimizer_seconds", "last_step_seconds"),
    )
    return {
        name: line[part] / line[whole]
        for name, part, whole in named
        if line.get(part) is not None and line.get(whole)
    }


def _is_eval_of_a_set(name: str) -> bool:
    return name.startswith("eval_") and name.endswith("_loss") and name != "eval_loss"


def _number(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else "-" if value is None else str(value)
