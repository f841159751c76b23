"""LoRA adapters: added to the weights of their base, in the same streaming pass, or written as PEFT's own
files.

A checkpoint of a PEFT model holds factors and base together, an adapter's own directory the factors alone;
the base is then read from another model directory. docs/guide/merging.md says what is merged and what is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fsdp_tune.core.command import BaseWeights
from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem, Where, usage_error
from fsdp_tune.core.tensors.dtypes import DTYPES
from fsdp_tune.core.tensors.peft_config import CONFIG_FILE, unknown_field_notices
from fsdp_tune.core.tensors.peft_names import (
    MAGNITUDE,
    PREFIX,
    PeftNames,
    classify_names,
    tensor_name,
    unwrapped,
)
from fsdp_tune.merge.config_and_tokenizer import Companions, find_companions
from fsdp_tune.merge.lora.base_under_adapter import (
    AdapterOptions,
    base_in_checkpoint,
    layout_of,
    read_base_under,
    with_names_of_model,
)
from fsdp_tune.merge.lora.config import AdapterConfig, derive_config, find_config
from fsdp_tune.merge.lora.targets import Layers, add_layers
from fsdp_tune.merge.read.base import has_weights, read_base, without_others
from fsdp_tune.merge.read.contents import CheckpointTensors, Contents, must_agree
from fsdp_tune.merge.read.reader import SourceFiles, SourceTensor, is_peft
from fsdp_tune.merge.source import Selection
from fsdp_tune.merge.weight_formats import Format, Weights
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.base_model import Published
from fsdp_tune.run.directory import SHARD_FOLDER
from fsdp_tune.run.written_files import model_files

if TYPE_CHECKING:
    from fsdp_tune.model.model_files import ModelFacts

_NAMING, _PATTERNS = (
    ("target_modules", "target_parameters", "modules_to_save"),
    ("rank_pattern", "alpha_pattern"),
)
"""Fields of adapter_config.json with names of modules: lists, and the keys of objects."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """The result of handling an adapter. `layers`: their number; `base`: directory of the weights under it,
    None if the checkpoint has them; `base_name`: the base as the user or the config names it; `base_weights`:
    of a base that was trained in 4 bits."""

    config: AdapterConfig
    is_exported: bool
    layers: int
    base: Path | None
    base_name: str | None
    base_weights: BaseWeights | None = None
    config_changes: Mapping[str, object] = field(default_factory=dict[str, object])
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    """{name in the model: name in the files of the base} of tensors of the base that have another name
    there."""
    published: Published | None = None
    """Names of modules in the export."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "is_exported": self.is_exported,
            "config": str(self.config.path),
            "layers": self.layers,
            "base": self.base_name if self.base is not None or self.is_exported else None,
            "base_weights": self.base_weights,
        }

    def config_json(self) -> dict[str, object]:
        """Return `adapter_config.json` of the export, as PEFT writes it for inference."""
        values = {**self.config.values, "base_model_name_or_path": self.base_name, "inference_mode": True}
        if self.published is None:
            return values
        named = {key: value for key in _NAMING if isinstance(value := values.get(key), list)}
        patterns = {key: value for key in _PATTERNS if isinstance(value := values.get(key), dict)}
        values |= {key: [self.published.target_of(name) for name in value] for key, value in named.items()}
        return values | {
            key: {self.published.target_of(name): each for name, each in value.items()}
            for key, value in patterns.items()
        }


class Adapted(NamedTuple):
    """The tensors of the output, the files next to them, and the adapter of the checkpoint, if it has one."""

    contents: Contents
    companions: Companions
    adapter: Adapter | None


