"""docs/reference/exports.md: the architectures whose exports two versions of transformers read alike, and the
others with the cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.evidence import Evidence, Results, table

_INTRODUCTION = """# Exports in older stacks

A tiny model of each causal-LM architecture that transformers {new} and {old} both have is exported in the same way as by a run, as a
merged model and as a PEFT adapter. Both versions load each export, {old} in a separate environment. The test compares logits (1e-5 of
the largest), token ids, special tokens and chat template, and generation settings. [exports.json](../evidence/data/exports.json) has
the result of each; `scripts/test --suite exports --write` measures them and writes this page.

{counts}

Config, tokenizer and generation settings keep the field names of the base; changed values are written under the names of both versions.
Names and shapes of weights are those of the base's files: where version 5 stacks the weights of experts or renames a module, they are
written as one tensor for each expert and under the older name. An adapter of stacked experts (`lora.target_parameters`) works only in
transformers 5: in transformers 4 the experts are modules, and PEFT 0.21 loads the adapter without them and computes other logits. Its
merged model is equal in both.

By its source, vLLM reads an export through the transformers that is installed with it. This was not run.

## Different

"""  # noqa: E501
SHOWN = 90
_CAUSES = {
    "cpmant": """the head has a row for each prompt token in transformers 4 (and is tied to the embedding), and none in transformers 5:
a model that transformers 5 trains has another shape.""",  # noqa: E501
    "apertus": """transformers 4 keeps the two parameters of xIELU in bf16 whatever the dtype of the model (`ACT2FN` builds it so), and
rounds the stored values; with their fp32 values its logits are those of transformers 5. In bf16 nothing is rounded.""",  # noqa: E501
    "gemma3n_text": """transformers 4 has key and value projections in layers that share those of earlier layers.
transformers 5 has none, so that the files that it writes lack them: such a base, too, has other logits in transformers 4.""",  # noqa: E501
    "gpt_neo": """the tiny base is at fault: transformers 4 computes the layers from `attention_types`, which transformers 5 writes
with its default of 24 layers if a model of two is made from `attention_layers`.""",  # noqa: E501
    "longcat_flash": """transformers 5 has weights for experts without any computation (`zero_expert_num`), and
writes them; transformers 4 does not read them.""",  # noqa: E501
    **dict.fromkeys(
        ("zamba", "zamba2"),
        """transformers 5 writes Mamba layers as `linear_attention` in `layers_block_type`, where transformers 4 reads `mamba`. A base that
transformers 4 wrote keeps its own.""",  # noqa: E501
    ),
    "mamba2": """transformers 4 normalises the gated output over its full width, transformers 5 over each of the `n_groups`. With one group
the logits are equal; with more the base itself differs between the versions.""",  # noqa: E501
}
"""Of differences: what was found in the sources of both versions."""


def page(results: Results, _previous: str = "") -> str:
    ordered = sorted(results.rows, key=lambda each: each["architecture"])
    loaded = [each for each in ordered if each["full"] is not None]
    equal = [each for each in loaded if each["full"] == []]
    adapters = sum(each["adapter"] == [] for each in ordered)
    missing = [each for each in ordered if each["full"] is None]
    counts = f"{len(equal)} of {len(loaded)} merged models are equal in both, and {adapters} adapters; "
    counts += f"{len(missing)} architectures were not tried."
    if rest := results.about["not_run"]:
        counts += (
            f" Both versions have {len(rest)} more, which were not run: "
            f"{', '.join(f'`{name}`' for name in rest)}."
        )
    text = _INTRODUCTION.format(**results.about, counts=counts)
    rows = [
        [f"`{each['architecture']}`", _cell(each["full"]), _cause(each)] for each in loaded if each["full"]
    ]
    text += table(["merged model", "difference", "cause"], rows) if rows else "No merged model.\n"
    alone = [each for each in equal if each["adapter"]]
    text += "".join(f"\nThe adapter alone of {_names([each])}: {_cell(each['adapter'])}.\n" for each in alone)
    unadapted = [each for each in loaded if each["adapter"] is None]
    text += f"\n## Not tried\n\nNo adapter could be made for {_names(unadapted)}.\n" if unadapted else ""
    text += f"\nNo tiny model could be made of {_names(missing)}.\n" if missing else ""
    return text


def _cause(result: Mapping[str, Any]) -> str:
    return " ".join(_CAUSES.get(result["architecture"], "").split())


def _names(results: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"`{each['architecture']}`" for each in results)


def _cell(found: Sequence[str]) -> str:
    text = "; ".join(found).removeprefix("older: ").strip()
    return (text if len(text) <= SHOWN else text[:SHOWN].rsplit(" ", 1)[0] + " …").replace("\n", " ")


EVIDENCE = Evidence(Path("reference/exports.md"), page)
