from __future__ import annotations

import pytest

from fsdp_tune.core.units import ScalarError, parse_plain


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-5", 2e-5),
        ("2.0e-5", 2e-5),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-3", -3),
        ("+3", 3),
        ("0", 0),
        ("0x1F", 31),
        ("0o17", 15),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("Yes", "Yes"),
        ("on", "on"),
        ("2024-01-01", "2024-01-01"),
        ("11:30", "11:30"),
        ("0123", "0123"),
        ("1_000", "1_000"),
        ("5GB", "5GB"),
        ("1e", "1e"),
        ("=", "="),
    ],
)
def test_plain_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    got, _ = parse_plain(text)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("0123", "write 123"),
        ("-007", "write -7"),
        ("1_000", "write 1000"),
        ("no", "write false"),
        ("ON", "write true"),
        ("1_0.5", "write 10.5"),
    ],
)
def test_scalars_that_yaml_versions_read_differently_are_flagged(text: str, remedy: str) -> None:
    assert remedy in str(parse_plain(text)[1])


@pytest.mark.parametrize("text", [".nan", ".inf", "-.INF", "1e400", "1" * 19, "9" * 5000, "1e-400"])
def test_numbers_that_no_key_can_hold_are_refused(text: str) -> None:
    with pytest.raises(ScalarError):
        parse_plain(text)
