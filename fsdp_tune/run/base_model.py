"""What a run records of its base model: which one it is, how its files name tensors, and what became of each.

base.json, in RUN/model and in RUN/adapter, is the identity of the model under an adapter, whose files do not
hold it. base_layout.json in RUN/model says how files of the base store the parameters that the model stacks
or names otherwise. tensors.json in RUN/model says what becomes of each tensor in the files of the base.

transformers 5 stacks the experts of a mixture in one parameter and renames modules; the files of a model on
the hub, transformers 4 and vLLM have one tensor for each expert and the older names (`WeightConverter` and
`WeightRenaming` of transformers' `core_model_loading`). A merged model is written as such files are.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from fsdp_tune.core.errors import Where, usage_error
from fsdp_tune.core.files import open_regular
from fsdp_tune.core.tensors.weight_files import UnusableIndexError, list_directory
from fsdp_tune.core.units import KIB
from fsdp_tune.recipe.schema.sections import Model
from fsdp_tune.run.records import Document, Environment

BASE_FILE, LAYOUT_FILE, TENSORS_FILE = "base.json", "base_layout.json", "tensors.json"
SAMPLES, SAMPLE_BYTES = 64, 64 * KIB
WEIGHT_FILES = ("*.safetensors", "*.bin")


@dataclass(frozen=True, slots=True)
class BaseModel(Document):
    IS_WRITTEN_AGAIN: ClassVar[bool] = False
    name: str
    """As the recipe names it; the full path of a local directory."""
    revision: str | None = None
    """Commit of a hub repository, or the name of a branch or tag if its commit is unknown."""
    digest: str | None = None
    """Of the weight files of a local directory: `digest_of_weights`."""
    nf4_weights: tuple[str, ...] = ()
    """Names of the weights that a run holds in 4 bits (`quantization.load`)."""
    nf4_scales: Literal["fp32", "bf16"] | None = None
    """`quantization.scales`."""
    config_changes: dict[str, object] = field(default_factory=dict[str, object])
    """Fields of the base's config.json that the run changed (`model.config_overrides`, `model.rope_scaling`),
    with their values."""

    def differs_from(self, other: BaseModel) -> bool:
        """Return whether the weights are known to differ. A local copy of a repository cannot be compared
        with it."""
        if self.digest is not None and other.digest is not None:
            return self.digest != other.digest
        return (
            self.digest is None
            and other.digest is None
            and (self.name, self.revision) != (other.name, other.revision)
        )


def describe_base(name: str, revision: str | None) -> BaseModel:
    """Return the identity of a model now. Raises: OSError."""
    folder = Path(name)
    if not folder.is_dir():
        return BaseModel(name, _commit(name, revision) or revision)
    return BaseModel(str(folder.resolve()), digest=digest_of_weights(folder))


def identify_weights(name: str | None, revision: str | None) -> str | None:
    """Return what tells the weights of a model from others: `REPOSITORY@COMMIT`, or a digest of a local
    directory's weight files.

    None if neither is known, and for a run, whose weights are in sharded checkpoints.
    """
    if name is None:
        return None
    folder = Path(name)
    try:
        if folder.is_dir():
            return digest_of_weights(folder) if weights_in(folder) else None
        commit = _commit(name, revision)
    except (OSError, ValueError):
        return None
    return None if commit is None else f"{name}@{commit}"


def weights_at_start(environment_json: Path | None, model: Model) -> str | None:
    """Return the weights that a run starts from: those that its environment.json records if it is resumed,
    else those of the model now."""
    recorded = Environment.read(environment_json) if environment_json is not None else None
    return (
        recorded.base
        if recorded is not None and recorded.base is not None
        else identify_weights(model.name_or_path, model.revision)
    )


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """The base of an adapter: what training, merging and evaluating open, with all that was recorded about
    it."""

    name: str | None
    """Directory or hub id; None if nothing names it."""
    revision: str | None
    """Commit, branch or tag on the hub; None for the default."""
    trained: BaseModel | None
    """base.json, which runs of this package write; None for adapters of other tools."""

    @property
    def config_changes(self) -> Mapping[str, object]:
        return self.trained.config_changes if self.trained is not None else {}

    def has_other_weights(self, folder: Path) -> bool:
        """Return whether the weights in a directory are known not to be those that the adapter was trained
        on. Raises: OSError."""
        return (
            self.trained is not None
            and self.trained.digest is not None
            and self.trained.differs_from(describe_base(str(folder), None))
        )

    def describe_precision(self) -> str:
        """Return the precision that the weights had in training."""
        scales = self.trained.nf4_scales if self.trained is not None else None
        return f"4 bits with scales in {scales}" if scales else "16 or 32 bits"


def open_base(config: Mapping[str, object], record: Path, *, given: str | None = None) -> AdapterBase:
    """Return the base of an adapter from its adapter_config.json and base.json.

    `given`: the model that the user names instead of the recorded one. A branch of a repository may have
    moved since training, so the recorded commit comes first. Raises: usage error for a damaged base.json.
    """
    trained = BaseModel.read(record)
    recorded, revision = config.get("base_model_name_or_path"), config.get("revision")
    name = recorded if isinstance(recorded, str) and recorded else None
    if given is not None and given != name:
        return AdapterBase(given, None, trained)
    if trained is not None and trained.name == name and trained.revision is not None:
        revision = trained.revision
    return AdapterBase(name, revision if isinstance(revision, str) and revision else None, trained)


def _commit(name: str, revision: str | None) -> str | None:
    """Return the commit of the cached files of a hub repository: a branch may have moved since. None if none
    are cached."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found).parent.name if isinstance(found, str) else None