def adapt(stack: ExitStack, contents: Contents, selection: Selection, options: AdapterOptions) -> Adapted:
    """Apply the LoRA adapters of a checkpoint, or select those to export."""
    if not is_peft(contents.sources[0].tensors):
        if options.export or options.config is not None:
            raise usage_error(
                "merge-no-adapter",
                "the checkpoint holds no LoRA adapter",
                where=Where(str(selection.weights[0].root)),
                hint="leave out `--adapter` and `--adapter-config`",
            )
        return Adapted(contents, find_companions(selection, options.base), None)
    if options.export and len(contents.sources) > 1:
        raise usage_error(
            "merge-average-adapter",
            "the mean of several adapters is not an adapter of this rank: the mean of the factors is "
            "not the factors of the mean",
            hint="leave out `--adapter`: the mean of the merged weights can be written",
        )
    places = [weights.root for weights in selection.weights] + [
        weights.checkpoint for weights in selection.weights
    ]
    places += [weights.root.parent for weights in selection.weights if weights.root.name == SHARD_FOLDER]
    config = find_config(
        options.config, [*places, *([model_files(selection.run)] if selection.run is not None else [])]
    )
    if config is None:
        raise usage_error(
            "merge-adapter-config",
            f"the checkpoint holds a LoRA adapter and no {CONFIG_FILE}, which says how much of it to add",
            where=Where(str(selection.weights[0].root)),
            ways_out=(
                f"give the {CONFIG_FILE} that PEFT wrote: `--adapter-config FILE`",
                *_file_to_write(contents, selection.weights[0]),
            ),
        )
    contents = replace(
        contents, notices=(*contents.notices, *unknown_field_notices(config.values, config.path))
    )
    names = [
        classify_names(source.tensors, Where(str(weights.root)))
        for source, weights in zip(contents.sources, selection.weights, strict=True)
    ]
    if options.export:
        return _export(contents, selection, names[0], config, options)
    return _merge(stack, contents, selection, names, config, options)


def _file_to_write(contents: Contents, weights: Weights) -> tuple[str, ...]:
    """Return the way out where no program wrote a config, as transformers' Trainer does not next to its
    sharded checkpoints."""
    tensors = contents.sources[0].tensors
    derived = derive_config(
        classify_names(tensors, Where(str(weights.root))),
        {name: tensor.shape for name, tensor in tensors.items()},
    )
    if derived is None:
        return ()
    return (
        f"if none was written, write this to {weights.checkpoint / CONFIG_FILE}, with the lora_alpha of the "
        f"training for ALPHA, and `use_rslora: true` if it had that: {derived}",
    )


def _merge(
    stack: ExitStack,
    contents: Contents,
    selection: Selection,
    names: Sequence[PeftNames],
    config: AdapterConfig,
    options: AdapterOptions,
) -> Adapted:
    is_whole = all(_is_whole(found, weights) for found, weights in zip(names, selection.weights, strict=True))
    config.check_mergeable(has_own_base=is_whole)
    if is_whole:
        base = base_in_checkpoint(selection, config, options)
    else:
        base = read_base_under(stack, selection, config, options)
    added: list[Layers] = []
    for source, found, weights in zip(contents.sources, names, selection.weights, strict=True):
        layers = _layers(source.tensors, found, base.tensors, base.folder or weights.root, config)
        if layers.magnitudes and len(contents.sources) > 1:
            raise config.unsupported(
                "the mean of several checkpoints of DoRA is not supported", "merge one of them: `--step N`"
            )
        added.append(add_layers(layers, config, base.companions.config))
    sources = tuple(
        replace(source, tensors=layers.tensors)
        for source, layers in zip(contents.sources, added, strict=True)
    )
    must_agree(sources, selection.weights)
    base_weights = options.weights if base.was_in_4_bits else None
    count = len(names[0].factors)
    notices = (*contents.notices, *base.notices, _added_notice(count, added, base_weights))
    changes = added[0].config_changes
    adapter = Adapter(config, False, count, base.folder, base.name, base_weights, changes, base.renamed)
    ordered = tuple(sources[0].tensors.values())
    merged = replace(contents, sources=sources, ordered=ordered, notices=notices)
    return Adapted(merged, base.companions, adapter)


def _added_notice(count: int, added: Sequence[Layers], base_weights: BaseWeights | None) -> Notice:
    scalings = sorted({scaling for layers in added for scaling in layers.scalings})
    shown = ", ".join(f"{scaling:g}" for scaling in scalings[:4]) or "nothing"
    to_what = {
        None: "the weights",
        "trained": "the weights of 4 bits that it was trained on",
        "original": "the weights, which it was not trained on: those were in 4 bits",
    }[base_weights]
    message = f"a LoRA adapter of {count} layers, scaled by {shown}, was added to {to_what}"
    return Notice("merge-adapter", message)


def _layers(
    tensors: Mapping[str, SourceTensor],
    names: PeftNames,
    below: Mapping[str, SourceTensor] | None,
    place: Path,
    config: AdapterConfig,
) -> Layers:
    """Return what is added to the base `below` of an adapter, or to that in the checkpoint itself (None)."""
    own = {name: replace(tensors[key], name=name) for name, key in names.weights.items()}
    factors = {
        module: {part: tensors[key] for part, key in parts.items()} for module, parts in names.factors.items()
    }
    magnitudes = {
        name.removesuffix(MAGNITUDE): tensors[key]
        for name, key in names.others.items()
        if name.endswith(MAGNITUDE)
    }
    if others := [key for name, key in names.others.items() if not name.endswith(MAGNITUDE)]:
        raise config.unsupported(f"the checkpoint holds `{others[0]}`")
    base, replaced = (own, {}) if below is None else (below, own)
    return Layers(base, replaced, factors, place, magnitudes=magnitudes)


