"""The recipe of a rehearsal, and its differences from the user's."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_tune.core.atomic import write_file


@dataclass(slots=True)
class ScaledRecipe:
    """The document of a rehearsal's recipe, and its differences from the user's."""

    document: dict[str, Any]
    changes: list[str] = field(default_factory=list[str])

    def write(self, folder: Path, name: str = "rehearsal.yaml") -> Path:
        """Write the document as a recipe that `fsdp-tune train` accepts."""
        import yaml

        path = folder / name
        write_file(path, yaml.safe_dump(self.document, sort_keys=False, allow_unicode=True))
        return path
