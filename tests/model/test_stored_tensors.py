from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.loading.stored_tensors import read_objects


@pytest.mark.parametrize(
    ("text", "words"), [('{"quantization": ', "is not valid JSON: "), ("[1]", "is not a JSON object")]
)
def test_damaged_json_file_of_a_model_is_named(text: str, words: str, tmp_path: Path) -> None:
    name = "hf_quant_config.json"
    read = read_objects(lambda file: path if (path := tmp_path / file).is_file() else None)
    assert read(name) is None
    (tmp_path / name).write_text(text)
    with pytest.raises(FsdpTuneError, match=f"`{name}` {words}") as caught:
        read(name)
    (problem,) = caught.value.problems
    assert (problem.code, problem.where.source) == ("model-weights-damaged", str(tmp_path / name))
