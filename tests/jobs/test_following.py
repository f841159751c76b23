"""The output of a job that is followed."""

from __future__ import annotations

from pathlib import Path

from fsdp_tune.jobs.following import _Log
from fsdp_tune.jobs.observer import Observer


class Heard(Observer):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)


def test_last_line_is_shown_without_its_end(tmp_path: Path) -> None:
    """Of a process that was killed while it wrote."""
    heard, path = Heard(), tmp_path / "job.out"
    log = _Log(path, heard)
    log.show()
    path.write_text("first\nsec")
    log.show()
    assert heard.lines == ["first"]
    with path.open("a") as file:
        file.write("ond\nthird")
    log.show()
    log.close()
    assert heard.lines == ["first", "second", "third"]