def merge_problems(recipe: Recipe, facts: ModelFacts) -> list[Problem]:
    """Plan the merge of an adapter before it is trained, by names and shapes alone, and return why it would
    be refused.

    Only of a base whose files are on this machine.
    """
    folder = Path(facts.base_folder) if facts.base_folder is not None else None
    config, is_merged = facts.adapter_config, recipe.merge.at_end and recipe.merge.adapter != "adapter"
    if folder is None or config is None or not is_merged or not has_weights(folder):
        return []
    where = Where(key="lora.target_modules")
    try:
        with ExitStack() as stack:
            below, _ = with_names_of_model(
                without_others(read_base(stack, folder), facts.tensors), facts.base_layout
            )
            files = SourceFiles(folder)
            tensors = {
                name: SourceTensor(name, DTYPES["float32"], shape, (), files)
                for name, shape in facts.adapter_tensors.items()
            }
            of_peft = AdapterConfig(folder / CONFIG_FILE, config)
            add_layers(
                _layers(tensors, classify_names(tensors, where), below, folder, of_peft),
                of_peft,
                facts.exported_config,
            )
    except FsdpTuneError as error:
        hint = "`merge: {adapter: adapter}` trains the adapter and writes it without merging"
        return [
            Problem(each.code, f"the trained adapter could not be merged: {each.message}", where, hint)
            for each in error.problems
        ]
    return []


def _is_whole(names: PeftNames, weights: Weights) -> bool:
    """Return whether the checkpoint includes the base. An adapter's own file may hold an embedding next to
    its factors, but no model."""
    has_base = all(f"{module}.weight" in names.weights for module in names.factors)
    rest = [
        name
        for name in names.weights
        if name not in names.wrapped | names.saved and not name.endswith(".bias")
    ]
    return has_base and bool(rest) and weights.format not in (Format.PEFT, Format.PEFT_PICKLE)


def _export(
    contents: Contents, selection: Selection, names: PeftNames, config: AdapterConfig, options: AdapterOptions
) -> Adapted:
    tensors, weights = contents.sources[0].tensors, selection.weights[0]
    for module, parts in names.factors.items():
        key = parts.get("lora_A") or parts.get("lora_embedding_A")
        has_experts = bool(config.parameters_of(unwrapped(module)))  # whose factors are beside each other
        if key is not None and tensors[key].shape and not has_experts:
            config.scaling(module, tensors[key].shape[0])
    keys = {
        tensor_name(module, part): key
        for module, parts in names.factors.items()
        for part, key in parts.items()
    }
    keys |= {PREFIX + name: key for name, key in names.others.items()}
    for name, key in names.weights.items():
        if name in names.saved or not _is_whole(names, weights) or _is_trained_bias(name, names, config):
            module, _, rest = name.rpartition(".")
            keys[f"{PREFIX}{module}.base_layer.{rest}" if name in names.wrapped else PREFIX + name] = key
    published = layout_of(selection).published
    if published is not None:
        keys = {PREFIX + published.name_of(name.removeprefix(PREFIX)): key for name, key in keys.items()}
    source = CheckpointTensors(
        {name: replace(tensors[key], name=name) for name, key in keys.items()}, contents.sources[0].is_vouched
    )
    adapter = Adapter(
        config, True, len(names.factors), None, options.base or config.base, published=published
    )
    companions = Companions().with_tokenizer_of([weights.root, weights.checkpoint, weights.root.parent])
    if selection.run is not None:
        companions = companions.with_tokenizer_of([selection.run.model])
        if selection.run.base_json.exists():
            records = {
                path.name: path
                for path in (selection.run.base_json, selection.run.tensors_json)
                if path.exists()
            }
            companions = replace(companions, files={**companions.files, **records})
    return Adapted(
        replace(contents, sources=(source,), ordered=tuple(source.tensors.values())), companions, adapter
    )


def _is_trained_bias(name: str, names: PeftNames, config: AdapterConfig) -> bool:
    """`bias: all` trains every bias of the model, `lora_only` those of the layers that the adapter
    changes."""
    kind = config.values.get("bias", "none")
    return name.endswith(".bias") and (kind == "all" or (kind == "lora_only" and name in names.wrapped))
