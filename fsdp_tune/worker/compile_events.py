"""Report compile time as an event, outside the time of steps, and warn of recompilation and fallback."""

from __future__ import annotations

from collections.abc import Callable

from transformers import TrainerControl, TrainerState, TrainingArguments

from fsdp_tune.model.kernels.compiled import CompileClock, expected_graphs
from fsdp_tune.run.events import Compiled, CompileFallback
from fsdp_tune.worker.observe.step_phases import AttachedCallback


class CompileReport(AttachedCallback):
    """Report after each step what the compiler did. `say` prints a plain line on rank 0."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._clock = CompileClock()
        self._seconds, self._graphs = 0.0, 0

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        for function in self._clock.take_fallbacks():
            message = f"{function} was recompiled too often and now runs uncompiled where no graph fits"
            self.trainer.parts.metrics.event(CompileFallback(state.global_step, message))
            self._say(f"WARNING: {message}; TORCH_LOGS=recompiles shows why")
        seconds, graphs = self._clock.seconds - self._seconds, self._clock.graphs
        if graphs == self._graphs:
            return
        self._seconds, self._graphs = self._clock.seconds, graphs
        self.trainer.lines.leave_out(seconds)
        self.trainer.parts.metrics.event(Compiled(state.global_step, seconds, graphs))
        expected = expected_graphs(
            self.trainer.parts.recipe, [layer for _, layer in self.trainer.parts.loaded.layers]
        )
        again = f"; {graphs} graphs by now, where {expected} were expected" if graphs > expected else ""
        self._say(f"compiled in {seconds:.1f} s, in step {state.global_step}{again}")
