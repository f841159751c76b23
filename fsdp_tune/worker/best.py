"""By what a run chooses its best checkpoint: a metric, and the rows that it measures. Checkpoints have it
beside the best so far."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState, TrainingArguments

from fsdp_tune.data.store import RowStore
from fsdp_tune.run.manifest import Digester


def chosen_by(
    args: TrainingArguments, evals: Mapping[str, RowStore], user_metrics: Iterable[str]
) -> str | None:
    """Return metric, direction and digests of the rows as JSON; None if the ranks' evaluations choose
    nothing."""
    if args.metric_for_best_model is None:
        return None
    name = args.metric_for_best_model.removeprefix("eval_")
    measures = ("loss", "perplexity", *user_metrics)
    labels = [label for label in evals if name in {f"{label}_{each}" for each in measures}] or list(evals)
    rows = sorted(_digest(evals[label]) for label in labels)  # a set may have another label and another place
    return json.dumps(
        {"metric": f"eval_{name}", "greater_is_better": bool(args.greater_is_better), "rows": rows},
        sort_keys=True,
    )


def _digest(store: RowStore) -> str:
    found = Digester()
    for row in (store[index] for index in range(len(store))):
        found.update(f"{row.lengths}".encode())
        found.update(row.input_ids.tobytes())
        found.update(row.labels.tobytes())
    return found.entry().digest


def start_anew(state: TrainerState, callbacks: Iterable[TrainerCallback], before: str, now: str) -> str:
    """Forget the best so far, which was chosen `before` by something else. Return one sentence about it, or
    "" if there was none."""
    old, new = json.loads(before), json.loads(now)
    was, is_now = (
        f"{'highest' if each['greater_is_better'] else 'lowest'} {each['metric']}" for each in (old, new)
    )
    why = f"it is the {is_now} now" if was != is_now else f"{new['metric']} is measured on other rows now"
    best, at = state.best_metric, state.best_global_step
    state.best_metric = state.best_global_step = state.best_model_checkpoint = None
    for callback in callbacks:
        if isinstance(callback, EarlyStoppingCallback):
            callback.early_stopping_patience_counter = 0
    place = f" of step {at}" if at is not None else ""
    return (
        f"the best so far, the {was} ({best:.6g}){place}, no longer counts: {why}" if best is not None else ""
    )
