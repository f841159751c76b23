"""`chat` and `generate`: what is typed, what is printed, and what is refused. Most tests have a stand-in for
the process of the model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fsdp_tune.answer.find_model import find_model
from fsdp_tune.cli.chat import AnswerView, WrappedText, chat, generate
from fsdp_tune.cli.screen import Screen
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.jobs import generate as job
from fsdp_tune.jobs.generate import AnswerPiece
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.cli.conftest import Cli, document

app = typer.Typer()
app.command()(chat)
app.command()(generate)

STAND_IN = """
import json, signal, sys, time
stopped = []
signal.signal(signal.SIGINT, lambda *_: stopped.append(1))
def emit(line):
    print(json.dumps(line), flush=True)
request = json.loads(sys.stdin.readline())
emit({"phase": "loading"})
is_chat = "text" not in request["models"][0]["weights"]
emit({"format": {"is_chat": is_chat, "text": "a chat", "ends": ["<|end|>"]}, "notices": []})
count = len(request["models"]) + request["adapter_off"]
while line := sys.stdin.readline():
    prompts = json.loads(line)
    shown = [[json.dumps([each["system"], each["row"]], ensure_ascii=False) for each in of_models] for of_models in prompts]
    bad = [[number, "it is bad", None] for number, each in enumerate(shown) if "bad" in each[0]]
    if bad:
        emit({"bad": bad})
        continue
    if any("die" in each[0] for each in shown):
        sys.exit("the model broke")
    for number, of_models in enumerate(shown):
        for model, text in enumerate(of_models):
            place = {"prompt": number, "model": model}
            pieces, given = ["", f"{model}:", text], ""
            if "slow" in text:
                pieces += [" x"] * 600
            for piece in pieces:
                if stopped:
                    break
                emit({**place, "piece": piece})
                given += piece
                if len(pieces) > 3:
                    time.sleep(0.05)
            reason = "interrupted" if stopped else "length" if "long" in text else "stop"
            facts = {"prompt_tokens": 3, "tokens": 2, "finish_reason": reason, "seconds": 0.1}
            emit({**place, "answer": {"prompt": text, "output": given, **facts}})
    stopped.clear()
    emit({"end": True})
"""  # noqa: E501


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory with the models `chat-model` and `text-model` and an adapter of the first, answered by the
    stand-in."""
    monkeypatch.chdir(tmp_path)
    for name in ("chat-model", "text-model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "chat-model", "peft_type": "LORA"})
    )
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(job, "ANSWER", (sys.executable, str(tmp_path / "stand_in.py")))
    return tmp_path


def invoke(*arguments: object, typed: str = "", code: int = 0) -> Any:
    done = CliRunner().invoke(app, [*map(str, arguments)], input=typed)
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return json.loads(done.stdout) if "--json" in arguments else done


def messages_of(answer: dict[str, Any]) -> tuple[str | None, list[str]]:
    """The system message and the contents that were sent for an answer."""
    system, row = json.loads(answer["prompt"])
    return system, [message["content"] for message in row["messages"]]


def test_conversation_grows_until_it_is_reset(here: Path) -> None:
    typed = (
        "one\ntwo\n/reset\nthree\n/system Be brief.\nfour\n/system\nfive\\\nsix\n//seven\n\n/exit\nunread\n"
    )
    found = invoke("chat", "chat-model", "--system", "S", "--json", typed=typed)
    first = found["answers"][0]["output"]
    assert [messages_of(answer) for answer in found["answers"]] == [
        ("S", ["one"]),
        ("S", ["one", first, "two"]),
        ("S", ["three"]),
        ("Be brief.", ["four"]),
        (None, ["five\nsix"]),
        (None, ["five\nsix", found["answers"][4]["output"], "/seven"]),
    ]
    assert (found["model"], found["base"], found["ends"]) == ("chat-model", None, ["<|end|>"])


