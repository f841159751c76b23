"""Options of transformers' `run_clm.py` that mean something of their own, and those that `trl sft` has too:
both take one flat list."""

from __future__ import annotations

from fsdp_tune.migrate.ledger import Ledger
from fsdp_tune.migrate.rules import FileKey, Outcome, Rules, each, of_the_set, same
from fsdp_tune.migrate.tool import TRAINER_DEFAULTS, Tool
from fsdp_tune.migrate.tools.long_rows import SPLIT
from fsdp_tune.recipe.outcome import Ask, Drop, Weight, Write
from fsdp_tune.recipe.read.tool_detection import EXAMPLES
from fsdp_tune.recipe.synonyms import SYNONYMS


def _optional_adapter(key: FileKey) -> Outcome:
    return (
        Write({"lora": {}})
        if isinstance(SYNONYMS["use_peft"].outcome(key.value), Write)
        else Drop("off, as it is here")
    )


def _share_held_out(key: FileKey) -> Outcome:
    """A percentage of the training rows; a file or a split of its own comes first."""
    if key.of_file("validation_file") is not None:
        return Drop("`validation_file` is evaluated")
    if not isinstance(key.value, int | float):
        return Ask("write a share: `data: {eval: {fraction: 0.05}}`", "data.eval")
    if not key.of_file("do_eval") and key.of_file("eval_strategy") in (None, "no"):
        return Drop("nothing is evaluated")
    return Write({"data.eval.fraction": float(key.value) / 100}, "a percentage there, a share here")


def _config_name(key: FileKey) -> Outcome:
    if key.value == key.of_file("model_name_or_path"):
        return Drop("it is that of the model")
    return Ask("a model of random weights is `model: {from_config: …}`", "model.from_config")


OF_SCRIPTS: Rules = {
    "model_name_or_path": same("model.name_or_path"),
    "dataset_name": of_the_set("path"),
    **each(("dataset_config", "dataset_config_name"), of_the_set("name")),
    "dataset_train_split": of_the_set("split"),
    "use_peft": _optional_adapter,
    "lora_task_type": Drop("the models are causal language models"),
}
"""Options of `trl sft` and `run_clm.py`."""
EXAMPLE_RULES: Rules = {
    **OF_SCRIPTS,
    "train_file": of_the_set("path"),
    "validation_file": of_the_set("path", ("data", "eval", 0)),
    "validation_split_percentage": _share_held_out,
    "max_train_samples": of_the_set("max_rows"),
    "max_eval_samples": Ask("write a number of rows: `data: {eval: {rows: …}}`", "data.eval"),
    "keep_linebreaks": Drop("rows of a text keep their line ends"),
    "config_name": _config_name,
    "config_overrides": Ask("write a mapping: `{n_layer: 2}`", "model.config_overrides"),
    "model_type": Drop("classes follow from the files of model and tokenizer"),
    "streaming": same("data.streaming"),
}
"""By name; see `settle_keys.settle_key`."""


def pack_texts(ledger: Ledger) -> None:
    """`run_clm.py` joins all texts and cuts them into full blocks, of 1,024 tokens unless it is told
    otherwise."""
    origin = "run_clm.py joins texts and fills every block"
    ledger.set(("data", "packing"), True, origin, Weight.DEFAULT)
    ledger.set(("data", "packing_strategy"), "wrapped", origin, Weight.DEFAULT)
    ledger.set(("data", "max_length"), 1024, "default of run_clm.py", Weight.DEFAULT)


EXAMPLE_TOOL = Tool(
    EXAMPLES,
    EXAMPLE_RULES,
    defaults={**TRAINER_DEFAULTS, "precision.mixed_precision": "no"},
    adapter_switches=("use_peft",),
    loads_as_stored=True,
    upcasts=True,
    long_rows=SPLIT,  # run_clm.py joins all texts
)
