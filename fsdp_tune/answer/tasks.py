"""Run tasks of lm_eval on a model, in a process of its own:
`python -m fsdp_tune.answer.tasks < request.json`.

Prints one JSON line on stdout: `{"scores": {"arc_easy/acc": {"value", "low", "high", "rows"}, …}}`.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from typing import Any

from fsdp_tune.answer.tasks_request import TasksRequest, normal_interval
from fsdp_tune.run.event_parts import CheckpointScore


def run(request: TasksRequest) -> dict[str, CheckpointScore]:
    """Return the scores of each task by name: `task/metric`, of another filter than lm_eval's `none`
    `task/metric.filter`."""
    import lm_eval  # pyright: ignore[reportMissingImports]  of the extra `eval`

    arguments: dict[str, object] = {
        "pretrained": request.weights,
        "dtype": "auto",
        "trust_remote_code": request.trust_remote_code,
    }
    if request.adapter is not None:
        arguments["peft"] = request.adapter
    found: Any = lm_eval.simple_evaluate(
        model="hf",
        model_args=arguments,
        tasks=list(request.tasks),
        device=request.device,
        batch_size=request.batch_size,
        limit=request.rows,
        log_samples=False,
    )
    return scores_of(found)


def scores_of(found: dict[str, Any]) -> dict[str, CheckpointScore]:
    """Return the scores in the results of lm_eval: each finite `metric,filter`, with the interval of its
    `metric_stderr,filter`."""
    scores: dict[str, CheckpointScore] = {}
    for task, results in found["results"].items():
        rows = int(found.get("n-samples", {}).get(task, {}).get("effective", 0))
        for key, value in results.items():
            metric, _, kind = key.partition(",")
            if (
                not kind
                or metric.endswith("_stderr")
                or isinstance(value, bool)
                or not isinstance(value, int | float)
            ):
                continue
            if not math.isfinite(value):
                sys.stderr.write(f"`{task}/{key}` is {value}, so it is left out\n")
                continue
            error = results.get(f"{metric}_stderr,{kind}")
            name = f"{task}/{metric}" + ("" if kind == "none" else f".{kind}")
            scores[name] = CheckpointScore(float(value), *normal_interval(float(value), error), rows)
    return scores


def main() -> None:
    request = TasksRequest.from_json(sys.stdin.read())
    output = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # libraries print; stdout must hold JSON alone
        scores = run(request)
    output.write(json.dumps({"scores": {name: score.as_dict() for name, score in scores.items()}}) + "\n")


if __name__ == "__main__":
    main()
