"""The stages of one side of a comparison that need no model: its examples, rows, and their order, from the
first rows of each source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from fsdp_tune.comparison.stages import StageFacts
from fsdp_tune.data.preparation import prepare
from fsdp_tune.data.report import InputAccount
from fsdp_tune.data.row_order import RowOrder, row_order
from fsdp_tune.data.store import Row, RowStore
from fsdp_tune.data.tokenise.tokenizer import load_encoder
from fsdp_tune.model.step import supervised_tokens
from fsdp_tune.recipe.schema.data_section import EvalRows
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value
from fsdp_tune.run.manifest import digest

ORDERED_STEPS, ORDERED_SEQUENCES = 3, 20_000
"""Steps whose order is compared, and the sequences up to which it is that of all steps."""
MODEL_ROWS = 8
"""Rows of a step that run through the model."""
NOMINAL_STEPS_OF_EPOCH = 1000
Stages = dict[str, StageFacts]


class DataSide:
    """The rows of one recipe and the stages that compare them."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.recipe = Recipe.model_validate(request["recipe"])
        self.rows: int = request["rows"]
        self.folder = Path(request["folder"])
        self.is_beside_tool: bool = request["beside_tool"]
        self.stages: Stages = {}
        self.names: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        self.left_out: list[str] = []
        self.vocabulary: int | None = None
        self.pad_id = 0
        self.row_count: int | None = None
        """Rows of an epoch; None if not all of them were read."""
        self.steps_of_rows: list[list[Row]] = []
        self.complete: list[str] = []

    def observe_data(self) -> None:
        recipe = self.sampled()
        encoder = load_encoder(recipe)
        self.vocabulary, self.pad_id = encoder.vocabulary_size, encoder.pad_id
        prepared = prepare(recipe, encoder, check_rows=False)
        self._examples(store := prepared.store())
        ids = {token for values in self.stages["tokens"].values.values() for token in values}
        self.texts = {str(token): encoder.decode([token]) for token in sorted(ids)}
        keys = self._keys(store)
        rows = {
            f"row {index}": [[keys[example], *piece] for example, *piece in store.pieces(index)]
            for index in range(len(store))
        }
        self.stages["rows"] = StageFacts(rows)
        self.stages["batch"] = StageFacts({"sequences": self.recipe.global_batch_size})
        of_rows = row_order(recipe, store.lengths)
        in_order = recipe.model_copy(update={"data": recipe.data.model_copy(update={"shuffle": False})})
        walked = row_order(in_order, store.lengths) if self.is_beside_tool else of_rows
        order: dict[str, list[str]] = {}
        items: dict[str, int] = {}
        for step in range(1, ORDERED_STEPS + 1):
            order[f"step {step}"] = [
                keys[store.pieces(index)[0].example] for index in of_rows.batch_after(step - 1).tolist()
            ]
            found = [store[index] for index in walked.batch_after(step - 1).tolist()]
            items[f"step {step}"] = sum(int(supervised_tokens(torch.from_numpy(row.labels))) for row in found)
            self.steps_of_rows.append(found[:MODEL_ROWS])
            self.names |= {
                f"row-id {row.row_id}": f"row {row.row_id} ({shown_origin(store.origins(row.row_id)[0])})"
                for row in found
            }
        self.stages["order"] = StageFacts(order, drawn_by="a hash" if self.recipe.data.shuffle else None)
        self.stages["items"], self.row_count = StageFacts(items), len(store)
        if self.recipe.evaluates and not self.is_beside_tool:
            self.stages["eval_rows"] = StageFacts(_rows_by_digest(prepared.evals))
        if self.recipe.data.streaming:
            reason = "a stream is shuffled and packed as it is read, which is not done here"
            names = ("rows", "order", "items") if self.recipe.data.packing else ("order", "items")
            self.stages |= dict.fromkeys(names, StageFacts(reason=reason))
        if any(account.rows >= self.rows for account in prepared.report.inputs if account.set == "train"):
            self.row_count = None
            self.left_out.append(
                f"rows after the first {self.rows} of each source, and the order of all rows, if "
                "there are more (`--rows N` reads more)"
            )
        else:
            self._complete_data(prepared.report.inputs, keys, store, of_rows)
        if (size := self.recipe.global_batch_size) > len(store):
            self.left_out.append(
                f"steps as large as the recipe's {size:,} sequences: {len(store)} rows were read"
            )

    def _complete_data(
        self, accounts: Sequence[InputAccount], keys: Sequence[str], store: RowStore, rows: RowOrder
    ) -> None:
        """Name the stages that cover the full run, whose training rows were all read, and add the order of
        its later steps."""
        if self.recipe.data.streaming:
            return
        self.complete.append("rows")
        if all(account.rows < self.rows for account in accounts):
            self.complete.append("eval_rows")
        steps = self.total_steps()[0]
        if self.is_beside_tool or steps * self.recipe.global_batch_size > ORDERED_SEQUENCES:
            return
        self.complete.append("order")
        for step in range(ORDERED_STEPS + 1, steps + 1):
            found = [keys[store.pieces(index)[0].example] for index in rows.batch_after(step - 1).tolist()]
            self.stages["order"].values[f"step {step}"] = found

    def total_steps(self) -> tuple[int, bool]:
        """Return the steps of the run, and whether the number of those of an epoch is assumed."""
        steps = int(training_value(self.recipe.training, "max_steps"))
        if steps > 0:
            return steps, False
        of_epoch = (
            NOMINAL_STEPS_OF_EPOCH
            if self.row_count is None
            else math.ceil(self.row_count / self.recipe.global_batch_size)
        )
        return math.ceil(
            float(training_value(self.recipe.training, "num_train_epochs")) * of_epoch
        ), self.row_count is None

    def sampled(self) -> Recipe:
        """Return the recipe with the first rows of each source, read in this process."""
        raw = self.recipe.model_dump(mode="json", by_alias=True)
        data = raw["data"]
        evals: list[Any] = cast("list[Any]", data["eval"]) if isinstance(data["eval"], list) else []
        for source in [*data["train"], *evals]:
            source["max_rows"] = min(source["max_rows"] or self.rows, self.rows)
        if isinstance(self.recipe.data.eval, EvalRows):
            data["eval"]["rows"] = max(1, min(self.recipe.data.eval.rows, self.rows // 8))
        data |= {"cache_dir": str(self.folder / "cache"), "num_proc": 1}
        if self.recipe.data.streaming:
            data |= {"streaming": False, "stream_lanes": "auto", "curriculum": []}
            for source in data["train"]:
                source["repeats"] = None
        return Recipe.model_validate(raw)

    def _examples(self, store: RowStore) -> None:
        tokens: dict[str, list[int]] = {}
        labels: dict[str, list[int]] = {}
        for index, key in enumerate(self._keys(store)):
            ids, trained, origin = store.example(index)
            # the first token of an example is never a target
            tokens[key], labels[key] = (
                ids.tolist(),
                [0, *trained[1:].tolist()],
            )
            self.names[key] = f"example {index} ({shown_origin(origin)})"
        self.stages["tokens"], self.stages["labels"] = StageFacts(tokens), StageFacts(labels)

    def _keys(self, store: RowStore) -> list[str]:
        """Return a key of each example that both sides share: the number of its file, its row, and its number
        among the row's examples."""
        counts: dict[tuple[str, int], int] = {}
        keys: list[str] = []
        for index in range(store.example_count):
            origin = store.example(index).origin
            counts[origin] = counts.get(origin, 0) + 1
            keys.append(f"{store.files.index(origin[0])}:{origin[1]}:{counts[origin]}")
        return keys


def _rows_by_digest(sets: Mapping[str, str]) -> dict[str, str]:
    """Return a digest of tokens and labels by set and row."""
    stores = [(label, RowStore(path)) for label, path in sets.items()]
    rows = [(f"{label}, row {index}", store[index]) for label, store in stores for index in range(len(store))]
    return {name: digest(row.input_ids.tobytes(), row.labels.tobytes()) for name, row in rows}


def shown_origin(origin: tuple[str, int]) -> str:
    return f"{Path(origin[0]).name}:{origin[1]}"
