"""How long the compiler took, as an event, and out of the steps' time; and a warning when it starts again late in a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fsdp_tune.model.compiled import CompileClock
from fsdp_tune.recipe.schema import Recipe

if TYPE_CHECKING:
    from fsdp_tune.worker.trainer import FsdpTrainer

GRAPHS_OF_A_LAYER = 4
"""One for the first width of a batch, one for any width, one for the short last batch of an epoch, and one for evaluation, which keeps
nothing for a backward."""


def expected_graphs(recipe: Recipe) -> int:
    """At most; layers of a kind share theirs, and one that is recomputed is of another kind than one that is not.

    Where inputs go to the host the graph ends inside what is recomputed, and a forward and its repetition get one each.
    """
    fsdp = recipe.fsdp
    if fsdp.activation_checkpointing == "none":
        return GRAPHS_OF_A_LAYER
    kinds = (2 if fsdp.activation_checkpointing_every > 1 else 1) * (2 if fsdp.activation_checkpointing_offload else 1)
    return kinds * GRAPHS_OF_A_LAYER


class CompileReport(TrainerCallback):
    """Looks after each step whether the compiler has been at work. `say` prints a plain line on rank 0."""

    trainer: FsdpTrainer

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._clock = CompileClock()
        self._seconds, self._graphs = 0.0, 0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        seconds, graphs = self._clock.seconds - self._seconds, self._clock.graphs
        if graphs == self._graphs:
            return
        self._seconds, self._graphs = self._clock.seconds, graphs
        self.trainer.lines.leave_out(seconds)
        self.trainer.parts.metrics.event("compiled", state.global_step, seconds=seconds, graphs=graphs)
        expected = expected_graphs(self.trainer.parts.recipe)
        again = f"; {graphs} graphs by now, where {expected} were expected" if graphs > expected else ""
        self._say(f"compiled in {seconds:.1f} s, in step {state.global_step}{again}")
