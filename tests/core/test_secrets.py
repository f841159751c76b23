"""Secrets are recognised by the name of a variable and by the shape of a value, and nothing else is
hidden."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_tune.core.secrets import SHAPES, has_secret_name, has_secret_shape, is_secret, mask_text, masked

HEX = "0123456789abcdef" * 10
MIXED = "aB3dE6gH9" * 30
UPPER = "ABCDEFGHIJ234567" * 5
# Prefix and body are apart, so that no scanner takes an example for a token.
EXAMPLES = {
    "Hugging Face": ["hf_" + MIXED[:34], "api_org_" + MIXED[:34]],
    "Weights & Biases": ["wandb_v1_" + MIXED[:40]],
    "Replicate": ["r8_" + MIXED[:37]],
    "OpenAI, Anthropic, OpenRouter, DeepSeek": [
        "sk-proj-" + MIXED[:24],
        "sk-ant-api03-" + MIXED[:93] + "AA",
        "sk-or-v1-" + HEX[:64],
        "sk-" + HEX[:32],
    ],
    "Groq": ["gsk_" + MIXED[:52]],
    "xAI": ["xai-" + MIXED[:80]],
    "Perplexity": ["pplx-" + MIXED[:48]],
    "Together": ["tgp_v1_" + MIXED[:43]],
    "Fireworks": ["fw_" + MIXED[:24]],
    "NVIDIA NGC": ["nvapi-" + MIXED[:64]],
    "Modal": ["ak-" + MIXED[:22], "as-" + MIXED[:22]],
    "RunPod": ["rpa_" + UPPER[:40]],
    "LangSmith": ["lsv2_pt_" + HEX[:32] + "_" + HEX[:10]],
    "Pinecone": ["pcsk_" + MIXED[:60]],
    "Databricks": ["dapi" + HEX[:32]],
    "Prefect": ["pnu_" + MIXED[:36]],
    "AWS": ["AKIA" + UPPER[:16], "ABSK" + MIXED[:120], "bedrock-api-key-" + MIXED[:60]],
    "Google": ["AIza" + MIXED[:35], "ya29." + MIXED[:100], "GOCSPX-" + MIXED[:28], "1//0" + MIXED[:60]],
    "Azure": [
        "abc8Q~" + MIXED[:34],
        "AccountKey=" + MIXED[:86] + "==",
        "SharedAccessKey=" + MIXED[:43] + "=",
    ],
    "Alibaba": ["LTAI" + MIXED[:20]],
    "Tencent": ["AKID" + MIXED[:32]],
    "Yandex": ["AQVN" + MIXED[:36]],
    "DigitalOcean": ["dop_v1_" + HEX[:64]],
    "Cloudflare": ["v1.0-" + HEX[:24] + "-" + HEX[:146]],
    "Fly": ["fo1_" + MIXED[:43], "fm2_" + MIXED[:120]],
    "Heroku": ["HRKU-AA" + MIXED[:58]],
    "GitHub": ["ghp_" + MIXED[:36], "ghs_" + MIXED[:36], "github_pat_" + MIXED[:82]],
    "GitLab": ["glpat-" + MIXED[:20], "gldt-" + MIXED[:20], "glcbt-64_" + MIXED[:20]],
    "Atlassian, Bitbucket": ["ATATT3xFfGF0" + MIXED[:60], "ATBB" + MIXED[:32]],
    "npm": ["npm_" + MIXED[:36]],
    "PyPI": ["pypi-AgEIcHlwaS5vcmc" + MIXED[:70]],
    "RubyGems": ["rubygems_" + HEX[:48]],
    "Clojars": ["CLOJARS_" + HEX[:60]],
    "Docker": ["dckr_pat_" + MIXED[:27]],
    "Artifactory": ["AKCp" + MIXED[:69], "cmVmd" + MIXED[:59]],
    "Slack": [
        "xoxb-" + "1234567890-" + MIXED[:24],
        "xapp-1-" + UPPER[:40],
        "https://hooks.slack.com/services/" + "T0/B0/" + MIXED[:30],
    ],
    "Discord": ["https://discord.com/api/webhooks/" + "123456/" + MIXED[:60]],
    "Microsoft Teams": ["https://x.webhook.office.com/webhookb2/" + HEX[:36] + "@" + HEX[:36]],
    "Telegram": ["123456789:AA" + MIXED[:33]],
    "Stripe": ["sk_live_" + MIXED[:24], "rk_test_" + MIXED[:24], "whsec_" + MIXED[:32]],
    "Square": ["sq0atp-" + MIXED[:22]],
    "Shopify": ["shpat_" + HEX[:32]],
    "Twilio, SendGrid": ["SK" + HEX[:32], "SG." + MIXED[:22] + "." + MIXED[:43]],
    "Mailgun, Mailchimp": ["key-" + HEX[:32], HEX[:32] + "-us12"],
    "Brevo": ["xkeysib-" + HEX[:64] + "-" + MIXED[:16]],
    "Facebook": ["EAAC" + MIXED[:120]],
    "HashiCorp": ["hvs." + MIXED[:95], MIXED[:14] + ".atlasv1." + MIXED[:67]],
    "Doppler": ["dp.pt." + MIXED[:43]],
    "1Password": [
        "ops_eyJ" + MIXED[:250],
        "A3-" + "-".join([UPPER[:6], UPPER[:11], UPPER[:5], UPPER[:5], UPPER[:5]]),
    ],
    "age": ["AGE-SECRET-KEY-1" + UPPER[:58]],
    "Pulumi": ["pul-" + HEX[:40]],
    "OpenShift": ["sha256~" + MIXED[:43]],
    "Grafana": ["glc_" + MIXED[:60], "glsa_" + MIXED[:32] + "_" + HEX[:8]],
    "Sentry": ["sntryu_" + HEX[:64]],
    "New Relic, Dynatrace": ["NRAK-" + UPPER[:27], "dt0c01." + UPPER[:24] + "." + UPPER[:64]],
    "Linear, Notion, Airtable, Figma": [
        "lin_api_" + MIXED[:40],
        "ntn_" + MIXED[:46],
        "pat" + MIXED[:14] + "." + HEX[:64],
        "figd_" + MIXED[:40],
    ],
    "Postman, Typeform, Readme": ["PMAK-" + HEX[:24] + "-" + HEX[:34], "tfp_" + MIXED[:59]],
    "PlanetScale, Supabase, ClickHouse": ["pscale_tkn_" + MIXED[:43], "sbp_" + HEX[:40], "4b1d" + MIXED[:38]],
    "Sourcegraph": ["sgp_" + HEX[:16] + "_" + HEX[:40]],
    "Adobe, Octopus, Infracost, Shippo, Duffel, EasyPost": [
        "p8e-" + HEX[:32],
        "API-" + UPPER[:26],
        "shippo_live_" + HEX[:40],
    ],
    "JSON Web Token": ["eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxMjM0NTY3ODkwIn0" + ".dozjgNryP4J3jVmNHl0w5N"],
    "private key": [f"-----BEGIN {kind}PRIVATE KEY-----" for kind in ("", "RSA ", "OPENSSH ", "ENCRYPTED ")]
    + ["-----BEGIN PGP PRIVATE KEY BLOCK-----"],
    "HTTP header": [
        "Bearer " + MIXED[:30],
        "Authorization: Basic dXNlcjpwYXNzd29yZA==",
        "authorization=Token 0123abcd",
    ],
}
URLS = [
    "https://bucket.s3.amazonaws.com/x.jsonl?X-Amz-Expires=60&X-Amz-Signature=hunter2",
    "https://b.s3.amazonaws.com/x?AWSAccessKeyId=hunter2&Expires=1&Signature=hunter2",
    "https://store.blob.core.windows.net/c/x?sv=2024&sig=hunter2",
    "https://host/x?page=1&access_key=hunter2",
    *(
        f"https://host/x?{name}=hunter2"
        for name in ("password", "access_token", "apiKey", "client_secret", "key", "auth", "passwd", "secret")
    ),
    "https://host/cb#access_token=hunter2",
    "postgres://user:hunter2@host/db",
    "postgres://user:p@hunter2@host/db",
    "postgres://user:p@ss/hunter2@host/db",
    "postgres://user:p/hunter2@host:5432/db",
    "redis://:hunter2/x@host:6379/0",
    "https://0123456789abcdef0123@o1.ingest.sentry.io/1",
]
SHAPES_IN_USE = [*(example for examples in EXAMPLES.values() for example in examples), *URLS]


def test_each_row_of_the_list_has_an_example() -> None:
    assert EXAMPLES.keys() == SHAPES.keys()
    for issuer, examples in EXAMPLES.items():
        for example in examples:
            assert re.search(SHAPES[issuer], example), (issuer, example)


@pytest.mark.parametrize("value", SHAPES_IN_USE)
def test_value_with_the_shape_of_a_secret_is_recognised_and_masked_in_any_text(value: str) -> None:
    assert has_secret_shape(f"--x={value} y")
    assert is_secret("HARMLESS", value)
    text = mask_text(f"x {value} y")
    assert not has_secret_shape(text)
    assert "hunter2" not in text
    assert (text[:2], text[-2:]) == ("x ", " y")


@pytest.mark.parametrize(
    "text",
    ["DB_PASS=hunter2", "--api-key=hunter2", "# export OPENAIKEY='hunter2 x'", "https://u:12/hunter2@host/x"],
)
def test_value_of_a_secret_name_in_text_is_masked(text: str) -> None:
    assert "hunter2" not in mask_text(text)


NAMES = [
    "password",
    "aws_secret_access_key",
    "HF_TOKEN",
    "db-passwd",
    "apiKey",
    "client_secret",
    "WANDB_API_KEY",
]
SYNTAXES = [
    *(
        "# {name}: {value}",
        "  - {name}: '{value}'",
        '{name}: "{value}"  # of the cluster',
        "{{{name}: {value}, b: 2}}",
    ),
    *(
        '{{"{name}": "{value}"}}',
        "{{'{name}': '{value}', 'b': 2}}",
        '"{name}":"{value}"',
        '{{"a": 1, "{name}" : "{value}"}}',
    ),
    *(
        "{name} = '{value}'",
        '{name} = "{value}"',
        "# {name} = {value}",
        "export {name}={value}",
        "--{name}={value}",
        "{name}='{value}'",
    ),
    *("https://host/x?a=1&{name}={value}", "https://{value}:{value}@host/x"),
]


@pytest.mark.parametrize("syntax", SYNTAXES)
@pytest.mark.parametrize("name", NAMES)
def test_value_of_a_secret_name_is_masked_in_every_syntax(name: str, syntax: str) -> None:
    text = syntax.format(name=name, value="hunter-correct2horse")
    masked_text = mask_text(text)
    assert "hunter" not in masked_text
    assert "horse" not in masked_text
    assert mask_text(masked_text) == masked_text


def test_a_token_without_a_word_more_is_masked_and_a_sentence_about_tokens_is_not() -> None:
    assert mask_text('{"token": "hunter"}') == '{"token": "***"}'
    assert mask_text("token: hunter2hunter2") == "token: ***"
    for text in (
        "the keys: names of columns",
        "tokens: 4,096",
        "supervised_tokens: 81920",
        "pad_token: <|pad|>",
        "eos_token: endoftext",
    ):
        assert mask_text(text) == text


@pytest.mark.parametrize("pattern", ["configs/*.yaml", "docs/**/*.md", "fsdp_tune/recipe/**/*.yaml"])
def test_recipes_and_pages_of_this_repository_are_kept(pattern: str, repository: Path) -> None:
    for path in repository.glob(pattern):
        text = path.read_text(encoding="utf-8")
        changed = [
            (was, now)
            for was, now in zip(text.splitlines(), mask_text(text).splitlines(), strict=False)
            if was != now
        ]
        assert [pair for pair in changed if path.suffix != ".md" or not SAYS_SO.search(pair[0])] == [], path


SAYS_SO = re.compile(r"token|secret|passw|key", re.IGNORECASE)
"""Pages have examples of secrets."""


@pytest.mark.parametrize(
    "text",
    [
        *(
            "hf://datasets/org/name@main/x.jsonl",
            "http://localhost:8000/x.jsonl",
            "https://host/x?page=2&split=train",
            "git@github.com:a/b",
        ),
        *(
            "model.tokens.pad=<|pad|>",
            "training.max_steps=10",
            "/data/sk-learn-experiments-of-2024/x",
            "EleutherAI/pythia-70m",
            "MAX_TOKENS=4096",
        ),
        *("a basic authorization of the bearer of news", "s3://bucket/key?versionId=3", "sha256:" + HEX[:64]),
    ],
)
def test_plain_text_is_kept(text: str) -> None:
    assert mask_text(text) == text
    assert not has_secret_shape(text)


@given(st.text(alphabet="abcdefghijKLMNOP0123456789", min_size=24, max_size=40))
def test_hub_tokens_are_masked_anywhere_in_text(tail: str) -> None:
    assert tail not in mask_text(f"--x=hf_{tail} y")


@pytest.mark.parametrize(
    "name",
    [
        *(
            "SLURM_JWT",
            "DB_PASS",
            "PGPASSWORD",
            "SSH_PASSPHRASE",
            "SENTRY_DSN",
            "OPENAI_APIKEY",
            "MYSQL_PWD",
            "DBPASS",
            "OPENAIKEY",
        ),
        *(
            "AUTHORIZATION",
            "S3_CREDS",
            "SLACK_WEBHOOK",
            "SLACK_WEBHOOK_URL",
            "DBPWD",
            "GITHUB_PAT",
            "API_KEY_2",
            "APIKEY1",
            "AZURE_STORAGE_CONNECTION_STRING",
        ),
        *(
            "HTTP_AUTH",
            "NETRC",
            "HF_OAUTH",
            "GCP_CREDENTIALS_JSON",
            "KEY",
            "deployKey",
            "X-API-Key",
            "HASH_SALT",
            "SAS",
        ),
    ],
)
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
        *(
            (name, "x")
            for name in (
                "GIT_AUTHOR_NAME",
                "XAUTHORITY",
                "PATTERN",
                "BYPASS",
                "COMPASS",
                "SACRED_X",
                "OMP_PLACES",
                "UCX_IB_PKEY",
            )
        ),
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
