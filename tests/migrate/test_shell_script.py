"""Commands in shell scripts: a variable has a value where one plain assignment is on every path to the
command."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.migrate.read.shell_script import ShellScript, Unexpanded
from tests.migrate.imports import from_text, row, values


def words_of(text: str) -> tuple[list[str], list[str]]:
    """Return the words of the command `run`, and what is known of those that have no value."""
    script = ShellScript(text)
    (statement,) = [each for each in script.statements if any(word.text == "run" for word in each.words)]
    found = script.words(statement)
    return found, [word.why for word in found if isinstance(word, Unexpanded)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("X=1\nrun --a $X ${X}b '$X' \"$X $X\"", ["run", "--a", "1", "1b", "$X", "1 1"]),
        ("X='a b'\nrun $X \"$X\"", ["run", "a", "b", "a b"]),
        ('X=(--a 1 # no\n --b 2)\nrun "${X[@]}"', ["run", "--a", "1", "--b", "2"]),
        ("N=4\nrun $((32 / N)) $((32/$N)) $(expr 32 / $N \\* 2)", ["run", "8", "8", "16"]),
        ("X=5\nrun ${X:-1} ${X-1}", ["run", "5", "5"]),
        ("N=-7\nrun $((N / 2)) $((3 - 7 / -2))", ["run", "-3", "6"]),
        ("if true; then\n  X=1\n  run $X\nfi", ["run", "1"]),
        ("A=1\nB=$A/x\nrun $B", ["run", "1/x"]),
        ("run a \\\n  --b 'c # d' # e\n", ["run", "a", "--b", "c # d"]),
        ("cat <<EOF > f\nX=9\nEOF\nX=1\nrun $X 2>&1 | tee log", ["run", "1"]),
        ("X=1\nf() { echo; }\nrun $X", ["run", "1"]),
        ("X=1\r\nrun $X \\\r\n  --b 2\r\n", ["run", "1", "--b", "2"]),
        ("X=1\nprintf 'X=%s' $X\nrun $X", ["run", "1"]),
    ],
)
def test_words_with_known_variables(text: str, words: list[str]) -> None:
    assert words_of(text) == (words, [])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("run $X", "`X` is of the environment"),
        ("run ${X:-2e-4}", "`X` of the environment decides, and without it `2e-4`"),
        ("X=${X:-2e-4}\nrun $X", "`X` of the environment decides, and without it `2e-4`"),
        ("run \"${X:-'a b'}\"", "without it `a b`"),
        ("X=1\nX=2\nrun $X", "bound more than once (lines 1 and 2)"),
        ("X=1\nrun $X\nX=2", "bound more than once (lines 1 and 3)"),
        ("X=1\nX+=2\nrun $X", "more than once"),
        ("X=1\nexport X=2\nrun $X", "more than once"),
        ("X=1\nread X\nrun $X", "more than once"),
        ("X=1\nprintf -v X %s 2\nrun $X", "more than once"),
        ("X=1\n((X *= 2))\nrun $X", "more than once"),
        ("X=1\n((X++))\nrun $X", "more than once"),
        ("X=1\necho $((X += 1))\nrun $X", "more than once"),
        ("X=1\nexport $(grep -v '^#' .env)\nrun $X", "not bound by a plain assignment"),
        ("for X in 1 2; do\n  run $X\ndone", "not bound by a plain assignment"),
        ("if a; then X=1; fi\nrun $X", "not bound by a plain assignment"),
        ("if a; then X=1; else run $X; fi", "not bound by a plain assignment"),
        ("case $a in\n b) X=1;;\nesac\nrun $X", "not bound by a plain assignment"),
        ("f() {\n  X=1\n}\nrun $X", "not bound by a plain assignment"),
        ('[ -z "$X" ] && X=1\nrun $X', "not bound by a plain assignment"),
        ("test -n a || X=1\nrun $X", "not bound by a plain assignment"),
        ("run $X\nX=1", "not bound by a plain assignment"),
        ("X=1\nsource settings.sh\nrun $X", "not bound by a plain assignment"),
        ("X=1 run $X", "`X` is of the environment"),
        ("X=$(nproc)\nrun $X", "only running the script gives `$(nproc)`"),
        ("X=1\nrun ${X%b}", "only running the script gives `${X%b}`"),
        (": ${X:=1}\nX=2\nrun $X", "more than once"),
    ],
)
def test_words_that_are_not_known_stay_whole(text: str, why: str) -> None:
    _, found = words_of(text)
    assert len(found) == 1
    assert why in found[0]


SWIFT = (
    "swift sft --model /m/q --train_type full --dataset a.jsonl --max_length 64 --learning_rate {} "
    "--gradient_accumulation_steps {}\n"
)


@pytest.mark.parametrize(
    ("before", "rate", "after"),
    [
        ("LR=1e-5\n", "$LR", "LR=5e-3\nswift export --x $LR\n"),
        ("", "${LR:-2e-4}", ""),
        ("", '"$1"', ""),
        ("", "$(cat lr)", ""),
    ],
)
def test_option_that_is_not_known_leaves_its_key_open(
    tmp_path: Path, before: str, rate: str, after: str
) -> None:
    found = from_text(tmp_path, before + SWIFT.format(rate, 1) + after, "run.sh")
    (asked,) = [each for each in found.rows if each.key == "learning_rate"]
    assert (asked.fate.value, asked.targets) == ("question", (("training", "learning_rate"),))
    assert "learning_rate:" not in [
        line.split()[0] for line in found.text.splitlines() if line.split() and "DECIDE" not in line
    ]
    assert "2e-4" in asked.reason or ":-" not in rate


def test_batch_of_an_unknown_accumulation_is_a_decision(tmp_path: Path) -> None:
    found = from_text(tmp_path, SWIFT.format("1e-5", "${STEPS:-4}"), "run.sh", num_gpus=2)
    assert found.recipe.training.global_batch_size is None
    assert "`training.gradient_accumulation_steps`" in dict(found.decisions)["training.global_batch_size"]


def test_exported_variables_are_kept_for_the_ranks(tmp_path: Path) -> None:
    text = (
        "export NCCL_DEBUG=INFO OMP_NUM_THREADS=8\nPLAIN=1\nexport MADE=${X:-1}\nP=01 "
        "TOKENIZERS_PARALLELISM=false " + SWIFT.format("1e-5", 1)
    )
    found = from_text(tmp_path, text, "run.sh")
    assert values(found)["launch.env.NCCL_DEBUG"] == "INFO"
    assert (found.recipe.launch.env, found.recipe.launch.num_cpu_threads_per_process) == (
        {"NCCL_DEBUG": "INFO", "P": "01"},
        8,
    )
    assert row(found, "environment.MADE")[0] == "question"


def test_words_that_may_be_options_are_decisions(tmp_path: Path) -> None:
    found = from_text(
        tmp_path, 'ARGS="--seed 7"\n' + SWIFT.format("1e-5", 1).replace("\n", ' $ARGS $MORE "$@"\n'), "run.sh"
    )
    assert found.recipe.training.seed == 7
    assert [words.partition(" of the command")[0] for key, words in found.decisions if not key] == [
        "`$MORE`",
        "`$@`",
    ]


def test_placeholder_of_a_configuration_is_a_question(tmp_path: Path) -> None:
    text = "model_name_or_path: ${MODEL:-gpt2}\ndataset_name: ${oc.env:ROWS}\nlearning_rate: ${LR}\n"
    found = from_text(tmp_path, text, tool="TRL")
    assert {row(found, key)[0] for key in ("model_name_or_path", "dataset_name", "learning_rate")} == {
        "question"
    }
    assert (found.recipe.model.name_or_path, found.recipe.data.train[0].path) == ("MODEL", "NAME")


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("cat > f.yaml <<'EOF'\na: $X\nEOF\nrun f.yaml", "a: $X\n"),
        (
            'X=1\ncat <<EOF > ./f.yaml\na: "$X" # ${X} \\$X\nb: ${Y:-2}\nc: $(nproc)\nEOF\nrun f.yaml',
            'a: "1" # 1 $X\nb: ${Y:-2}\nc: ${(nproc)}\n',
        ),
        ("F=f.yaml\ntee $F <<EOF\na: 1\nEOF\nrun $F", "a: 1\n"),
        ("cat <<EOF | tee f.yaml\na: 1\nEOF\ncat f.yaml\nrun f.yaml", "a: 1\n"),
        ("cat <<EOF >> f.yaml\na: 1\nEOF\nrun f.yaml", None),
        ("cat <<EOF > f.yaml\na: 1\nEOF\necho 'b: 2' >> f.yaml\nrun f.yaml", None),
        ("cat <<EOF > f.yaml\na: 1\nEOF\nsed -i s/1/2/ f.yaml\nrun f.yaml", None),
        ("cat <<EOF > f.yaml\na: 1\nEOF\ncat <<EOF > f.yaml\na: 2\nEOF\nrun f.yaml", None),
        ("if x; then\ncat <<EOF > f.yaml\na: 1\nEOF\nfi\nrun f.yaml", None),
        ("envsubst <<EOF > f.yaml\na: 1\nEOF\nrun f.yaml", None),
        ("run f.yaml\ncat <<EOF > f.yaml\na: 1\nEOF\n", None),
    ],
)
def test_file_that_the_script_writes_has_a_text_if_one_document_on_every_path_is_all_of_it(
    text: str, written: str | None
) -> None:
    script = ShellScript(text)
    (statement,) = [each for each in script.statements if each.words[0].text == "run"]
    assert script.written_file("f.yaml", statement) == written


def test_configuration_that_a_script_writes_is_read_from_the_script(tmp_path: Path) -> None:
    """A value of the document that only running the script gives is a question, and the file of this name on
    the disk is another one."""
    (tmp_path / "c.yaml").write_text("base_model: other\nlearning_rate: 9e-9\n")
    text = """
LR=2e-4
cat > c.yaml <<EOF
base_model: m
datasets: [{path: d, type: completion}]
learning_rate: $LR
micro_batch_size: ${MICRO:-2}
EOF
axolotl preprocess c.yaml
axolotl train c.yaml
"""
    found = from_text(tmp_path, text, "run.sh")
    assert (values(found)["model.name_or_path"], values(found)["training.learning_rate"]) == ("m", 2e-4)
    assert row(found, "config") == ("dropped", "its keys are read")
    assert row(found, "micro_batch_size")[0] == "question"
