"""Prepare data: tokenise and pack once, and account for what is trained. `train` prepares its data by the same functions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fsdp_tune.core.hub import download_model
from fsdp_tune.data.account import SourceSample, sample_sources
from fsdp_tune.data.preparation import Prepared, decoded_rows
from fsdp_tune.data.preparation import prepare as prepare_data
from fsdp_tune.data.report import DecodedExample
from fsdp_tune.data.tokenise.tokenizer import load_encoder
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import Allowed
from fsdp_tune.jobs.session import check_cache, resolve_recipe, session
from fsdp_tune.recipe.read.loader import LoadedRecipe
from fsdp_tune.recipe.schema.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Preparation:
    data: Prepared
    """Where the sets are, and the account of rows and tokens."""
    rows: list[list[DecodedExample]]
    """The rows requested by `show`, each a list of decoded examples."""
    samples: list[SourceSample]
    """As many examples of each training source as `samples` requests."""


def prepare(
    recipe: LoadedRecipe,
    *,
    show: int = 0,
    samples: int = 0,
    download: bool = False,
    verify_data: bool = False,
    allowed: Allowed = Allowed(),
    observer: Observer = Observer(),
) -> Preparation:
    """Tokenise and pack the data of a recipe into the cache, or find them there. Needs no GPU.

    `show` decodes so many rows, `samples` so many examples of each training source. `download` fetches the model's weights too.
    `verify_data` hashes all data files instead of trusting sizes and times. A script needs `if __name__ == "__main__":` around the
    call, since tokenising spawns processes.
    Raises: FsdpTuneError, with file and line for what is wrong in the data.
    """
    with session(recipe):
        resolution = resolve_recipe(recipe, allowed, observer)
        check_cache(resolution.recipe)
        if download:
            _download(resolution.recipe, observer)
        encoder = load_encoder(resolution.recipe)
        observer.notices(encoder.notices)
        # The number of rows needed follows from the number of ranks, which is assumed if neither recipe nor machine gives it.
        is_assumed = any(notice.code == "assumed-devices" for notice in resolution.notices)
        with observer.progress("tokenising", None, "rows") as bar:
            data = prepare_data(resolution.recipe, encoder, progress=bar, check_rows=not is_assumed, verify=verify_data)
        observer.notices(data.as_notices())
        return Preparation(
            data,
            decoded_rows(data.train, encoder, show) if show else [],
            sample_sources(data.train, data.report.inputs, encoder, samples) if samples else [],
        )


def _download(recipe: Recipe, observer: Observer) -> None:
    name = recipe.model.name_or_path
    if name is None or Path(name).exists():
        observer.message("the model is local: there are no weights to download")
        return
    observer.message(f"the model is in {download_model(name, recipe.model.revision)}")
