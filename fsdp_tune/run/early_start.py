"""What a command and ranks that start before their run directory exists exchange, in a private temporary
directory.

`train` starts the ranks while it still checks its inputs, so that they import the libraries meanwhile. They
wait for `opened`, which the command writes when the run directory is complete. Nothing of a run that is
refused is on the disk afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class EarlyStart:
    path: Path

    @property
    def accelerate_yaml(self) -> Path:
        """What RUN/accelerate.yaml will contain."""
        return self.path / "accelerate.yaml"

    @property
    def launcher_log(self) -> Path:
        """The launcher's output. RUN/logs/launcher.log gets a copy."""
        return self.path / "launcher.log"

    @property
    def recipe_json(self) -> Path:
        """The resolved recipe without what a plan decides. The first rank inspects its model."""
        return self.path / "recipe.json"

    @property
    def inspection_json(self) -> Path:
        """The document of `model.loading.inspect`; empty if it could not be made."""
        return self.path / "inspection.json"

    @property
    def opened(self) -> Path:
        """Exists once the run directory is complete."""
        return self.path / "opened"
