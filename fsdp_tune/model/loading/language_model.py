"""Write the language model of a model of several modalities to a directory of its own, if it is one: with the
same logits for text.

    python -m fsdp_tune.model.loading.language_model MODEL DIRECTORY

transformers has a causal LM for the configuration of the text, but not for that of the full model. The two
classes may compute otherwise: `Cohere2ForCausalLM` multiplies its logits by `logit_scale`,
`Cohere2VisionForConditionalGeneration` does not (5.24). So the logits are compared before anything is
written, with the weights themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from fsdp_tune.core.atomic import staged_directory
from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.core.library_errors import first_line, typed_line
from fsdp_tune.core.model_parts import TIE_KEY
from fsdp_tune.core.tensors.quantised_formats import find_encodings, method_of, quantisation_of, scales_among
from fsdp_tune.core.tensors.quantised_weight import StoredType
from fsdp_tune.model.internals.transformers_internals import forget_kernels
from fsdp_tune.model.loading.pickled_files import pickled_paths, read_pickled, read_state
from fsdp_tune.model.loading.stored_tensors import Stored, locate, read_whole
from fsdp_tune.model.loading.tensor_account import names_in_model, parameters_of
from fsdp_tune.model.loading.weight_slices import file_of_model

_MODULE = "fsdp_tune.model.loading.language_model"
_TOKENS = 8
_ROUNDINGS = 64
"""Largest difference of logits in fp32, in units of rounding of the largest: a class may add positions in
another order (PaliGemma)."""
_SHARE_IN_16_BITS = 0.02
"""Largest norm of the difference of logits in 16 bits, relative to that of the logits."""


def of_other_modalities(name: str, config: PreTrainedConfig, revision: str | None = None) -> FsdpTuneError:
    """Return the error for a model of several modalities of which transformers has no causal LM."""
    of_revision = ["--revision", revision] if revision not in (None, "main") else []
    command = shlex.join(["python", "-m", _MODULE, name, "DIRECTORY", *of_revision])
    hint = f"write its language model to a directory, and name that: {command}"
    if type(text := config.get_text_config()) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        hint = f"it has none for its text, {type(text).__name__}, either: name a model of text alone"
    message = f"transformers has no causal LM for {type(config).__name__}, a model of several modalities"
    return usage_error("model-refused", message, where=Where(key="model.name_or_path"), hint=hint)


def write_language_model(name: str, directory: Path, *, revision: str = "main") -> None:
    """Write the language model of `name`, with its tokenizer, to a directory that does not exist. Raises:
    usage error."""
    if directory.exists():
        raise _refused(str(directory), "it exists", "name a directory that does not exist")
    try:
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise _refused(
            name,
            f"it cannot be loaded: {first_line(error)}",
            "name a model of the hub, or the path of its directory",
        ) from error
    files = _files_of(name, revision)
    full = _load(name, revision, config, files, "auto")
    if (rounded := _rounded(full, files)) is None:
        full, rounded = _load(name, revision, config, files, torch.float32), {}
    language_model = language_model_of(full, name)
    for key, parameter in rounded.items():  # now, since layers in 16 bits do not compute with them
        value = files.values[key]
        parameter.data = read_whole(value).view(value.shape) if isinstance(value, Stored) else value.clone()
    with staged_directory(directory) as stage:
        language_model.save_pretrained(stage)
        with contextlib.suppress(OSError, ValueError):  # a model without a tokenizer
            AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False).save_pretrained(
                stage
            )


@dataclass(frozen=True, slots=True)
class _StoredModel:
    """The tensors in the files of a model: their types, and where their values are, or these themselves."""

    types: dict[str, StoredType]
    values: dict[str, Stored | torch.Tensor]


def _files_of(name: str, revision: str) -> _StoredModel:
    def file(part: str) -> Path | None:
        with contextlib.suppress(OSError):  # the model has no such file
            return file_of_model(name, revision, part)
        return None

    if (located := locate(file)).tensors:
        types = {key: StoredType(entry.dtype, entry.shape) for key, (_, entry) in located.tensors.items()}
        return _StoredModel(types, {**located.stored()})
    pickled = read_pickled(paths := pickled_paths(file))
    values = {key: value for path in paths for key, value in read_state(path, values=True).items()}
    return _StoredModel(pickled.types if pickled is not None else {}, {**values})


def _load(
    name: str, revision: str, config: PreTrainedConfig, files: _StoredModel, dtype: str | torch.dtype
) -> PreTrainedModel:
    if settings := quantisation_of(config.to_dict()):
        raise _refused(
            name, f"its weights are quantised ({method_of(settings)})", "name the model in 16 bits"
        )
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if kind is None or not issubclass(kind, PreTrainedModel):
        raise _refused(
            name, f"transformers has no class {config.architectures}, which its config.json names", None
        )
    forget_kernels(config)
    loaded: Any = kind.from_pretrained(
        name, config=copy.deepcopy(config), revision=revision, dtype=dtype, output_loading_info=True
    )
    full, loading = loaded
    if codes := _codes_in(files, loading["unexpected_keys"]):
        raise _refused(
            name, f"its weights are quantised: its files have {codes}", "name the model in 16 bits"
        )
    if lost := sorted({*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])}):
        raise _refused(
            name, f"its weights lack {len(lost)} parameters of {kind.__name__}, such as `{lost[0]}`", None
        )
    return full.eval()


def _codes_in(files: _StoredModel, unexpected: Iterable[str]) -> str | None:
    """Return the first tensor of the files that is a part of a quantised weight, which transformers may load
    as it is; None without one."""
    encodings = find_encodings(files.types, {})
    parts = [*encodings.parts, *(each.name for each in encodings.unread), *scales_among(unexpected)]
    return f"`{parts[0]}`" if parts else None


def _rounded(full: PreTrainedModel, files: _StoredModel) -> dict[str, torch.Tensor] | None:
    """Return the parameters and buffers that transformers rounded to the dtype of config.json, by their names
    in the files: biases of routers that these have in fp32. None if it made a parameter of several of them.
    """
    state = parameters_of(full)
    found: dict[str, torch.Tensor] = {}
    for name, in_model in names_in_model(full, files.values, state).items():
        value, target = files.values[name], state.get(in_model.name)
        if (
            target is None
            or not value.dtype.is_floating_point
            or torch.promote_types(value.dtype, target.dtype) == target.dtype
        ):
            continue
        if in_model.is_converted:
            return None
        found[name] = target
    return found


def language_model_of(full: PreTrainedModel, name: str) -> PreTrainedModel:
    """Return the causal LM of a model's text, which shares its weights. Raises: usage error if it is not the
    same function of text."""
    config = copy.deepcopy(full.config.get_text_config())
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise of_other_modalities(name, full.config)
    embedding, head = full.get_input_embeddings(), full.get_output_embeddings()
    setattr(
        config,
        TIE_KEY,
        head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", None),
    )
    with torch.device("meta"):
        text: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=full.dtype)
    found = full.get_decoder()
    if type(found) is type(text):
        text = found
    elif head is not None and type(found) is type(text.base_model):
        setattr(text, text.base_model_prefix, found)
        text.set_output_embeddings(head)
    else:
        raise _refused(
            name, f"its language model is a {type(found).__name__}, not that of {type(text).__name__}", _OTHER
        )
    if left := [key for key, value in text.state_dict().items() if value.device.type == "meta"]:
        raise _refused(
            name,
            f"{type(text).__name__} has {len(left)} parameters that it lacks, such as `{left[0]}`",
            _OTHER,
        )
    _require_same_logits(full, text.eval(), name)
    # it may end a turn by another token than the text's configuration
    text.generation_config = copy.deepcopy(full.generation_config)
    return text


_OTHER = "name a model of text alone"


@torch.no_grad()
def _require_same_logits(full: PreTrainedModel, text: PreTrainedModel, name: str) -> None:
    ids = _tokens_of_text(full.config)
    try:
        wanted = full(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    except Exception as error:  # whatever the class raises
        why = f"{type(full).__name__} does not run on text alone: {typed_line(error)}"
        raise _refused(name, why, _OTHER) from error
    found = text(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    if found.shape != wanted.shape:
        raise _refused(
            name,
            f"{type(text).__name__} has logits {list(found.shape)}, and {type(full).__name__} "
            f"{list(wanted.shape)}",
            _OTHER,
        )
    largest, difference = float(wanted.abs().max()), float((found - wanted).abs().max())
    if wanted.dtype == torch.float32:
        is_same = difference <= _ROUNDINGS * torch.finfo(wanted.dtype).eps * largest
    else:
        is_same = float((found.float() - wanted.float()).norm()) <= _SHARE_IN_16_BITS * float(
            wanted.float().norm()
        )
    if not is_same:
        what = (
            f"the logits of {type(text).__name__} differ by {difference:.2g} of {largest:.2g} from those "
            f"of {type(full).__name__}"
        )
        raise _refused(
            name, f"{what}: what is trained as the one would compute otherwise as the other", _OTHER
        )


def _tokens_of_text(config: PreTrainedConfig) -> torch.Tensor:
    """Return [1, tokens] ids of text: none that a configuration names, such as that of an image."""
    named = _named_tokens(config.to_dict())
    vocabulary = int(config.get_text_config().vocab_size)
    return torch.tensor([[token for token in range(vocabulary) if token not in named][:_TOKENS]])


def _named_tokens(config: dict[str, object]) -> set[int]:
    found: set[int] = set()
    for key, value in config.items():
        if isinstance(value, dict):
            found |= _named_tokens(value)
        elif isinstance(value, int | list) and any(end in str(key) for end in ("_id", "_index")):
            found |= {
                each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)
            }
    return found


def _refused(name: str, why: str, hint: str | None) -> FsdpTuneError:
    return usage_error("model-refused", f"the language model of {name} cannot be written: {why}", hint=hint)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m {_MODULE}", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("model", help="a model of the hub, or the path of its directory")
    parser.add_argument("directory", type=Path, help="to write; it must not exist")
    parser.add_argument("--revision", default="main")
    options = parser.parse_args(arguments)
    try:
        write_language_model(options.model, options.directory, revision=options.revision)
    except FsdpTuneError as error:
        sys.stderr.writelines(
            f"error: {each.message}\n" + (f"hint: {each.hint}\n" if each.hint else "")
            for each in error.problems
        )
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
