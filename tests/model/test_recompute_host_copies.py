"""Copies to and from the host, on a stream that runs as late as allowed."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_tune.model.loading.construct import build_full
from fsdp_tune.model.shard.host_copies import HostCopies
from fsdp_tune.model.shard.recompute import recompute_activations
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of
from tests.model.test_recompute import gradients

LAYERS = 4


class LateStream:
    """What it is given runs when somebody waits for it, not before."""

    def __init__(self, priority: int | None = None) -> None:
        self.priority = priority
        self.work: list[Callable[[], None]] = []
        self.followed = False

    def wait_stream(self, _other: Any) -> None:
        self.followed = True

    def record_event(self) -> tuple[LateStream, int]:
        return self, len(self.work)

    def wait_event(self, event: tuple[LateStream, int]) -> None:
        stream, until = event
        for index in range(until):
            stream.work[index]()
            stream.work[index] = lambda: None


class LateDevice:
    """Stands for `torch.cuda`; holds no tensor that is copied, as a device does not."""

    Stream = LateStream

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.computing = LateStream()
        self.now = self.computing
        self.sizes: dict[str, list[int]] = {"out": [], "back": []}
        self.in_backward = False
        copied = torch.Tensor.copy_

        def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if self.now is self.computing:
                return copied(target, source, non_blocking)
            assert self.now.followed, (
                "it would read what is not computed yet, or write over what is still read"
            )
            self.now.followed = False
            self.sizes["back" if self.in_backward else "out"].append(source.numel())
            self.now.work.append(_later(copied, weakref.ref(target), weakref.ref(source)))
            return target

        backward = torch.Tensor.backward

        def marked(loss: torch.Tensor) -> None:
            self.in_backward = True
            backward(loss)
            self.in_backward = False

        monkeypatch.setattr(torch.Tensor, "copy_", copy_)
        monkeypatch.setattr(torch.Tensor, "backward", marked)
        monkeypatch.setattr(torch, "get_device_module", lambda _device: self)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)  # torch 2.11 asks for more when it recomputes

    def current_stream(self) -> LateStream:
        return self.now

    @contextlib.contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before


def _later(
    copied: Callable[..., Any],
    target: Callable[[], torch.Tensor | None],
    source: Callable[[], torch.Tensor | None],
) -> Callable[[], None]:
    def run() -> None:
        to, of = target(), source()
        assert to is not None, "the memory was given away before the copy had arrived"
        assert of is not None, "the memory was given away before it was read"
        copied(to, of)

    return run


def model_of(family: str, **model: Any) -> tuple[nn.Module, nn.Module]:
    """The plain one, and one like it whose layers' inputs go to the host."""
    depth = {"n_layer": LAYERS} if family == "gpt2" else {"num_hidden_layers": LAYERS}
    fsdp = {"activation_checkpointing": "full", "activation_checkpointing_offload": True, **model}
    recipe = recipe_of({"from_config": FAMILIES[family] | depth}, fsdp=fsdp)
    plain = build_full(recipe)
    moved = copy.deepcopy(plain)
    recompute_activations(recipe, moved)
    return plain, moved


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
@pytest.mark.parametrize("every", [1, 2])
def test_gradients_are_correct_with_late_host_copies(
    family: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, moved = model_of(family, activation_checkpointing_every=every)
    _, expected = gradients(plain)
    device = LateDevice(monkeypatch)
    for _ in range(2):  # micro-batches
        _, found = gradients(moved)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    hidden = 3 * 20 * plain.config.hidden_size  # type: ignore[union-attr]
    moves = LAYERS // every - 1
    assert device.sizes == {"out": [hidden] * 2 * moves, "back": [hidden] * 2 * moves}, (
        "all but the uppermost layer's, no mask, and once"
    )


def test_input_without_gradient_is_not_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under LoRA that of the first layer; its random state is then to be kept all the same."""
    plain, moved = model_of("gpt2")
    for model in (plain, moved):
        model.transformer.wte.weight.requires_grad_(False)  # type: ignore[union-attr]
        model.transformer.wpe.weight.requires_grad_(False)  # type: ignore[union-attr]
    _, expected = gradients(plain)
    device = LateDevice(monkeypatch)
    _, found = gradients(moved)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(device.sizes["out"]) == LAYERS - 2


def test_few_inputs_stay_on_device() -> None:
    """In the forward pass the current layer's input, in the backward pass also that of the next."""
    _, model = model_of("llama")
    inputs: dict[int, weakref.ref[Any]] = {}
    alive: dict[str, list[int]] = {"forward": [], "backward": []}

    def entered(index: int) -> Any:
        def hook(_layer: nn.Module, args: Any) -> None:
            if index:  # what the embedding gave is held by the model's own forward
                inputs[index] = weakref.ref(args[0].untyped_storage())
            alive["forward"].append(sum(each() is not None for each in inputs.values()))

        return hook

    for index, layer in enumerate(model.model.layers):  # type: ignore[union-attr]
        layer.register_forward_pre_hook(entered(index))
    fetched: list[weakref.ref[Any]] = []
    fetch = HostCopies._fetch

    def counted(self: HostCopies, of: Any) -> None:
        fetch(self, of)
        fetched.extend(weakref.ref(tensor.untyped_storage()) for tensor in of.back.values())
        alive["backward"].append(sum(each() is not None for each in fetched))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostCopies, "_fetch", counted)
        gradients(model)
    assert alive == {"forward": [0, 1, 1, 1], "backward": [1, 2, 2]}
    assert not any(each() is not None for each in fetched)


def test_forward_without_backward_frees_host_copies() -> None:
    _, model = model_of("llama")
    ids = torch.arange(60).view(3, 20)
    model.train()
    output = model(input_ids=ids).logits
    del output
    _, expected = gradients(model)
    _, found = gradients(model)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
