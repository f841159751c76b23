"""Complete an import: what follows from several keys, and what the other tool does where its file says
nothing."""

from __future__ import annotations

from fsdp_tune.migrate.adapters import settle_adapter
from fsdp_tune.migrate.ledger import Ledger
from fsdp_tune.migrate.placeholders import name_model_and_data
from fsdp_tune.migrate.ranks_and_batch import settle_batch, settle_ranks
from fsdp_tune.migrate.rules import Rules
from fsdp_tune.migrate.tool_defaults import set_defaults
from fsdp_tune.migrate.tools.trl import is_mixed
from fsdp_tune.migrate.weight_dtype import settle_dtype
from fsdp_tune.recipe.outcome import Weight
from fsdp_tune.recipe.read.tool_detection import TRL


def complete(ledger: Ledger, num_gpus: int | None, rules: Rules) -> None:
    """Add what no single key decides. `num_gpus`: ranks that the file was made for, if it does not say it;
    `rules`: of the whole file."""
    settle_adapter(ledger)
    settle_dtype(ledger)
    settle_ranks(ledger)
    ledger.write_answers()
    _settle_evaluation(ledger)
    _settle_state_format(ledger)
    set_defaults(ledger, rules)
    if ledger.is_answered(("data", "packing")) and not ledger.get("data", "packing"):
        ledger.discard(("data", "packing_strategy"), "nothing is packed")
    settle_batch(ledger, num_gpus)
    name_model_and_data(ledger)


_EVALUATIONS = ("eval_steps", "eval_strategy", "per_device_eval_batch_size", "eval_on_start", "eval_delay")


def _settle_evaluation(ledger: Ledger) -> None:
    """Leave out keys of evaluations that nothing evaluates. TRL evaluates the split `test`."""
    name = ledger.value("dataset_name")
    if (
        ledger.tool == TRL
        and name
        and not is_mixed(ledger)
        and ledger.value("eval_strategy") not in (None, "no")
    ):
        found = {"path": name, "split": "test"} | (
            {"name": config} if (config := ledger.value("dataset_config")) else {}
        )
        for key, value in found.items() if ledger.value("dataset_test_split") is None else ():
            ledger.set(("data", "eval", 0, key), value, "default of TRL", Weight.DEFAULT)
    if not any(target[:2] == ("data", "eval") for target in ledger.settings):
        for target in (*(("training", name) for name in _EVALUATIONS), ("data", "eval_packing")):
            ledger.discard(target, "there are no rows to evaluate")


def _settle_state_format(ledger: Ledger) -> None:
    """Leave out the format of the state for optimizers whose moments have few bits: those are saved in shards
    alone."""
    if ledger.get("training", "optim") in ("adamw_torch_8bit", "adamw_torch_4bit"):
        ledger.discard(
            ("fsdp", "state_dict_type"),
            "moments of few bits are saved in shards; `merge-checkpoint` makes one model",
        )
