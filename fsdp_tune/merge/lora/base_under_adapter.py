"""The weights that an adapter is added to: those of the checkpoint itself, or of its base."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsdp_tune.core.command import BaseWeights
from fsdp_tune.core.config_changes import with_changes
from fsdp_tune.core.errors import Notice, Where, failed_error, usage_error
from fsdp_tune.core.tensors.activation_scales import dropped_notices
from fsdp_tune.core.tensors.peft_config import CONFIG_FILE
from fsdp_tune.merge.config_and_tokenizer import Companions, fetch_model, find_companions
from fsdp_tune.merge.lora.biases import without_foreign_biases
from fsdp_tune.merge.lora.config import AdapterConfig
from fsdp_tune.merge.read.base import read_base, record_of_base, without_others
from fsdp_tune.merge.read.reader import SourceTensor
from fsdp_tune.merge.source import Selection
from fsdp_tune.run.base_model import BASE_FILE, AdapterBase, BaseLayout, BaseModel, open_base


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """`export`: `--adapter`. `config`: `--adapter-config`. `base`: `--base`. `weights`: `merge.base`,
    `--base-weights`."""

    export: bool = False
    weights: BaseWeights = "trained"
    config: Path | None = None
    base: str | None = None


@dataclass(frozen=True, slots=True)
class BaseUnderAdapter:
    """`folder`: directory of the weights, `tensors`: those in it by the names of the model; both None if the
    checkpoint has them itself. `trained`: what the run recorded of them."""

    folder: Path | None
    name: str | None
    """As the user or the config of the adapter names it."""
    companions: Companions
    tensors: Mapping[str, SourceTensor] | None = None
    trained: BaseModel | None = None
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    """{name in the model: name in the files of the base} of tensors that have another name there."""
    notices: tuple[Notice, ...] = ()

    @property
    def was_in_4_bits(self) -> bool:
        return self.trained is not None and self.trained.nf4_scales is not None


def base_in_checkpoint(
    selection: Selection, config: AdapterConfig, options: AdapterOptions
) -> BaseUnderAdapter:
    return BaseUnderAdapter(None, options.base or config.base, find_companions(selection, options.base))


def read_base_under(
    stack: ExitStack, selection: Selection, config: AdapterConfig, options: AdapterOptions
) -> BaseUnderAdapter:
    """Open the base of an adapter, whose files stay open until the stack ends.

    Raises: usage error if no base is named; FailedError for weights that are known not to be those of the
    training.
    """
    run = selection.run
    record = run.base_json if run is not None else selection.weights[0].root / BASE_FILE
    of_adapter = open_base(config.values, record, given=options.base)
    name, folder = _fetch_base(config, options, of_adapter)
    companions = find_companions(selection, str(folder), origin=name)
    if not companions.is_of_run:
        companions = companions.with_tokenizer_of([w.root for w in selection.weights])
        if companions.config is not None:
            changed = with_changes(companions.config, of_adapter.config_changes)
            companions = replace(companions, config=changed)
    of_base = read_base(stack, folder)
    record_of_tensors = record_of_base(selection)
    of_model = without_others(of_base, record_of_tensors)
    if not record_of_tensors.counts:  # of another tool
        of_model = without_foreign_biases(of_model, folder)
    tensors, renamed = with_names_of_model(of_model, layout_of(selection))
    trained = of_adapter.trained
    if trained is not None and trained.nf4_scales is not None and options.weights == "trained":
        tensors |= _in_4_bits(tensors, trained, folder)
    notices: list[Notice] = []
    if run is None:  # a run has reported it
        notices += dropped_notices(of_base.of_activations, Where(str(folder)))
        if options.base is None:
            message = f"the weights under the adapter are those of `{name}`, as {CONFIG_FILE} says"
            notices.append(Notice("merge-adapter-base", message))
    return BaseUnderAdapter(folder, name, companions, tensors, trained, renamed, tuple(notices))


def _fetch_base(config: AdapterConfig, options: AdapterOptions, base: AdapterBase) -> tuple[str, Path]:
    """Return name and directory of the base. Raises: FailedError for weights that are known not to be those
    of the training."""
    if base.name is None:
        raise usage_error(
            "merge-adapter-base",
            "the checkpoint holds only an adapter, and its config does not name the model that it "
            "was trained on",
            where=Where(str(config.path)),
            ways_out=("give the model: `--base MODEL`", "write the adapter alone: `--adapter`"),
        )
    folder = fetch_model(
        base.name, revision=base.revision, named_in=config.path if options.base is None else None
    )
    if base.has_other_weights(folder):
        assert base.trained is not None
        raise failed_error(
            "merge-adapter-base",
            f"the weights of {base.name} are not those that the adapter was trained on",
            where=Where(str(folder)),
            ways_out=(
                f"give a copy of the weights of {base.trained.name} as they were: `--base MODEL`",
                "write the adapter alone: `--adapter`",
            ),
        )
    return base.name, folder


def _in_4_bits(
    below: Mapping[str, SourceTensor], trained: BaseModel, folder: Path
) -> dict[str, SourceTensor]:
    """Return the tensors of the base that the run held in 4 bits, marked so. Raises: FailedError if the base
    has other names."""
    found: dict[str, SourceTensor] = {}
    for name in trained.nf4_weights:
        known = next((each for each in (name, name.partition(".")[2]) if each in below), None)
        if known is None:
            raise failed_error(
                "merge-adapter-base",
                f"it has no `{name}`, which was trained in 4 bits",
                where=Where(str(folder)),
                ways_out=(
                    "give the base with these names: `--base MODEL`",
                    "add the adapter to the weights as they are: `--base-weights original`",
                ),
            )
        found[known] = replace(below[known], nf4_scales=trained.nf4_scales)
    return found


def layout_of(selection: Selection) -> BaseLayout:
    """Return how the files of a run's base store its parameters: empty if nothing was recorded."""
    return (
        BaseLayout.read(selection.run.base_layout_json) if selection.run is not None else None
    ) or BaseLayout()


def with_names_of_model(
    below: dict[str, SourceTensor], layout: BaseLayout
) -> tuple[dict[str, SourceTensor], dict[str, str]]:
    """Return the tensors of a run's base by the names that the adapter's modules have in the model, and those
    names: {new: old}."""
    found = {new: old for new, old in layout.renamed.items() if old in below and new not in below}
    if (prefixes := layout.prefixes()) is not None:  # of a base of several modalities, for experts too
        ours, theirs = prefixes
        taken = set(found.values())
        found |= {
            ours + old.removeprefix(theirs): old
            for old in below
            if old.startswith(theirs) and old not in taken
        }
    names = {old: new for new, old in found.items()}
    return {(name := names.get(old, old)): replace(tensor, name=name) for old, tensor in below.items()}, found
