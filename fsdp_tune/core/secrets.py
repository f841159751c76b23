"""Recognise secrets by the name of a variable and by the shape of a value, so that they are not written to
files or the screen.

No list is complete. So the values of inherited variables are shown only if their names are known
(`launch/command/inherited.py`), and files that may contain a secret are readable by their owner only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

MASK = "***"
_NAME = re.compile(
    r"(?<!MAX_)(?<!MIN_)(?<!NUM_)TOKEN(?!IZER)|SECRET|(?<!SA)CRED(?:S|ENTIALS?)?(?:$|_)|CREDENTIAL|COOKIE|JWT|BEARER|WEBHOOK|SIGNATURE"
    r"|PASSW|PASSPHRASE|PASSCODE|(?<!BY)(?<!COM)(?<!SUR)PASS(?:$|_)|PWD(?:$|_)|AUTHORI[SZ]ATION|CONN(?:ECTION)?_?STR"
    r"|(?:^|_|O|BASIC|HTTP)AUTH(?:$|_)|(?:^|_)(?:DSN|SAS|PAT|OTP|TOTP|SALT|NETRC|SIG)(?:$|_)|(?:ACCESS|PRIVATE|SIGNING|API)_?KEY"
    r"|(?<!MON)(?<!DON)(?<!TUR)(?<!HOC)(?<!JOC)(?<!IB_P)(?<!HOT)KEYS?[0-9]*(?:$|_)",
    re.IGNORECASE,
)
_NOT_SECRET = frozenset({"PWD", "OLDPWD"})

# One row for each issuer: the prefix that it gives its tokens and the characters that follow. The issuers are
# those whose tokens have a prefix in the rules of gitleaks (config/gitleaks.toml), and those of machine
# learning services. Tokens without a prefix are recognised by the name of their variable only.
SHAPES: dict[str, str] = {
    "Hugging Face": r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}",
    "Weights & Biases": r"\bwandb_v1_[A-Za-z0-9_]{20,}",
    "Replicate": r"\br8_[A-Za-z0-9]{30,}",
    "OpenAI, Anthropic, OpenRouter, DeepSeek": r"\bsk-(?=[\w-]*[A-Za-z0-9]{16})[\w-]{20,}|[\w-]{20}T3BlbkFJ[\w-]{20}",  # noqa: E501
    "Groq": r"\bgsk_[A-Za-z0-9]{40,}",
    "xAI": r"\bxai-[A-Za-z0-9]{40,}",
    "Perplexity": r"\bpplx-[A-Za-z0-9]{40,}",
    "Together": r"\btgp_v1_[\w-]{30,}",
    "Fireworks": r"\bfw_[A-Za-z0-9]{20,}",
    "NVIDIA NGC": r"\bnvapi-[\w-]{40,}",
    "Modal": r"\ba[ks]-[A-Za-z0-9]{22}\b",
    "RunPod": r"\brpa_[A-Z0-9]{30,}",
    "LangSmith": r"\blsv2_(?:pt|sk)_[0-9a-f]{32}_[0-9a-f]{10}",
    "Pinecone": r"\bpcsk_[A-Za-z0-9_]{40,}",
    "Databricks": r"\bdapi[0-9a-f]{32}",
    "Prefect": r"\bpn[ub]_[A-Za-z0-9]{36}",
    "AWS": r"\b(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b|\bABSK[A-Za-z0-9+/]{60,}={0,2}|\bbedrock-api-key-[\w+/=-]{20,}",  # noqa: E501
    "Google": r"\bAIza[\w-]{35}|\bya29\.[\w.-]{20,}|\bGOCSPX-[\w-]{20,}|\b1//0[\w-]{30,}",
    "Azure": r"(?<![\w~.])[\w~.]{3}\dQ~[\w~.-]{31,34}|\bAccountKey=[A-Za-z0-9+/]{40,}={0,2}|\bSharedAccessKey=[A-Za-z0-9+/=]{20,}",  # noqa: E501
    "Alibaba": r"\bLTAI[A-Za-z0-9]{12,24}\b",
    "Tencent": r"\bAKID[A-Za-z0-9]{32}\b",
    "Yandex": r"\bAQVN[\w-]{35,38}|\bt1\.[A-Za-z0-9_-]+={0,2}\.[A-Za-z0-9_-]{86}={0,2}",
    "DigitalOcean": r"\bdo[opr]_v1_[0-9a-f]{64}",
    "Cloudflare": r"\bv1\.0-[0-9a-f]{24}-[0-9a-f]{146}",
    "Fly": r"\bfo1_[\w-]{43}|\bfm(?:1[ar]|2)_[A-Za-z0-9+/]{60,}",
    "Heroku": r"\bHRKU-[\w-]{30,}",
    "GitHub": r"\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}",
    "GitLab": r"\bgl(?:pat|dt|rt|ptt|ft|imt|agent|oas|soat|ffct|cbt|rtr)-[\w.-]{20,}|\bGR1348941[\w-]{20}",
    "Atlassian, Bitbucket": r"\bAT(?:ATT|CTT|BB)[A-Za-z0-9][\w=-]{20,}",
    "npm": r"\bnpm_[A-Za-z0-9]{30,}",
    "PyPI": r"\bpypi-[\w-]{50,}",
    "RubyGems": r"\brubygems_[0-9a-f]{40,}",
    "Clojars": r"\bCLOJARS_[a-z0-9]{60}",
    "Docker": r"\bdckr_(?:pat|oat)_[\w-]{20,}",
    "Artifactory": r"\bAKCp[A-Za-z0-9]{60,}|\bcmVmd[A-Za-z0-9]{59}\b",
    "Slack": r"\bxox[a-z](?:\.xox[a-z])?-[A-Za-z0-9-]{10,}|\bxapp-\d-[A-Za-z0-9-]{20,}"
    r"|hooks\.slack\.com/(?:services|workflows|triggers)/[\w+/]{20,}",
    "Discord": r"discord(?:app)?\.com/api/(?:v\d+/)?webhooks/\d+/[\w-]{20,}",
    "Microsoft Teams": r"\.webhook\.office\.com/webhookb2/[\w@/-]{40,}",
    "Telegram": r"\b\d{6,12}:AA[\w-]{30,}",
    "Stripe": r"\b[sr]k_(?:live|test|prod)_[A-Za-z0-9]{10,}|\bwhsec_[A-Za-z0-9+/=]{20,}",
    "Square": r"\bsq0[a-z]{3}-[\w-]{20,}|\bEAAA[\w-]{40,}",
    "Shopify": r"\bshp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}",
    "Twilio, SendGrid": r"\bSK[0-9a-f]{32}\b|\bSG\.[\w-]{16,}\.[\w-]{16,}",
    "Mailgun, Mailchimp": r"\bkey-[0-9a-f]{32}\b|\b[0-9a-f]{32}-us\d{1,2}\b",
    "Brevo": r"\bxkeysib-[0-9a-f]{64}-[A-Za-z0-9]{16}",
    "Facebook": r"\bEAA[A-Z][A-Za-z0-9]{80,}",
    "HashiCorp": r"\bhv[sbr]\.[\w-]{20,}|\b[A-Za-z0-9]{14}\.atlasv1\.[\w=-]{60,}",
    "Doppler": r"\bdp\.(?:pt|st|ct|sa|scim|audit)\.[\w.-]{20,}",
    "1Password": r"\bops_eyJ[A-Za-z0-9+/]{40,}|\bA3-[A-Z0-9]{6}-(?:[A-Z0-9]{11}|[A-Z0-9]{6}-[A-Z0-9]{5})(?:-[A-Z0-9]{5}){3}\b",  # noqa: E501
    "age": r"\bAGE-SECRET-KEY-1[A-Z0-9]{58}",
    "Pulumi": r"\bpul-[0-9a-f]{40}",
    "OpenShift": r"\bsha256~[\w-]{43}",
    "Grafana": r"\bglc_[A-Za-z0-9+/]{30,}|\bglsa_[A-Za-z0-9]{32}_[0-9A-Fa-f]{8}",
    "Sentry": r"\bsntrys_[\w+/=]{40,}|\bsntryu_[0-9a-f]{64}",
    "New Relic, Dynatrace": r"\bNR(?:AK|II|JS|RA)-[A-Za-z0-9-]{19,}|\bdt0[a-z]\d{2}\.[A-Za-z0-9]{24}\.[A-Za-z0-9]{64}",  # noqa: E501
    "Linear, Notion, Airtable, Figma": r"\blin_(?:api|oauth)_[A-Za-z0-9]{40,}|\bntn_[A-Za-z0-9]{40,}|\bpat[A-Za-z0-9]{14}\.[0-9a-f]{64}"  # noqa: E501
    r"|\bfigd_[\w-]{30,}",
    "Postman, Typeform, Readme": r"\bPMAK-[0-9a-f]{24}-[0-9a-f]{34}|\btfp_[\w.=-]{40,}|\brdme_[a-z0-9]{70}",
    "PlanetScale, Supabase, ClickHouse": r"\bpscale_(?:tkn|oauth|pw)_[\w=.-]{32,}|\bsb(?:p|_secret)_[\w-]{20,}|\b4b1d[A-Za-z0-9]{38}\b",  # noqa: E501
    "Sourcegraph": r"\bsgp_(?:(?:[0-9a-fA-F]{16}|local)_)?[0-9a-fA-F]{40}",
    "Adobe, Octopus, Infracost, Shippo, "
    "Duffel, EasyPost": r"\bp8e-[A-Za-z0-9]{32}|\bAPI-[A-Z0-9]{26}\b|\bico-[A-Za-z0-9]{32}"
    r"|\bshippo_(?:live|test)_[0-9a-fA-F]{40}|\bduffel_(?:test|live)_[\w=-]{43}|\bEZ[AT]K[A-Za-z0-9]{54}\b",
    "JSON Web Token": r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?",
    "private key": r"-----BEGIN[ A-Z0-9_-]{0,100}PRIVATE KEY(?: BLOCK)?-----(?:[\s\S]{0,8000}?-----END[ "
    r"A-Z0-9_-]{0,100}-----)?",
    "HTTP header": r"(?i:\bBearer\s+(?=\S*\d|\S{20})[\w.~+/=-]{8,}|\bAuthorization\s*[:=]\s*(?:Basic|Token|Digest)\s+[^\s\"']{4,})",  # noqa: E501
}
_TOKEN = re.compile("|".join(SHAPES.values()))

_USER = r"(?<=://)"
_USER_IN_URL = re.compile(
    rf"{_USER}[^/:@\s\"'<>`]{{0,256}}:[^\s\"'<>`]{{0,256}}(?=@)|{_USER}[^/\s\"'<>`]{{1,256}}(?=@)"
)
"""Everything before the last @ of the URL after a colon, or of the host: passwords may contain `@` and
`/`."""
_PASSWORD_IN_URL = re.compile(
    # user:password@, but not host:port/…@…
    r"://[^/@\s:\"'<>`]{0,256}:(?!\d{1,5}(?:[/?#]|$))[^\s\"'<>`]{1,256}@"
    r"|https?://[A-Za-z0-9_-]{16,}@"  # a token in place of a user name
)
_PARAMETER = re.compile(r"([?&;#]([\w.~-]+)=)(?!\*)([^&;#\s\"'<>`]+)")
_PARAMETER_NAMES = frozenset(
    {
        "sig",
        "signature",
        "key",
        "code",
        "password",
        "pw",
        "auth",
        "session",
        "sessionid",
        "sid",
        "awsaccesskeyid",
    }
)
"""Names in the query of a URL that grant access, next to those that `has_secret_name` recognises."""
_ASSIGNMENT = re.compile(
    r"(?<![\w.?&;#/-])(-{0,2}([A-Za-z_][\w-]*)=)(?!\*)([^\s\"'`]{4,}|\"[^\"\n]{4,}\"|'[^'\n]{4,}')"
)
"""`NAME=value` of a shell and `--name=value`. A dotted name is a key of a recipe, such as
`model.tokens.pad`."""
_DECLARATION = re.compile(
    r"((?:^[ \t>*-]*|[#{\[(,;][ \t]*|(?=[\"']))([\"']?)([A-Za-z_][\w-]*)\2(?::[ \t]+|:(?=[\"'])|[ "
    r"\t]+[=:][ \t]*)(?!\*))"
    r"(\"[^\"\n]{4,}\"|'[^'\n]{4,}'|[^\s\"'`,{}\[\]<>|&*!%@#][^\s,}\]]{3,})",
    re.MULTILINE,
)
"""`name: value` of YAML, `"name": "value"` of JSON and Python, `name = value` of TOML and INI; not in the
middle of a sentence."""
_PLAIN_NAMES = frozenset({"token", "tokens", "key", "keys"})
"""Words of any sentence: what follows one is a secret if it is in quotes or has a digit."""
_NUMBER = re.compile(r"[\d.,_:%-]+[.)]?")
_WANDB_KEY = re.compile(r"[0-9a-f]{40}")
"""W&B's older keys; in a recipe the same shape is a git commit, so that it counts only as the full value of a
variable."""


def has_secret_name(name: str) -> bool:
    """Return whether a variable of this name holds a secret, regardless of its value."""
    return name not in _NOT_SECRET and _NAME.search(name.replace("-", "_")) is not None


def has_secret_shape(text: str) -> bool:
    """Return whether `text` contains a token, a private key, or a URL with a password, an access key or a
    signature."""
    if _TOKEN.search(text) or _PASSWORD_IN_URL.search(text):
        return True
    return "://" in text and any(_grants_access(match[2]) for match in _PARAMETER.finditer(text))


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable is secret, by its name or by the shape of its value."""
    return has_secret_name(name) or has_secret_shape(value) or _WANDB_KEY.fullmatch(value.strip()) is not None


