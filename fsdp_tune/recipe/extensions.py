"""The user extensions that a recipe names: entry points of installed distributions, found without importing
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, NamedTuple, Self

from fsdp_tune.core.errors import NOWHERE, FsdpTuneError, Problem, Where, usage_error
from fsdp_tune.recipe.schema.recipe import Recipe

Kind = Literal["callbacks", "loaders", "metrics"]


@dataclass(frozen=True, slots=True)
class Extension:
    """An entry point of the group `fsdp_tune.KIND`."""

    kind: str
    name: str
    target: str
    """`package.module:attribute`."""
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"`{self.name}` of {self.distribution} {self.version}"

    def as_dict(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, str]) -> Self:
        return cls(**raw)

    def load(self, where: Where = NOWHERE) -> Any:
        """Import the object. Call it only where the user has allowed extensions. Raises: usage error."""
        try:
            return EntryPoint(self.name, self.target, f"fsdp_tune.{self.kind}").load()
        except FsdpTuneError:  # a stop signal
            raise
        except Exception as error:
            message = f"{self} (`{self.target}`) cannot be imported: {type(error).__name__}: {error}"
            raise usage_error("extension-failed", message, where=where) from error


def find_extension(kind: Kind, name: str, where: Where = NOWHERE) -> Extension:
    """Return the installed extension of this name. Raises: usage error that lists the installed names."""
    installed = entry_points(group=f"fsdp_tune.{kind}")
    found = [each for each in installed if each.name == name]
    if not found:
        names = ", ".join(sorted({each.name for each in installed})) or "none"
        message = f"no installed distribution has the entry point `{name}` in the group `fsdp_tune.{kind}`"
        raise usage_error("unknown-extension", message, where=where, hint=f"installed: {names}")
    extensions = {_described(kind, each) for each in found}
    if len(extensions) > 1:
        message = f"several distributions have the entry point `{name}` in the group `fsdp_tune.{kind}`"
        hint = f"uninstall all but one of {', '.join(sorted(each.distribution for each in extensions))}"
        raise usage_error("ambiguous-extension", message, where=where, hint=hint)
    return extensions.pop()


def _described(kind: Kind, point: EntryPoint) -> Extension:
    assert point.dist is not None, "entry points that are found belong to a distribution"
    return Extension(kind, point.name, point.value, point.dist.name, point.dist.version)


class NamedExtension(NamedTuple):
    key: str
    """Of the recipe."""
    kind: Kind
    name: str


def named_extensions(recipe: Recipe) -> list[NamedExtension]:
    """Return each extension that the recipe names."""
    lists: tuple[tuple[Kind, list[str]], ...] = (
        ("callbacks", recipe.extensions.callbacks),
        ("metrics", recipe.extensions.metrics),
    )
    named = [
        NamedExtension(f"extensions.{kind}[{i}]", kind, name)
        for kind, names in lists
        for i, name in enumerate(names)
    ]
    sources = [
        (f"{key}.loader", entry.loader) for key, entry in recipe.data.sources if entry.loader is not None
    ]
    return [*named, *(NamedExtension(key, "loaders", name) for key, name in sources)]


def find_extensions(recipe: Recipe) -> list[Extension]:
    """Return the installed extensions that a recipe names, without importing them. Raises: FsdpTuneError with
    every unknown name."""
    found: list[Extension] = []
    problems: list[Problem] = []
    for key, kind, name in named_extensions(recipe):
        try:
            found.append(find_extension(kind, name, Where(key=key)))
        except FsdpTuneError as error:
            problems.extend(error.problems)
    if problems:
        raise FsdpTuneError(*problems)
    return found
