"""Report the compiler's time as an event, outside the steps' time, and warn where it starts again or gives up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fsdp_tune.model.compiled import CompileClock, expected_graphs

if TYPE_CHECKING:
    from fsdp_tune.worker.trainer import FsdpTrainer


class CompileReport(TrainerCallback):
    """Report after each step what the compiler did. `say` prints a plain line on rank 0."""

    trainer: FsdpTrainer

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._clock = CompileClock()
        self._seconds, self._graphs = 0.0, 0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        for function in self._clock.take_fallbacks():
            message = f"{function} was compiled too often and runs uncompiled from here on where no graph fits"
            self.trainer.parts.metrics.event("compile_fallback", state.global_step, message=message)
            self._say(f"WARNING: {message}; TORCH_LOGS=recompiles shows why")
        seconds, graphs = self._clock.seconds - self._seconds, self._clock.graphs
        if graphs == self._graphs:
            return
        self._seconds, self._graphs = self._clock.seconds, graphs
        self.trainer.lines.leave_out(seconds)
        self.trainer.parts.metrics.event("compiled", state.global_step, seconds=seconds, graphs=graphs)
        expected = expected_graphs(self.trainer.parts.recipe, [layer for _, layer in self.trainer.parts.loaded.layers])
        again = f"; {graphs} graphs by now, where {expected} were expected" if graphs > expected else ""
        self._say(f"compiled in {seconds:.1f} s, in step {state.global_step}{again}")