def mask_text(text: str) -> str:
    """Return `text` with user names and passwords of URLs, access keys, signatures, tokens and values of
    secret names replaced."""
    text = _PARAMETER.sub(
        lambda match: match[1] + MASK if _grants_access(match[2]) else match[0], _USER_IN_URL.sub(MASK, text)
    )
    text = _ASSIGNMENT.sub(
        lambda match: match[1] + MASK if has_secret_name(match[2]) else match[0], _TOKEN.sub(MASK, text)
    )
    return _DECLARATION.sub(_masked_declaration, text)


def _masked_declaration(match: re.Match[str]) -> str:
    head, name, value = match[1], match[3], match[4]
    if not has_secret_name(name) or _SPECIAL_TOKEN.search(name) or _NUMBER.fullmatch(value):
        return match[0]
    quote = value[0] if value[0] in "\"'" else ""
    if name.lower() in _PLAIN_NAMES and not quote and not any(map(str.isdigit, value)):
        return match[0]
    return f"{head}{quote}{MASK}{quote}"


def masked(name: str, value: str) -> str:
    """Return the value of a variable with secrets replaced, for files and the screen."""
    return MASK if has_secret_name(name) or _WANDB_KEY.fullmatch(value.strip()) else mask_text(value)


_SPECIAL_TOKEN = re.compile(
    r"(?:^|_)(?:bos|eos|pad|unk|cls|sep|mask|eot|eom|sot|image|special|new)_tokens?$", re.IGNORECASE
)
"""Names of tokens of a vocabulary."""


def mask_values(value: object, name: str = "") -> object:
    """Return a tree of mappings and lists with the texts in it that are secrets, by their key or their shape,
    replaced.

    `name`: the key of `value`. What a key of a secret's name holds is replaced in whole, and numbers of a
    password's name too.
    """
    if isinstance(value, Mapping):
        return {
            key: mask_values(inner, str(key)) for key, inner in cast("Mapping[object, object]", value).items()
        }
    if isinstance(value, list):
        return [mask_values(inner, name) for inner in cast("list[object]", value)]
    name = "" if _SPECIAL_TOKEN.search(name) else name
    if isinstance(value, int | float) and not isinstance(value, bool):
        return MASK if has_secret_name(name) and "token" not in name.lower() else value
    if not isinstance(value, str) or not value:
        return value
    return MASK if has_secret_name(name) else mask_text(value)


def _grants_access(parameter: str) -> bool:
    return parameter.lower() in _PARAMETER_NAMES or has_secret_name(parameter)
