"""A user's GPU: read from a file with the recipe's reader, and refused with reasons."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.planner.gpu_file import find_or_read_hardware


def test_user_defined_gpu_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "h100_96.yaml"
    path.write_text(
        "{memory_gb: 96, usable_gib: 95.04, bandwidth_gb_s: 3350, bf16_tflops: 989.4, network_gb_s: "
        "50, devices_per_machine: 8}"
    )
    gpu = find_or_read_hardware(str(path))
    assert (gpu.name, gpu.usable_gib, gpu.network_gb_s, gpu.fp8_tflops) == ("h100_96", 95.04, 50, None)


def test_gpu_file_without_a_name_is_named_after_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("{memory_gb: 24, bandwidth_gb_s: 600, name: null}")
    assert find_or_read_hardware(str(path)).name == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{memory_gb: 24, bandwith_gb_s: 600}", "did you mean `bandwidth_gb_s`?"),
        ("{bandwidth_gb_s: 600}", "`memory_gb` is missing"),
        ("{memory_gb: -1, bandwidth_gb_s: 600}", "must be a number above zero"),
        ("{memory_gb: 24, bandwidth_gb_s: .inf}", "is not a number"),
        ("{memory_gb: 24, bandwidth_gb_s: 600, devices_per_machine: 1.5}", "whole number"),
        (
            "{memory_gb: 24, bandwidth_gb_s: 600, device_names: 5}",
            "`device_names` must be a list of texts, not 5",
        ),
        (
            "{memory_gb: 24, bandwidth_gb_s: 600, device_names: A100}",
            "`device_names` must be a list of texts, not 'A100'",
        ),
        ("{memory_gb: 24, bandwidth_gb_s: 600, 7: 1}", "unknown key `7`"),
        ("[1, 2]", "not a mapping"),
        ("a: [", "the file is not YAML"),
        ("memory_gb: 24\nbandwidth_gb_s: 600\nmemory_gb: 48", "`memory_gb` is written twice"),
    ],
)
def test_invalid_hardware_file_is_refused_with_reason(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(FsdpTuneError) as caught:
        find_or_read_hardware(str(path))
    assert any(message in problem.message for problem in caught.value.problems)
    assert {problem.code for problem in caught.value.problems} == {"wrong-gpu-file"}


@pytest.mark.parametrize(
    "text",
    [
        "source: &b {memory_gb: 80, bandwidth_gb_s: 2000}\n<<: *b\nmemory_gb: 96",
        "<<: {memory_gb: 80, bandwidth_gb_s: 2000}\nmemory_gb: 96",
        "\ufeffmemory_gb: 96\nbandwidth_gb_s: 2000",
        "memory_gb: 96\nbandwidth_gb_s: 2000\nsource: a\u00a0page",
    ],
)
def test_what_yaml_allows_outside_of_recipes_is_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    gpu = find_or_read_hardware(str(path))
    assert (gpu.memory_gb, gpu.bandwidth_gb_s) == (96, 2000)


@pytest.mark.parametrize(
    "text", ["a: !!python/name:os x", "a: 1\n---\nb: 2", "a: \x07", "a: [", "a: *b", None]
)
def test_refusal_of_a_gpu_file_does_not_mention_recipes(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(FsdpTuneError) as caught:
        find_or_read_hardware(str(path))
    assert not [each for each in caught.value.problems if "recipe" in f"{each.message} {each.hint}"]


def test_gpu_file_with_aliases_of_aliases_is_refused_and_not_expanded(tmp_path: Path) -> None:
    lines = [
        "a0: &a0 [x, x, x, x, x, x, x, x, x]",
        *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)),
    ]
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join(["memory_gb: 24", "bandwidth_gb_s: 600", *lines]))
    with pytest.raises(FsdpTuneError) as caught:
        find_or_read_hardware(str(path))
    assert caught.value.problems[0].code == "wrong-gpu-file"
    assert "the file" in caught.value.problems[0].message


def test_missing_hardware_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FsdpTuneError, match="there is no file"):
        find_or_read_hardware(str(tmp_path / "none.yaml"))
