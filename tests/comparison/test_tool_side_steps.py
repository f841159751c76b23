"""What a tool's side observes of a Trainer: rates, logits and the first update are those of a plain loop."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fsdp_tune.comparison import tool_side
from fsdp_tune.comparison.both_sides import AUTOCAST, DRAWN, summary
from fsdp_tune.comparison.tool_trainers import BatchOptions, Facts, ToolRequest

RATE, SIZE, ACCUMULATION = 0.1, 2, 2
ROWS = [[(7 * row + 3 * at) % 15 + 1 for at in range(4 + row)] for row in range(6)]
"""Tokens, of which the first two of each row are not trained."""
STEPS = ["tokens", "labels", "rows", "batch", "items", "order", "model", "dtypes", "weights", "rate"]
STEPS += ["logits", "row_losses", "loss", "gradients", "clipping", "update"]


def collated(rows: Sequence[Facts]) -> Facts:
    most = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, empty: int) -> torch.Tensor:
        return torch.tensor([[*row[name], *[empty] * (most - len(row[name]))] for row in rows])

    mask = torch.tensor([[at < len(row["input_ids"]) for at in range(most)] for row in rows])
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": mask}


def small_model(dropout: float = 0.0) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes, attention_dropout=dropout)).float()


class PlainTrainers:
    """A tool whose trainer is that of transformers, with the options of its configuration as arguments."""

    def __init__(
        self, request: ToolRequest, raw: list[Facts], _sources: object, folder: str, *_: object
    ) -> None:
        self.request, self.folder, self.ignored = request, folder, list[str]()
        self.raw = [{"input_ids": row["ids"], "labels": [-100, -100, *row["ids"][2:]]} for row in raw]

    def complete(self) -> Trainer:
        return self.small(1, 1)

    def batch(self) -> BatchOptions:
        return BatchOptions(SIZE, ACCUMULATION, "bf16")

    def small(self, size: int, accumulation: int) -> Trainer:
        values = dict(self.request.values)
        model = small_model(values.pop("attention_dropout", 0.0))
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "remove_unused_columns": False}
        defaults = {"optim": "sgd", "learning_rate": RATE, "max_grad_norm": 0.25, "max_steps": 10}
        arguments: Any = {**defaults, **quiet, **sizes, **values, "use_cpu": True, "output_dir": self.folder}
        trainer = Trainer(
            model,
            TrainingArguments(**arguments),
            collated,
            self.raw,
            eval_dataset=self.raw,  # type: ignore[arg-type]
        )
        trainer.processing_class = SimpleNamespace(decode=str)  # type: ignore[assignment]
        return trainer

    def rows(self, trainer: Any) -> list[Facts]:
        return list(trainer.train_dataset)

    def collated(self, _trainer: Any, rows: Sequence[Facts]) -> Facts:
        return collated(rows)

    def own_order(self, _trainer: Any) -> str | None:
        return "it draws its rows"


@pytest.fixture
def request_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ToolRequest]:
    monkeypatch.setitem(tool_side.TRAINERS, "plain", PlainTrainers)  # type: ignore[arg-type]
    lines = [
        {"key": f"k{number}", "name": f"row {number}", "values": {"ids": ids}}
        for number, ids in enumerate(ROWS)
    ]
    (tmp_path / "rows").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def made(until: Sequence[str] = STEPS, **changes: Any) -> ToolRequest:
        inputs = {"rows": str(tmp_path / "rows"), "model": "small", "tokenizer": "small", "revision": None}
        asked = {
            "tool": "plain",
            "values": {},
            "settings": {},
            "until": list(until),
            "trust_remote_code": False,
        }
        sizes = {"ranks": 1, "model_rows": 8, "ordered_steps": 1, "epoch_steps": None, "trained_steps": 1}
        sizes |= {"model_tokens": 64, "after_first_target": 8, "logit_columns": 4, "exact_steps": 2000}
        facts: dict[str, Any] = {**inputs, **asked, **sizes, **changes}
        return ToolRequest(**facts)

    return made


def answered(request: ToolRequest) -> Any:
    return json.loads(json.dumps(tool_side._answer(request)))


def plain_step() -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of the first four rows."""
    model = small_model()
    rows = [{"input_ids": ids, "labels": [-100, -100, *ids[2:]]} for ids in ROWS[: SIZE * ACCUMULATION]]
    batch = collated(rows)
    labels = batch.pop("labels")
    logits = model(**batch, use_cache=False).logits
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("norm", [0.25, 0.0, 1e6], ids=["clipped", "no clipping", "below the limit"])
def test_first_step_is_that_of_a_plain_loop(request_of: Callable[..., ToolRequest], norm: float) -> None:
    """At the peak rate, and without the dropout of the configuration."""
    options = {"max_grad_norm": norm, "attention_dropout": 0.5, "warmup_steps": 3}
    found = answered(request_of(values=options))
    assert found["failed"] is None
    values = {name: facts["values"] for name, facts in found["stages"].items()}
    loss, gradients = plain_step()
    total = math.sqrt(sum(float(each.double().norm()) ** 2 for each in gradients.values()))
    factor = min(1.0, norm / total) if norm else 1.0
    assert (norm != 0.25) == (factor == 1.0)
    assert values["loss"] == {"step 1": pytest.approx(loss, rel=1e-5)}
    assert values["gradients"].pop("all parameters") == pytest.approx(total, rel=1e-5)
    assert values["clipping"] == {
        "max_grad_norm": norm,
        "factor of step 1": pytest.approx(factor, rel=1e-4),
    }
    assert values["gradients"].keys() == values["update"].keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert values["gradients"][name] == pytest.approx(summary(gradient), rel=1e-3, abs=1e-6), name
        update = summary(-RATE * factor * gradient)
        assert values["update"][name] == pytest.approx(update, rel=1e-3, abs=1e-6), name