def test_lines_of_a_pipe_are_printed_with_their_answers(here: Path) -> None:
    done = invoke("chat", "chat-model", typed="long\n/help\n/bogus\n")
    lines = done.stdout.splitlines()
    assert lines[1:6] == [
        "a chat; answers end at <|end|>",
        "/help lists the commands, Ctrl-D leaves",
        "> long",
        '0:[null, {"messages": [{"role": "user", "content": "long"}]}]',
        "(cut at 2 tokens: `--max-new-tokens`)",
    ]
    assert "there is no command /bogus; /help lists them" in lines


def test_model_and_base_continue_their_own_answers(here: Path) -> None:
    found = invoke("chat", "adapter", "--base", "--json", typed="one\ntwo\n")
    assert found["base"] == "chat-model (without the adapter)"
    assert [answer["model"] for answer in found["answers"]] == ["adapter", found["base"]] * 2
    of_model, of_base = (messages_of(answer)[1] for answer in found["answers"][2:])
    assert (of_model[1][:2], of_base[1][:2]) == ("0:", "1:")
    shown = invoke("chat", "adapter", "--base", typed="one\n").stdout.splitlines()
    assert [line for line in shown if line.startswith("[")] == [
        "[adapter]",
        "[chat-model (without the adapter)]",
    ]


def test_model_without_a_chat_has_no_system_message(here: Path) -> None:
    found = invoke("chat", "text-model", "--json", typed="/system S\none\ntwo\n")
    assert [json.loads(answer["prompt"]) for answer in found["answers"]] == [
        [None, {"prompt": "one"}],
        [None, {"prompt": "two"}],
    ]
    done = invoke("chat", "text-model", "--system", "S", code=2)
    assert "`--system` needs a chat" in done.stderr


def test_prompt_that_is_refused_does_not_end_the_chat(here: Path) -> None:
    done = invoke("chat", "chat-model", typed="bad\ngood\n")
    assert done.stderr.splitlines() == ["error: it is bad"]
    assert done.stdout.splitlines()[-1].endswith('"content": "good"}]}]')
    assert "bad" not in done.stdout.splitlines()[-1]


def test_model_that_breaks_ends_the_chat_with_its_reason(here: Path) -> None:
    for arguments, typed in (
        (("chat", "chat-model"), "die\n"),
        (("generate", "chat-model", "--prompts", "prompts.txt"), ""),
    ):
        (here / "prompts.txt").write_text("die\n")
        done = invoke(*arguments, typed=typed, code=1)
        assert "error: the model could not be run: the model broke" in done.stderr


