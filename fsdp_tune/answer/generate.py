"""Answer prompts with a model, a piece of text at a time, in a process of its own:
`python -m fsdp_tune.answer.generate`.

The first line of stdin is a `ModelsRequest`, each further line a list of prompts: a row and its kind for each
of the models. SIGINT ends the answer that is being generated. Prints JSON lines:

`{"phase": "loading the model"}`, then `{"format": {…}, "device": "cpu", "notices": […]}` when prompts are
read. For each list of prompts `{"prompt": 0, "model": 0, "piece": "text"}` …,
`{"prompt": 0, "model": 0, "answer": {…}}` …, and `{"end": true}`; or, without an answer,
`{"bad": [[0, reason, hint], …]}` with every prompt that cannot be encoded. At the end of a failure
`{"problems": […], "exit_code": 2}`.

A comparison with a server sends objects instead of lists:
`{"references": [prompt, …], "max_new_tokens": 32}`, `{"scores": [{"ids", "tokens", "top"}, …]}` and
`{"decode": [ids, …]}` (`Reference`).
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator

import torch

from fsdp_tune.answer.answering import Answering, StopFlag
from fsdp_tune.answer.model_requests import ModelsRequest
from fsdp_tune.answer.server_reference import Reference
from fsdp_tune.core.errors import ExitCode, FsdpTuneError, Problem


def main() -> None:
    output = sys.stdout
    stop = StopFlag()
    signal.signal(signal.SIGINT, lambda _number, _frame: setattr(stop, "is_set", True))

    def emit(line: dict[str, object]) -> None:
        output.write(json.dumps(line) + "\n")
        output.flush()

    with contextlib.redirect_stdout(sys.stderr):  # libraries print; stdout must hold JSON alone
        try:
            lines = _lines()
            answering = Answering.load(ModelsRequest.from_json(next(lines)), stop, emit)
            reference: Reference | None = None
            for line in lines:
                request = json.loads(line)
                if isinstance(request, dict):
                    reference = reference or Reference(answering)
                    reference.reply(request, emit)
                else:
                    answering.answer(request, emit)
        except FsdpTuneError as error:
            emit(
                {
                    "problems": [problem.as_dict() for problem in error.problems],
                    "exit_code": int(error.exit_code),
                }
            )
        except torch.OutOfMemoryError as error:
            hint = "`--dtype bf16`, a smaller `--max-new-tokens`, or `--device cpu`"
            problem = Problem(
                "device-out-of-memory",
                f"the device is out of memory: {str(error).splitlines()[0]}",
                hint=hint,
            )
            emit({"problems": [problem.as_dict()], "exit_code": int(ExitCode.OUT_OF_MEMORY)})


def _lines() -> Iterator[str]:
    while line := sys.stdin.readline():
        yield line


if __name__ == "__main__":
    main()
