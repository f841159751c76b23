"""What the process that sends a run to its mirror has done, as it writes it for others to read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.records import Document


@dataclass(frozen=True, slots=True)
class MirrorState(Document):
    """logs/mirror-NN.json: what the process that sends has done, rewritten while it works."""

    url: str
    newest_step: int | None = None
    """Of the complete checkpoints in the mirror."""
    waiting: list[str] = field(default_factory=list[str])
    """Folders that are complete on this disk and not in the mirror, the next one first."""
    left_bytes: int = 0
    """Of these folders."""
    sent_bytes: int = 0
    """Since the process started."""
    hashed_bytes: int = 0
    """Of models, before they are sent."""
    refused: dict[str, str] = field(default_factory=dict[str, str])
    """Folders that are damaged on this disk and are not sent, with the reason."""
    error: str | None = None
    """Why the last attempt failed; None after a success."""
    is_refused: bool = False
    """Whether repeating the attempt does not help: another run, another command, missing rights."""
    failed_since: float | None = None
    """Wall clock, seconds."""
    pid: int = 0


def state_path(run: RunDir, machine: int) -> Path:
    return run.logs / f"mirror-{machine:02d}.json"
