"""Errors of libraries that only a text distinguishes."""

from __future__ import annotations

import pytest

from fsdp_tune.core.errors import FsdpTuneError, usage_error
from fsdp_tune.core.library_errors import as_os_error, rust_errors_as_os_errors


def test_error_that_quotes_an_io_error_keeps_its_place_and_hint(tmp_path) -> None:
    error = usage_error(
        "extension-failed",
        "the loader `rows` failed: No space left on device (os error 28)",
        hint="free space",
    )
    assert as_os_error(error) is error
    with pytest.raises(FsdpTuneError) as caught, rust_errors_as_os_errors(tmp_path):
        raise error
    assert caught.value is error