def test_interrupt_stops_the_answer_and_a_second_one_leaves(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    presses = iter([3, 99, 3])  # pieces until Ctrl-C: of two answers, and of one that is interrupted twice

    class Pressed(AnswerView):
        def __init__(self, screen: Screen) -> None:
            super().__init__(screen)
            self._left = next(presses)

        def add(self, piece: AnswerPiece) -> None:
            super().add(piece)
            self._left -= 1
            for _ in range(times if self._left == 0 else 0):
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("fsdp_tune.cli.chat.AnswerView", Pressed)
    times = 1
    done = invoke("chat", "chat-model", typed="slow\n/reset\nfast\n")
    assert "(stopped)" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("0:"), "the chat goes on"
    times = 2
    done = invoke("chat", "chat-model", typed="slow\n/reset\nfast\n")
    assert "fast" not in done.stdout


PROMPTS = """{"prompt": "é 👍", "completion": "unread"}

{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}], "tools": []}
{"text": "Once"}
"""


def test_prompts_of_a_file_are_answered_in_order(here: Path) -> None:
    (here / "prompts.jsonl").write_text(PROMPTS)
    done = invoke("generate", "chat-model", "--prompts", "prompts.jsonl", "--output", "answers.jsonl")
    assert "3 answers are in answers.jsonl" in done.stdout
    lines = [json.loads(line) for line in (here / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["row"] for line in lines] == ["prompts.jsonl:1", "prompts.jsonl:3", "prompts.jsonl:4"]
    assert json.loads(lines[0]["prompt"]) == [None, {"prompt": "é 👍"}]
    assert set(lines[0]) == {
        "model",
        "row",
        "prompt",
        "output",
        "prompt_tokens",
        "tokens",
        "finish_reason",
        "seconds",
    }
    found = invoke("generate", "adapter", "--base", "--prompts", "prompts.jsonl", "--json")
    assert [answer["output"][:2] for answer in found["answers"]] == ["0:", "1:"] * 3
    (here / "prompts.txt").write_text("one\n\ntwo\n")
    shown = invoke("generate", "chat-model", "--prompts", "prompts.txt").stdout.splitlines()
    assert [line for line in shown if line.startswith("prompts")] == [
        "prompts.txt:1> one",
        "prompts.txt:3> two",
    ]


def test_every_bad_row_is_named_and_nothing_is_written(here: Path) -> None:
    (here / "prompts.jsonl").write_text('{"prompt": "one"}\n{"question": "two"}\n{"prompt"\n{"text": 5}\n')
    errors = invoke(
        "generate", "chat-model", "--prompts", "prompts.jsonl", "--output", "out", "--json", code=2
    )["errors"]
    assert [(error["code"], error["file"], error["line"]) for error in errors] == [
        ("prompt-unusable", "prompts.jsonl", line) for line in (2, 3, 4)
    ]
    (here / "prompts.txt").write_text("one\nbad\n")
    errors = invoke(
        "generate", "chat-model", "--prompts", "prompts.txt", "--output", "out", "--json", code=2
    )["errors"]
    assert [(error["message"], error["line"]) for error in errors] == [("it is bad", 2)]
    assert not (here / "out").exists()


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("wrong-value", ("--temperature", "-1")),
        ("wrong-value", ("--temperature", "nan")),
        ("wrong-value", ("--top-p", "0.5")),
        ("wrong-value", ("--temperature", "1", "--top-p", "2")),
        ("usage", ("--checkpoint", "5")),
        ("no-base", ("--base",)),
        ("no-device", ("--device", "cuda")),
    ],
)
def test_options_that_mean_nothing_are_refused(code: str, arguments: tuple[str, ...], here: Path) -> None:
    (error,) = invoke("chat", "chat-model", *arguments, "--json", code=2)["errors"]
    assert (error["code"], bool(error["hint"])) == (code, True)


def run_at(folder: Path, recipe: dict[str, Any]) -> None:
    (folder / "model").mkdir(parents=True)
    resolved = Recipe.model_validate({"launch": {"num_processes": 1}, **recipe})
    (folder / "recipe.json").write_text(resolved.model_dump_json(by_alias=True))


def test_run_without_a_model_names_the_command_that_makes_one(here: Path) -> None:
    run_at(here / "run", {"model": {"name_or_path": "chat-model"}})
    (error,) = invoke("chat", "run", "--json", code=2)["errors"]
    assert error["message"] == "`run` has neither a merged model nor a complete checkpoint"
    (error,) = invoke("chat", "run", "--checkpoint", "5", "--json", code=2)["errors"]
    assert (
        error["hint"]
        == "fsdp-tune merge-checkpoint run --step 5 --output run/merged-5; fsdp-tune chat run/merged-5"
    )
    (here / "run" / "merged").mkdir()
    (here / "run" / "merged" / "config.json").write_text("{}")
    found = invoke("chat", "run", "--base", "--json", typed="one\n")
    assert (found["model"], found["base"]) == ("run", "chat-model")