def test_model_is_named_and_what_is_drawn_is_left_out(request_of: Callable[..., ToolRequest]) -> None:
    found = answered(request_of(STEPS[:9], values={"attention_dropout": 0.5}))
    values = {name: facts["values"] for name, facts in found["stages"].items()}
    assert values["model"]["dropout of model.layers.0.self_attn"] == 0.5
    assert values["model"]["lm_head.weight"] == [16, 8]
    assert values["dtypes"]["lm_head.weight"] == "float32, trained"
    assert values["dtypes"][AUTOCAST] == "bf16"
    assert values["weights"]["lm_head.weight"] == summary(small_model().lm_head.weight.detach())
    assert DRAWN in found["left_out"]
    assert DRAWN not in answered(request_of(STEPS[:9]))["left_out"]


def test_logits_and_losses_are_those_of_each_row_alone(request_of: Callable[..., ToolRequest]) -> None:
    found = answered(request_of(STEPS[:12], model_rows=3))
    logits, losses = (found["stages"][name]["values"] for name in ("logits", "row_losses"))
    assert list(logits) == list(losses) == ["row-id 0", "row-id 1", "row-id 2"]
    model = small_model().eval()
    for number, ids in enumerate(ROWS[:3]):
        with torch.no_grad():
            wanted = model(torch.tensor([ids]), use_cache=False).logits[0]
        loss = cross_entropy(wanted[1:-1], torch.tensor(ids[2:]), reduction="sum")
        assert losses[f"row-id {number}"] == pytest.approx(float(loss), rel=1e-5)
        row = torch.tensor(logits[f"row-id {number}"])
        assert torch.allclose(row[:, 0], wanted.logsumexp(-1), atol=1e-5)
        assert torch.allclose(row[:, 1:], wanted[:, [0, 5, 10, 15]], atol=1e-5)


def rates(request: ToolRequest) -> tuple[dict[str, float], str | None]:
    facts = answered(request)["stages"]["rate"]
    return facts["values"], facts["assumed"]


UNTIL_RATE = [*STEPS[:6], "rate"]


def test_rates_are_those_of_all_steps_of_the_run(request_of: Callable[..., ToolRequest]) -> None:
    options = {"lr_scheduler_type": "linear", "warmup_steps": 2}
    found, assumed = rates(request_of(UNTIL_RATE, values=options))
    wanted = [RATE * (min(step / 2, 1.0) if step < 2 else (10 - step) / 8) for step in range(10)]
    assert found == {f"step {step + 1}": pytest.approx(rate) for step, rate in enumerate(wanted)}
    assert assumed is None
    of_epochs = {**options, "max_steps": -1, "num_train_epochs": 3}
    found, assumed = rates(request_of(UNTIL_RATE, values=of_epochs))
    assert (len(found), assumed) == (6, None), "two steps of four rows in an epoch of six"
    found, assumed = rates(request_of(UNTIL_RATE, values=of_epochs, epoch_steps=5))
    assert (len(found), assumed) == (15, "the learning rate is that of epochs of 5 steps")


