"""Secrets are recognised by the name of a variable and by the shape of a value, and nothing else is hidden."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_tune.core.secrets import has_secret_name, has_secret_shape, is_secret, mask_text, masked

SHAPES = [
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    "sk-proj-abcdefghijklmnopqrstuvwx",
    "AKIAIOSFODNN7EXAMPLE",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "wandb_v1_abcdefghijklmnopqrstuvwx",
    "https://bucket.s3.amazonaws.com/x.jsonl?X-Amz-Expires=60&X-Amz-Signature=deadbeef",
    "postgres://user:pa55@host/db",
    "-----BEGIN OPENSSH PRIVATE KEY-----",
]


@pytest.mark.parametrize("value", SHAPES)
def test_value_with_the_shape_of_a_secret_is_recognised_in_any_text(value: str) -> None:
    assert has_secret_shape(f"--x={value} y")
    assert is_secret("HARMLESS", value)


@pytest.mark.parametrize("value", SHAPES)
def test_masked_text_does_not_contain_the_secret_any_more(value: str) -> None:
    assert not has_secret_shape(mask_text(f"x {value} y"))


@given(st.text(alphabet="abcdefghijKLMNOP0123456789", min_size=24, max_size=40))
def test_hub_tokens_are_masked_anywhere_in_text(tail: str) -> None:
    assert tail not in mask_text(f"--x=hf_{tail} y")


@pytest.mark.parametrize("name", ["SLURM_JWT", "DB_PASS", "PGPASSWORD", "SSH_PASSPHRASE", "SENTRY_DSN", "OPENAI_APIKEY", "MYSQL_PWD"])
def test_variable_with_the_name_of_a_secret_is_masked(name: str) -> None:
    assert masked(name, "x") == "***"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "x"),
        ("KEYBOARD", "x"),
        ("NCCL_DEBUG", "INFO"),
        ("MONKEY_PATCH", "x"),
        ("NCCL_IB_PKEY", "0"),
        ("PWD", "/home/me/BYPASS"),
        ("NCCL_IB_HCA", "mlx5_0:1,mlx5_1:1"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        ("HF_HOME", "/home/sk-user/hf_cache"),
    ],
)
def test_plain_setting_is_not_masked(name: str, value: str) -> None:
    assert masked(name, value) == value
    assert not is_secret(name, value)


def test_commit_hash_is_masked_only_as_variable_value() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert not has_secret_shape(commit)
    assert masked("ANYTHING", commit) == "***"
    assert not has_secret_name("ANYTHING")
