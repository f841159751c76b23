"""Recognise secrets by the name of a variable and by the shape of a value, so that they are not written to files or the screen."""

from __future__ import annotations

import re

MASK = "***"
_NAME = re.compile(
    r"TOKEN(?!IZERS)|SECRET|PASSW|PASSPHRASE|(^|_)PASS($|_)|_PWD($|_)|CREDENTIAL|COOKIE|JWT|BEARER|CONNECTION_STRING"
    r"|(^|_)DSN($|_)|(^|_)AUTH($|_)|(^|_)(API_?|ACCESS_?|PRIVATE_?|SIGNING_?|ENCRYPTION_?)?KEYS?($|_)",
    re.IGNORECASE,
)
_TOKEN = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?"  # JSON Web Token
    r"|\bsk-[A-Za-z0-9_-]{20,}"  # OpenAI, Anthropic
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"  # AWS
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}|\bglpat-[A-Za-z0-9_-]{20,}"  # GitHub, GitLab
    r"|\bwandb_v1_[A-Za-z0-9_]{20,}|\bxox[abposr]-[A-Za-z0-9-]{10,}|\bAIza[A-Za-z0-9_-]{35}"  # W&B, Slack, Google
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_PASSWORD_IN_URL = re.compile(r"://[^/@\s:]*:[^/@\s]+@")
_IN_QUERY = re.compile(
    r"([?&](?:X-Amz-Signature|X-Amz-Security-Token|X-Goog-Signature|sig|signature|[a-z_]*token|api_?key)=)(?!\*)[^&\s\"']+", re.I
)
_WANDB_KEY = re.compile(r"[0-9a-f]{40}")
"""W&B's older keys; in a recipe the same shape is a git commit, so that it counts only as the full value of a variable."""


def has_secret_name(name: str) -> bool:
    """Return whether a variable of this name holds a secret, regardless of its value."""
    return _NAME.search(name) is not None and name not in {"PWD", "OLDPWD"}


def has_secret_shape(text: str) -> bool:
    """Return whether `text` contains a token, a private key, or a URL with a password or a signature."""
    return any(pattern.search(text) for pattern in (_TOKEN, _PASSWORD_IN_URL, _IN_QUERY))


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable is secret, by its name or by the shape of its value."""
    return has_secret_name(name) or has_secret_shape(value) or _WANDB_KEY.fullmatch(value.strip()) is not None


def mask_text(text: str) -> str:
    """Return `text` with user names and passwords of URLs, signatures and tokens replaced."""
    return _TOKEN.sub(MASK, _IN_QUERY.sub(rf"\1{MASK}", _IN_URL.sub(MASK, text)))


def masked(name: str, value: str) -> str:
    """Return the value of a variable with secrets replaced, for files and the screen."""
    return MASK if has_secret_name(name) or _WANDB_KEY.fullmatch(value.strip()) else mask_text(value)
