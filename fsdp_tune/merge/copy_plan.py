"""What a merge copies: the tensors of the output, with names and shapes as files of the base have them, and
the files that they are in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from fsdp_tune.core.errors import Notice
from fsdp_tune.core.tensors.dtypes import Shape
from fsdp_tune.core.tensors.peft_config import WEIGHTS_FILE
from fsdp_tune.merge.config_and_tokenizer import Companions
from fsdp_tune.merge.copy.as_base import as_base
from fsdp_tune.merge.copy.layout import Layout, plan_layout
from fsdp_tune.merge.copy.ties import Tied, find_ties
from fsdp_tune.merge.lora.adapt import Adapter
from fsdp_tune.merge.lora.base_under_adapter import layout_of
from fsdp_tune.merge.merge_settings import MergeSettings
from fsdp_tune.merge.precision import find_kept
from fsdp_tune.merge.read.base import read_untrained, record_of_base
from fsdp_tune.merge.read.contents import CheckpointTensors, Contents
from fsdp_tune.merge.source import Selection
from fsdp_tune.merge.weight_formats import SINGLE_NAME
from fsdp_tune.run.base_model import BaseLayout, BaseRecord


@dataclass(frozen=True, slots=True)
class Copy:
    """The inputs of the copy and of the checks that run next to it."""

    sources: Sequence[CheckpointTensors]
    selection: Selection
    companions: Companions
    layout: Layout
    shapes: Mapping[str, Shape]
    """Of the tensors to write, by the names of the model."""
    tied: Tied
    left_out: Mapping[str, str]
    """The heads that are not written and their embeddings, by their names in the output."""
    settings: MergeSettings
    adapter: Adapter | None
    base_tensors: BaseRecord
    """What becomes of the base's tensors: those of `carried` are written next to those of the trained
    model."""
    has_base: bool
    notices: tuple[Notice, ...] = ()

    @property
    def needs_parameter_list(self) -> bool:
        """Whether names and shapes are compared with the model: for checkpoints without a manifest, and with
        `--base`.

        The tensors of an adapter's base keep the names of its directory, so they are not compared.
        """
        if self.adapter is not None and (self.adapter.is_exported or self.adapter.base is not None):
            return False
        vouched = all(source.is_vouched for source in self.sources) and not self.has_base
        return self.companions.config is not None and self.settings.verify != "none" and not vouched


def plan_copy(
    stack: ExitStack,
    contents: Contents,
    selection: Selection,
    companions: Companions,
    settings: MergeSettings,
    adapter: Adapter | None,
    base: str | None,
) -> Copy:
    """Decide the tensors of the output, with names and shapes as files of the base have them, and the files
    that they are in.

    `base`: `--base`. `stack` closes the base's files.
    """
    tied = find_ties(companions.config, contents.sources)
    ordered = [tensor for tensor in contents.ordered if tensor.name not in tied.left_out]
    stored = _base_layout(selection, adapter)
    output = as_base(stored, contents.sources, ordered)
    is_adapter = adapter is not None and adapter.is_exported
    most_bytes, file_name = (None, WEIGHTS_FILE) if is_adapter else (settings.max_shard_bytes, SINGLE_NAME)
    keeps_fp32, notices = find_kept(selection, companions, stored, settings.dtype)
    recorded = record_of_base(selection)
    shapes = {tensor.name: tensor.shape for tensor in output.ordered}
    wanted = recorded.restored(settings.dtype, keeps_fp32)
    wanted = {name: stored for name, stored in wanted.items() if name in shapes}
    carried, found = read_untrained(stack, selection, base, wanted, with_carried=not is_adapter)
    # An embedding that grew has rows that the base lacks.
    restored = {name: tensor for name, tensor in found.items() if tensor.shape == shapes[name]}
    sources = tuple(
        replace(source, tensors={**source.tensors, **restored, **carried}) for source in output.sources
    )
    written = [*(restored.get(tensor.name, tensor) for tensor in output.ordered), *carried.values()]
    layout = plan_layout(written, settings.dtype, most_bytes, single_name=file_name, keeps_fp32=keeps_fp32)
    left_out = {stored.name_of(head): stored.name_of(embedding) for head, embedding in tied.left_out.items()}
    record = replace(recorded, carried=tuple(sorted(carried)))
    return Copy(
        sources,
        selection,
        companions,
        layout,
        {tensor.name: tensor.shape for tensor in ordered},
        tied,
        left_out,
        settings,
        adapter,
        record,
        base is not None,
        tuple(notices),
    )


def _base_layout(selection: Selection, adapter: Adapter | None) -> BaseLayout:
    """Return how the files of the base store the parameters of a run. Weights under an adapter are such
    files' tensors already."""
    if adapter is not None and (adapter.is_exported or adapter.base is not None):
        return BaseLayout(dict(adapter.renamed))
    return layout_of(selection)
