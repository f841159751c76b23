"""The page of results: one row for each architecture that two versions of transformers have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INTRODUCTION = """# Exports in older stacks

A tiny model of each causal-LM architecture that transformers {new} and {old} both have is exported as a run exports it: a merged
model and a PEFT adapter. Each is loaded by both versions, {old} in an environment of its own, and compared: logits (1e-5 of the
largest), token ids, special tokens and chat template, and generation settings. The rotary base is one that no class has as its
default, so that a version that does not read it computes other logits. This command writes the table:

```bash
scripts/test-exports --write
```

{counts}

`5` is the version that trains, `older` the other one. Config, tokenizer and generation settings have the spelling of the base, and
changed facts those of both versions. Names and shapes of weights are those of the base's files: where version 5 stacks the weights of
experts or renames a module, they are written as one tensor for each expert and under the older name. An adapter of stacked experts
(`lora.target_parameters`) is for transformers 5 alone: in transformers 4 the experts are modules, and PEFT 0.21 loads the adapter without
them and computes other logits. Its merged model is equal in both.

vLLM reads an export through the transformers that is installed with it (from its source: `CachedHfTokenizer.from_pretrained` of
`vllm/tokenizers/hf.py` calls `AutoTokenizer`, `patch_rope_parameters` of `vllm/transformers_utils/config.py` reads `rope_theta` and
`rope_scaling` under transformers 4). vLLM itself was not run.

| architecture | merged model | adapter |
|---|---|---|
"""
SHOWN = 200
_CAUSES = {
    "cpmant": """the head has a row for each prompt token in transformers 4 (and is tied to the embedding), and none in transformers 5:
a model that transformers 5 trains has another shape.""",
    "apertus": """transformers 4 keeps the two parameters of xIELU in bf16 whatever the dtype of the model (`ACT2FN` builds it so), and
rounds the stored values; with their fp32 values its logits are those of transformers 5. In bf16 nothing is rounded.""",
    "gemma3n_text": """transformers 4 has key and value projections in layers that share those of earlier layers.
transformers 5 has none, so that the files that it writes lack them: such a base, too, has other logits in transformers 4.""",
    "gpt_neo": """the tiny base is at fault: transformers 4 computes the layers from `attention_types`, which transformers 5 writes
with its default of 24 layers if a model of two is made from `attention_layers`.""",
    "longcat_flash": """transformers 5 has weights for experts without any computation (`zero_expert_num`), and
writes them; transformers 4 does not read them.""",
    **dict.fromkeys(
        ("zamba", "zamba2"),
        """transformers 5 writes Mamba layers as `linear_attention` in `layers_block_type`, where transformers 4 reads `mamba`. A base that
transformers 4 wrote keeps its own.""",
    ),
    "mamba2": """transformers 4 normalises the gated output over its full width, transformers 5 over each of the `n_groups`. With one group
the logits are equal; with more the base itself differs between the versions.""",
}
"""Of differences: what was found in the sources of both versions."""


def page(results: Sequence[dict[str, Any]], known: Sequence[str] = ()) -> str:
    ordered = sorted(results, key=lambda each: each["architecture"])
    loaded = [each for each in ordered if each["full"] is not None]
    equal = sum(each["full"] == [] for each in loaded)
    adapters = sum(each["adapter"] == [] for each in ordered)
    missing = [each for each in ordered if each["full"] is None]
    counts = f"{equal} of {len(loaded)} merged models are equal in both, and {adapters} adapters; "
    counts += f"{len(missing)} architectures were not tried."
    if rest := sorted(set(known) - {each["architecture"] for each in results}):
        counts += f" Both versions have {len(rest)} more, which were not run: {', '.join(f'`{name}`' for name in rest)}."
    old = next((each["versions"][1] for each in ordered if each["versions"][1]), "4")
    text = _INTRODUCTION.format(new=ordered[0]["versions"][0], old=old, counts=counts)
    text += "".join(f"| `{each['architecture']}` | {_cell(each, 'full')} | {_cell(each, 'adapter')} |\n" for each in loaded)
    causes = [
        f"- `{each['architecture']}`: {_CAUSES[each['architecture']]}\n"
        for each in loaded
        if each["full"] and each["architecture"] in _CAUSES
    ]
    text += "\n## Causes\n\n" + "".join(causes) if causes else ""
    text += "\n## Not tried\n\n| architecture | reason |\n|---|---|\n"
    return text + "".join(f"| `{each['architecture']}` | {_escaped(each['not_tried'].get('full', ''))} |\n" for each in missing)


def _cell(result: dict[str, Any], which: str) -> str:
    found = result[which]
    if found is None:
        return f"not tried: {_escaped(result['not_tried'].get(which, ''))}"
    return _escaped("; ".join(found)) if found else "equal"


def _escaped(text: str) -> str:
    return text[:SHOWN].replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