def digest_of_weights(folder: Path) -> str:
    """Return a digest of names, sizes and 64 evenly spaced blocks of 64 KiB of each weight file.

    Training changes nearly every byte of a file, so that another model is noticed without reading hundreds of
    GB.
    """
    return digest_of_samples(weights_in(folder))


def weights_in(folder: Path) -> list[Path]:
    """Return the weight files of a local directory, also those below it that its index names."""
    found = {file for pattern in WEIGHT_FILES for file in folder.glob(pattern)}
    with contextlib.suppress(UnusableIndexError):
        listed = list_directory(folder)
        found |= {
            path for file in (listed.files if listed is not None else ()) if (path := folder / file).is_file()
        }
    return sorted(found)


def digest_of_samples(paths: Iterable[Path]) -> str:
    """Return a digest of names, sizes and 64 evenly spaced blocks of 64 KiB of each file. Raises: OSError."""
    found = hashlib.blake2b(digest_size=32)
    for path in sorted(paths):
        size_bytes = path.stat().st_size
        found.update(f"{path.name} {size_bytes}\n".encode())
        with open_regular(path) as file:
            last = max(0, size_bytes - SAMPLE_BYTES)
            for at in sorted({last * index // (SAMPLES - 1) for index in range(SAMPLES)}):
                file.seek(at)
                found.update(file.read(SAMPLE_BYTES))
    return f"blake2b:{found.hexdigest()}"


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a parameter and its position in a tensor of a file."""

    parameter: str
    start: tuple[int, ...]
    """First element, by dimension of the parameter."""
    axes: tuple[int, ...]
    """The dimension of the parameter that each dimension of the tensor is; of the others, the box has one
    index."""
    sizes: tuple[int, ...]
    """By dimension of the tensor."""
    position: tuple[int, ...]
    """First element in the tensor, by dimension."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a file and the pieces that cover it. With a `count`, as many tensors: `{}` in the name is
    the number of each, which is the index in the first dimension of each parameter."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    count: int | None = None

    def expanded(self) -> Iterator[FileTensor]:
        """Yield the tensors, each without a `count`."""
        if self.count is None:
            yield self
            return
        for index in range(self.count):
            pieces = tuple(replace(piece, start=(index, *piece.start[1:])) for piece in self.pieces)
            yield FileTensor(self.name.format(index), self.shape, pieces)


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def kind_of_name(name: str) -> str:
    """Return a parameter's name with `{}` for each number of a layer or an expert."""
    return _NUMBER.sub("{}", name)


@dataclass(frozen=True, slots=True)
class Published:
    """Modules have names that begin with `ours` in the trained model, and with `theirs` in the model that the
    base publishes."""

    ours: str
    theirs: str
    is_ambiguous: bool
    """Whether the rest of a name is the end of another module's name too, such as one of the vision tower."""

    def name_of(self, module: str) -> str:
        """Return the published name of a module or tensor."""
        return self.theirs + module.removeprefix(self.ours) if module.startswith(self.ours) else module

    def target_of(self, module: str) -> str:
        """Return a module as `target_modules` of adapter_config.json names it: by an end that both models
        have, if only it has it."""
        return self.name_of(module) if self.is_ambiguous else module.removeprefix(self.ours)


@dataclass(frozen=True, slots=True)
class BaseLayout(Document):
    renamed: dict[str, str] = field(default_factory=dict[str, str])
    """{parameter: name in the files} of those that are stored as they are."""
    tensors: tuple[FileTensor, ...] = ()
    """Of the parameters that are stored in several tensors, or several in one."""
    published: Published | None = None
    """Names of modules in the class that the base's config.json names; None if the trained class is that
    one."""
    kept_in_fp32: dict[str, tuple[str, ...]] | None = None
    """{16-bit dtype: `kind_of_name` of the parameters and buffers that the model's class keeps in fp32 at
    that dtype, or that the base stores in fp32 among others in 16 bits; a name in full if others of its kind
    are not}. None: not known."""

    def name_of(self, parameter: str) -> str:
        """Return the name of a parameter that is stored as it is."""
        return self.renamed.get(parameter, parameter)

    def with_fp32(self, kinds: Mapping[str, Iterable[str]]) -> BaseLayout:
        """Return the layout with more entries of `kept_in_fp32`."""
        before = self.kept_in_fp32 or {}
        kept = {
            dtype: tuple(sorted({*before.get(dtype, ()), *kinds.get(dtype, ())}))
            for dtype in before.keys() | kinds.keys()
        }
        return replace(self, kept_in_fp32={dtype: names for dtype, names in sorted(kept.items()) if names})

    def keeps_fp32(self, dtype: str) -> Callable[[str], bool]:
        """Return the test of whether a tensor of the files, by its name, is made of parameters that stay in
        fp32: `kept_in_fp32`."""
        kept = frozenset((self.kept_in_fp32 or {}).get(dtype, ()))
        parameters = {new: old for old, new in self.renamed.items()}
        made_of = {kind_of_name(each.name): each.pieces[0].parameter for each in self.tensors}

        def is_kept(name: str) -> bool:
            parameter = made_of.get(kind_of_name(name)) or parameters.get(name, name)
            return parameter in kept or kind_of_name(parameter) in kept

        return is_kept

    def prefixes(self) -> tuple[str, str] | None:
        """Return (prefix in the model, prefix in the files) if all renamed parameters differ by one:
        `model.`, `model.language_model.`."""
        return common_prefixes(self.renamed)


@dataclass(frozen=True, slots=True)
class Rounded:
    """A tensor of the base that a run does not train, and holds with fewer bits than the files of the
    base."""

    name: str
    """In the files of the base."""
    dtype: str
    """Of the run's copy, as `merge.dtype` names it."""


@dataclass(frozen=True, slots=True)
class BaseRecord(Document):
    counts: dict[str, int] = field(default_factory=dict[str, int])
    """Tensors of the base's files by fate: trained, frozen, decoded, carried, dropped, left out."""
    rules: dict[str, int] = field(default_factory=dict[str, int])
    """Quantised weights by the rule that decodes them."""
    carried: tuple[str, ...] = ()
    """Names of the tensors that are not part of the trained model, and that a merge writes unchanged."""
    left_out: tuple[str, ...] = ()
    """Names of those that `model.leave_out` keeps out of the merged model."""
    dropped: tuple[str, ...] = ()
    """Names of those that are of use only to the quantised base. Earlier versions have no such list."""
    rounded: dict[str, Rounded] = field(default_factory=dict[str, Rounded])
    """By their names in a merged model. A merge reads them from the base (`restored`)."""
    base: BaseModel | None = None
    """The model that carried and rounded tensors are read from; None if there are none."""

    def of_base(self, name: str, revision: str) -> BaseRecord:
        """Return the record with the identity of the base now, if a merge reads tensors from it. Raises:
        OSError."""
        is_read = bool(self.carried or self.rounded)
        return replace(self, base=describe_base(name, revision)) if is_read and self.base is None else self

    def restored(self, dtype: str, keeps_fp32: Callable[[str], bool]) -> dict[str, str]:
        """Return {name in a merged model: name in the base} of the tensors that a merge with this
        `merge.dtype` reads from the base.

        Of the others, rounding the base's values gives what the run holds. `keeps_fp32(name)`: whether the
        merge does not round a tensor.
        """
        found = self.rounded.items()
        return {
            name: each.name
            for name, each in found
            if dtype == "keep" or dtype != each.dtype or keeps_fp32(name)
        }

    def describe(self) -> str:
        """Return the counts as text; empty if every tensor is one of the trained model as it is."""
        if set(self.counts) <= {"trained", "frozen"}:
            return ""
        return ", ".join(f"{count:,} {fate}" for fate, count in sorted(self.counts.items()))


def common_prefixes(renamed: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the starts by which all names differ from the new ones, {old: new}; None if there is no such
    pair."""
    found = {_differing(name, new) for name, new in renamed.items()}
    shortest = min(found, key=lambda pair: len(pair[0]), default=None)
    if shortest is None or not all(
        ours.startswith(shortest[0]) and theirs.startswith(shortest[1]) for ours, theirs in found
    ):
        return None
    return shortest


def _differing(name: str, other: str) -> tuple[str, str]:
    """Return the starts of two names, up to the parts that they end with in common."""
    left, right = name.split("."), other.split(".")
    while left and right and left[-1] == right[-1]:
        left.pop()
        right.pop()
    return "".join(f"{part}." for part in left), "".join(f"{part}." for part in right)


def refuse_other_base(base_json: Path, now: BaseModel) -> None:
    """Refuse to continue an adapter on other weights than those under which it was trained so far. Raises:
    usage error."""
    before = BaseModel.read(base_json)
    if before is not None and before.differs_from(now):
        raise usage_error(
            "base-changed",
            f"the weights of {now.name} are not those that the adapter was trained on so far",
            where=Where(str(base_json)),
            ways_out=(
                "restore the old weights",
                "--overwrite or --set output_dir=… starts a new run on the new weights",
            ),
        )
