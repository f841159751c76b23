"""A process that runs models reports known errors as a line, with the exit code of the command."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest
import torch

from fsdp_tune.answer import generate, score
from fsdp_tune.answer.model_requests import AnswerSettings, ModelsRequest, Request
from fsdp_tune.answer.reported_errors import reporting_errors
from fsdp_tune.core.errors import failed_error, usage_error

CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
OF_THE_CPU = "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to"
DEVICE, HOST = "device-out-of-memory", "host-out-of-memory"


@pytest.mark.parametrize(
    ("error", "code", "exit_code", "hint"),
    [
        (usage_error("wrong-value", "no"), "wrong-value", 2, None),
        (failed_error("damaged", "no"), "damaged", 1, None),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), DEVICE, 3, "less on the device"),
        (RuntimeError(CUBLAS), DEVICE, 3, "less on the device"),
        (RuntimeError(OF_THE_CPU), HOST, 1, "less on the host"),
        (MemoryError(), HOST, 1, "less on the host"),
    ],
)
def test_known_error_is_a_line_with_its_exit_code(
    error: Exception, code: str, exit_code: int, hint: str | None
) -> None:
    lines: list[dict[str, Any]] = []
    with reporting_errors(lines.append, device_hint="less on the device", host_hint="less on the host"):
        raise error
    [line] = lines
    [problem] = line["problems"]
    assert (problem["code"], problem["hint"], line["exit_code"]) == (code, hint, exit_code)


def test_bug_is_raised_and_no_line() -> None:
    lines: list[dict[str, Any]] = []
    with (
        pytest.raises(ZeroDivisionError),
        reporting_errors(lines.append, device_hint="", host_hint=""),
    ):
        lines.append({"sum": 1 // 0})
    assert lines == []


def printed(capsys: pytest.CaptureFixture[str]) -> tuple[str, str, int]:
    line = json.loads(capsys.readouterr().out)
    [problem] = line["problems"]
    return problem["code"], problem["hint"], line["exit_code"]


def test_model_that_does_not_fit_into_the_host_is_reported_by_generate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(OF_THE_CPU)

    settings = AnswerSettings(8, 0.0, 1.0, 0, shows_special_tokens=False)
    request = ModelsRequest([], False, {}, None, settings, "cpu", "auto", trust_remote_code=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO(request.as_json() + "\n"))
    monkeypatch.setattr(generate.signal, "signal", lambda *_: None)
    monkeypatch.setattr(generate.Answering, "load", fail)
    generate.main()
    code, hint, exit_code = printed(capsys)
    assert (code, exit_code) == (HOST, 1)
    assert "--max-new-tokens" in hint
    assert "--device" not in hint


@pytest.mark.parametrize(
    ("batch_size", "is_of_run", "hint"),
    [
        (8, False, "`--batch-size 4`"),
        (1, False, "`--dtype bf16`"),
        (8, True, "`evaluation.batch_size: 4`"),
        (1, True, "`evaluation.when: at_end`"),
    ],
)
def test_hint_of_a_full_device_names_options_of_evaluate_or_keys_of_the_run(
    batch_size: int,
    is_of_run: bool,
    hint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(CUBLAS)

    request = Request([], {}, 257, 0, batch_size, "cpu", "auto", is_of_run=is_of_run)
    monkeypatch.setattr(sys, "stdin", io.StringIO(request.as_json()))
    monkeypatch.setattr(score, "run", fail)
    score.main()
    code, given, exit_code = printed(capsys)
    assert (code, exit_code) == (DEVICE, 3)
    assert given.startswith(hint)
    assert ("--" in given) is not is_of_run
