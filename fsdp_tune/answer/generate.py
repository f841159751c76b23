"""Answer prompts with a model, a piece of text at a time, in a process of its own:
`python -m fsdp_tune.answer.generate`.

The first line of stdin is a `ModelsRequest`, each further line a list of prompts: a row and its kind for each
of the models. SIGINT ends the answer that is being generated. Prints JSON lines:

`{"phase": "loading the tokenizer"}` …, then `{"format": {…}, "notices": […]}` when prompts are read. For each
list of prompts `{"prompt": 0, "model": 0, "piece": "text"}` …, `{"prompt": 0, "model": 0, "answer": {…}}` …,
and `{"end": true}`; or, without an answer, `{"bad": [[0, reason, hint], …]}` with every prompt that cannot be
encoded. At the end of a failure `{"problems": […], "exit_code": 2}`.

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

from fsdp_tune.answer.answering import Answering, StopFlag
from fsdp_tune.answer.model_requests import ModelsRequest
from fsdp_tune.answer.reported_errors import reporting_errors
from fsdp_tune.answer.server_reference import Reference

_LESS_DEVICE_MEMORY = "`--dtype bf16`, a smaller `--max-new-tokens`, or `--device cpu`"
_LESS_HOST_MEMORY = "a smaller `--max-new-tokens`, or with `chat` and `generate` `--dtype bf16`"


def main() -> None:
    output = sys.stdout
    stop = StopFlag()
    signal.signal(signal.SIGINT, lambda _number, _frame: setattr(stop, "is_set", True))

    def emit(line: dict[str, object]) -> None:
        output.write(json.dumps(line) + "\n")
        output.flush()

    # libraries print; stdout must hold JSON alone
    with (
        contextlib.redirect_stdout(sys.stderr),
        reporting_errors(emit, device_hint=_LESS_DEVICE_MEMORY, host_hint=_LESS_HOST_MEMORY),
    ):
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


def _lines() -> Iterator[str]:
    while line := sys.stdin.readline():
        yield line


if __name__ == "__main__":
    main()