def test_hint_about_a_checkpoint_names_the_command_that_has_its_options(here: Path) -> None:
    run_at(here / "run", {"model": {"name_or_path": "chat-model"}, "lora": {}})
    (here / "run" / "checkpoint-3").mkdir()
    for words in (["chat", "run"], ["generate", "run", "--prompts", "rows.jsonl"]):
        (here / "rows.jsonl").write_text('{"prompt": "one"}\n')
        (error,) = invoke(*words, "--json", code=1)["errors"]
        assert error["code"] == "merge-no-checkpoint"
        assert (
            error["hint"]
            == "`fsdp-tune merge-checkpoint run --step N --allow-incomplete` takes one that is not complete"
        )


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (10, "one two\nthree four\nfive"),
        (None, "one two three four five"),
        (5, "one\ntwo\nthree\nfour\nfive"),
    ],
)
def test_words_of_a_stream_are_not_broken(width: int | None, expected: str) -> None:
    for size in (1, 2, 7):
        wrapped, text = WrappedText(width), "one two three four five"
        shown = "".join(wrapped.add(text[at : at + size]) for at in range(0, len(text), size)) + wrapped.end()
        assert [line.rstrip() for line in shown.split("\n")] == expected.split("\n")
    wide = WrappedText(6)
    assert (wide.add("你好世界") + wide.add("abcdefghi\n  x") + wide.end()).replace(
        "\n", "|"
    ) == "你好世|界|abcdef|ghi|  x"


@pytest.mark.slow
@pytest.mark.ranks
def test_run_with_lora_answers_from_its_checkpoints_with_and_without_the_adapter(
    cli: Cli, tmp_path: Path
) -> None:
    """A user's way: a chat is trained, then an adapter on it that knows other answers."""
    for name, answers in (("base", ("two", "four")), ("tuned", ("nine", "one"))):
        rows = zip(("one plus one", "two plus two"), answers, strict=True)
        turns = [
            [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
            for asked, answer in rows
        ]
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"messages": each}) + "\n" for each in turns)
        )
    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    training = {
        "global_batch_size": 2,
        "per_device_train_batch_size": 2,
        "max_steps": 40,
        "learning_rate": 0.02,
        "save_steps": 20,
        "report_to": [],
    }
    common = {
        "training": training,
        "launch": {"device": "cpu", "num_processes": 1},
        "precision": {"mixed_precision": "no"},
    }
    model = {
        "from_config": {"model_type": "llama", "vocab_size": 384, **tiny},
        "tokenizer": "builtin:arithmetic",
    }
    base = {
        "model": model,
        "data": {"train": [{"path": "base.jsonl"}], "max_length": 64},
        "output_dir": "base",
        **common,
    }
    tuned = {
        "model": {"name_or_path": "base/merged"},
        "data": {"train": [{"path": "tuned.jsonl"}], "max_length": 64},
        "lora": {"r": 8},
    }
    tuned |= {"output_dir": "tuned", "merge": {"at_end": False}, **common}
    for name, recipe in (("base", base), ("tuned", tuned)):
        (tmp_path / f"{name}.yaml").write_text(json.dumps(recipe))
        done = cli("train", "--config", f"{name}.yaml")
        assert done.returncode == 0, done.stderr
    assert "fsdp-tune chat tuned" in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_tune", "chat", "tuned", "--base", "--json"],
        input="one plus one\n/system S\ntwo plus two\n", capture_output=True, text=True, check=False, cwd=tmp_path,  # noqa: E501
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = document(done)["answers"]
    assert [answer["output"] for answer in answers][:2] == ["nine", "two"]
    assert [answer["prompt"] for answer in answers[::2]] == [
        "<|user|>one plus one<|end|><|assistant|>", "<|system|>S<|end|><|user|>two plus " "two<|end|><|assistant|>",  # noqa: E501
    ]  # fmt: skip
    (tmp_path / "prompts.txt").write_text("one plus one\n")
    found = document(cli("generate", "tuned", "--prompts", "prompts.txt", "--base", "--json"))
    assert [answer["output"] for answer in found["answers"]] == ["nine", "two"]
    with pytest.raises(FsdpTuneError):
        find_model(str(tmp_path / "tuned"))