def test_long_run_shows_some_of_its_rates(request_of: Callable[..., ToolRequest]) -> None:
    found, _ = rates(request_of(UNTIL_RATE, values={"max_steps": 1500}, exact_steps=3))
    assert found.pop("steps of the run") == 1500
    assert list(found) == [f"step {step + 1}" for step in range(1001)]


def test_schedule_that_depends_on_losses_is_not_shown_and_is_no_failure(
    request_of: Callable[..., ToolRequest],
) -> None:
    options = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}
    found = answered(request_of([*UNTIL_RATE, "logits"], values=options))
    assert "depends on losses" in found["stages"]["rate"]["reason"]
    assert (found["failed"], found["stages"]["logits"]["reason"]) == (None, None)


def side_of(request: ToolRequest, data: list[Facts]) -> Any:
    side = tool_side._ToolSide(request)
    side.data = data
    return side


def test_row_is_cut_after_its_first_trained_token(request_of: Callable[..., ToolRequest]) -> None:
    row = {"input_ids": [1] * 10, "labels": [-100] * 5 + [1] * 5, "seq_lengths": [3, 4, 3]}
    untrained = {"input_ids": [1] * 10, "labels": [-100] * 10}
    first, second = side_of(request_of(model_tokens=4, after_first_target=1), [row, untrained])._cut()
    assert first == {"input_ids": [1] * 6, "labels": [-100] * 5 + [1], "seq_lengths": [3, 3]}
    assert second == {"input_ids": [1] * 4, "labels": [-100] * 4}
    [shorter] = side_of(request_of(model_tokens=3, after_first_target=-5), [row])._cut()
    assert shorter["seq_lengths"] == [3]


@pytest.mark.parametrize(
    ("counted", "micro_batches", "ranks", "items"),
    [
        (11, 2, 1, 11),
        (None, 1, 1, 3),
        (None, 2, 1, "a mean of each micro-batch"),
        (None, 1, 2, "a mean of each micro-batch"),
    ],
)
def test_loss_is_divided_by_what_the_trainer_counts(
    request_of: Callable[..., ToolRequest], counted: int | None, micro_batches: int, ranks: int, items: object
) -> None:
    """One that counts nothing takes a mean, which is that of the targets if there is one micro-batch."""
    side = side_of(request_of(ranks=ranks), [])
    given: list[Any] = []

    def get_batch_samples(batches: Any, count: int, device: Any) -> tuple[object, int | None]:
        given.extend([len(list(batches)), count, device])
        return None, counted

    side.trainer = SimpleNamespace(get_batch_samples=get_batch_samples)
    batch = collated([{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}])
    assert side._items([batch] * micro_batches) == items
    assert given == [micro_batches, micro_batches, torch.device("cpu")]


def test_row_that_the_tool_drops_is_named(
    request_of: Callable[..., ToolRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainTrainers, "rows", lambda _self, trainer: list(trainer.train_dataset)[1:])
    found = answered(request_of())
    assert found["failed"] == "plain: ValueError: 6 rows became 5 examples"
    assert {facts["reason"] for facts in found["stages"].values()} == {found["failed"]}


def test_answers_are_the_only_lines_on_the_standard_output(
    request_of: Callable[..., ToolRequest],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def answer(request: ToolRequest) -> Facts:
        print("the tool prints")
        return {"asked": request.until}

    threads = torch.get_num_threads()
    monkeypatch.setattr(tool_side, "_answer", answer)
    monkeypatch.setattr(tool_side.os, "environ", dict(tool_side.os.environ))
    lines = [json.dumps(vars(request_of(until))) for until in (["tokens"], ["labels"])]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    tool_side.main()
    torch.set_num_threads(threads)
    printed = capsys.readouterr()
    assert [json.loads(line) for line in printed.out.splitlines()] == [
        {"asked": ["tokens"]},
        {"asked": ["labels"]},
    ]
    assert printed.err == "the tool prints\n" * 2
