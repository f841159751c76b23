"""Files for Kubernetes, SkyPilot and dstack: they hold to the published models of the APIs, and say what the
recipe needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from fsdp_tune.cluster.submit.cluster_job import Lead
from fsdp_tune.cluster.submit.container_engines import (
    RECIPE_DIRECTORY,
    CloudSettings,
    Kind,
    PodSettings,
    manifest,
    task,
)
from fsdp_tune.cluster.submit.container_job import (
    LONGEST_NAME,
    ContainerJob,
    SecretReference,
    as_yaml,
    container_job,
    is_subdomain,
    job_name,
    notices_of,
    parse_mount,
    parse_secret,
    parse_variable,
)
from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.core.units import GIB
from fsdp_tune.recipe.read.loader import LoadedRecipe, parse_recipe

RECIPE = """\
model: {name_or_path: Qwen/Qwen3-8B}
data:
  train: [{path: /runs/data/train.jsonl}]
training: {global_batch_size: 128, per_device_train_batch_size: 2, save_steps: 500}
launch: {num_machines: 2, num_processes: 16}
output_dir: /runs/{name}
"""
POD = PodSettings(
    "registry/fsdp-tune@sha256:0a",
    secrets=(SecretReference("HF_TOKEN", "hub", "token"),),
    resources={"nvidia.com/gpu": "8"},
)
KINDS: tuple[Kind, ...] = ("job", "jobset", "trainjob")
MOUNTS = (parse_mount("runs:/runs", "--pvc"),)


def published(kind: str) -> type[BaseModel]:
    """The class that the API of a kind of document publishes. Imported here, since that takes 1.3 s and each
    process collects this file."""
    from kubeflow_trainer_api import models

    names = {
        "ConfigMap": "IoK8sApiCoreV1ConfigMap",
        "Service": "IoK8sApiCoreV1Service",
        "Job": "IoK8sApiBatchV1Job",
        "JobSet": "JobsetV1alpha2JobSet",
        "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
        "TrainJob": "TrainerV1alpha1TrainJob",
    }
    found: type[BaseModel] = getattr(models, names[kind])
    return found


def loaded(*overrides: str, text: str = RECIPE, name: str = "my_recipe") -> LoadedRecipe:
    return parse_recipe(text, Path(f"{name}.yaml"), overrides)


def made(*overrides: str, text: str = RECIPE, **keys: Any) -> ContainerJob:
    return container_job(
        loaded(*overrides, text=text), MOUNTS, RECIPE_DIRECTORY, Lead(900, "measured"), **keys
    )


def documents(job: ContainerJob, kind: Kind, pod: PodSettings = POD) -> dict[str, dict[str, Any]]:
    text = manifest(job, pod, kind)
    assert "&id" not in text  # an anchor, which people would not expect
    found = {each["kind"]: each for each in yaml.safe_load_all(text)}
    for name, document in found.items():
        refuse_unknown_fields(published(name), document)
    return found


def refuse_unknown_fields(model: type[BaseModel], document: dict[str, Any]) -> None:
    assert list(violations(model, document, model.__name__)) == []


def violations(kind: Any, value: Any, at: str) -> Iterator[str]:
    """Yield what the generated models would ignore or fill in themselves: unknown fields, missing ones, and
    scalars of another type."""
    inner = [each for each in get_args(kind) if each is not type(None)]
    if get_origin(kind) in (Union, Annotated):
        yield from violations(inner[0], value, at)
    elif get_origin(kind) is list:
        assert isinstance(value, list)
        for index, each in enumerate(value):
            yield from violations(inner[0], each, f"{at}[{index}]")
    elif get_origin(kind) is dict:
        assert isinstance(value, dict)
        for key, each in value.items():
            yield from violations(inner[1], each, f"{at}.{key}")
    elif isinstance(kind, type) and issubclass(kind, BaseModel) and "one_of_schemas" not in kind.model_fields:
        fields = {field.alias or name: field for name, field in kind.model_fields.items()}
        yield from (f"{at}.{key} is unknown" for key in value if key not in fields)
        yield from (
            f"{at}.{key} is missing"
            for key, field in fields.items()
            if field.is_required() and key not in value
        )
        for key in value.keys() & fields.keys():
            yield from violations(fields[key].annotation, value[key], f"{at}.{key}")
    elif isinstance(kind, type) and issubclass(kind, BaseModel):  # a quantity, or a number or a name
        assert isinstance(value, str | int), at
    elif not isinstance(value, kind):
        yield f"{at} is {value!r}"


def job_spec(found: dict[str, dict[str, Any]], kind: Kind) -> dict[str, Any]:
    if kind == "job":
        return found["Job"]["spec"]
    jobset = (
        found["JobSet"]["spec"] if kind == "jobset" else found["TrainingRuntime"]["spec"]["template"]["spec"]
    )
    return jobset["replicatedJobs"][0]["template"]["spec"]


def pod_spec(found: dict[str, dict[str, Any]], kind: Kind) -> dict[str, Any]:
    return job_spec(found, kind)["template"]["spec"]


def container(kind: Kind, *overrides: str) -> dict[str, Any]:
    return pod_spec(documents(made(*overrides), kind), kind)["containers"][0]


def refusal(call: Callable[..., object], *arguments: str) -> list[Problem]:
    with pytest.raises(FsdpTuneError) as caught:
        call(*arguments)
    return list(caught.value.problems)


def codes(problems: Iterable[Problem]) -> list[str]:
    return [problem.code for problem in problems]


DOCUMENTS = {
    "job": ["ConfigMap", "Service", "Job"],
    "jobset": ["ConfigMap", "JobSet"],
    "trainjob": ["ConfigMap", "TrainingRuntime", "TrainJob"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_manifest_has_fields_of_the_api_alone_and_survives_yaml(kind: Kind) -> None:
    found = documents(made(), kind)
    assert list(found) == DOCUMENTS[kind]
    assert found["ConfigMap"]["data"] == {"recipe.yaml": RECIPE}
    secret = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    assert pod_spec(found, kind)["containers"][0]["env"][-1] == secret, "a reference"


def test_field_that_the_api_does_not_have_is_found() -> None:
    found = documents(made(), "job")
    found["Job"]["spec"]["template"]["spec"]["terminationGracePeriod"] = 600
    assert list(violations(published("Job"), found["Job"], "")) == [
        ".spec.template.spec.terminationGracePeriod is unknown"
    ]
    found["Job"]["spec"]["backoffLimit"] = "3"
    del found["Job"]["spec"]["template"]
    found["Service"]["spec"]["ports"][0].pop("port")
    assert sorted(violations(published("Job"), found["Job"], "")) == [
        ".spec.backoffLimit is '3'",
        ".spec.template is missing",
    ]
    assert list(violations(published("Service"), found["Service"], "")) == [".spec.ports[0].port is missing"]


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_labels_of_dns(kind: Kind) -> None:
    name = "Über_long.name-" * 6
    found = documents(made(name=name), kind)
    names = [each["metadata"]["name"] for each in found.values()]
    assert all(is_subdomain(each) and "." not in each and len(each) <= 63 for each in names)
    assert max(len(f"{names[-1]}-node-0-99999-abcde"), 0) <= 63


@pytest.mark.parametrize(
    ("name", "label"),
    [("my_run", "my-run"), ("3B", "run-3b"), ("__", "run"), ("a" * LONGEST_NAME, "a" * LONGEST_NAME)],
)
def test_job_name_begins_with_a_letter(name: str, label: str) -> None:
    assert job_name(name) == label


def test_long_job_names_stay_different() -> None:
    one, two = job_name("a" * 60 + "1"), job_name("a" * 60 + "2")
    assert one != two
    assert len(one) == len(two) == LONGEST_NAME


@pytest.mark.parametrize(
    ("kind", "first"), [("job", "my-recipe-0.my-recipe"), ("jobset", "my-recipe-node-0-0.my-recipe")]
)
def test_machines_find_the_first_one_by_its_name_in_the_headless_service(kind: Kind, first: str) -> None:
    found = documents(made(), kind)
    container = pod_spec(found, kind)["containers"][0]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["MASTER_ADDR"] == first
    assert variables["NCCL_SOCKET_IFNAME"] == variables["GLOO_SOCKET_IFNAME"] == "eth0"
    assert '--machine-rank "$$JOB_COMPLETION_INDEX"' in container["command"][-1]
    if kind == "job":
        assert pod_spec(found, kind)["subdomain"] == found["Service"]["metadata"]["name"] == "my-recipe"
        assert found["Service"]["spec"]["clusterIP"] == "None"
        assert found["Service"]["spec"]["selector"] == {
            "batch.kubernetes.io/job-name": found["Job"]["metadata"]["name"]
        }
    else:
        assert found["JobSet"]["spec"]["network"]["subdomain"] == "my-recipe"


def test_one_machine_needs_no_network() -> None:
    found = documents(made("launch.num_machines=1", "launch.num_processes=8"), "job")
    container = pod_spec(found, "job")["containers"][0]
    assert list(found) == ["ConfigMap", "Job"]
    assert "--machine-rank" not in container["command"][-1]
    assert {each["name"] for each in container["env"]} == {"HF_HOME", "XDG_CACHE_HOME", "HF_TOKEN"}


def test_interface_of_the_recipe_is_kept() -> None:
    names = [each["name"] for each in container("job", "launch.env={NCCL_SOCKET_IFNAME: ib0}")["env"]]
    assert "NCCL_SOCKET_IFNAME" not in names
    assert "GLOO_SOCKET_IFNAME" in names


def actions(spec: dict[str, Any]) -> list[tuple[str, list[int] | str]]:
    rules = spec["podFailurePolicy"]["rules"]
    return [
        (
            each["action"],
            each["onExitCodes"]["values"] if "onExitCodes" in each else each["onPodConditions"][0]["type"],
        )
        for each in rules
    ]


def test_job_never_restarts_a_mistake_and_always_a_preemption() -> None:
    spec = documents(made(), "job")["Job"]["spec"]
    assert actions(spec) == [
        ("Ignore", "DisruptionTarget"),
        ("FailJob", [2, 3, 4, 126, 127]),
        ("Ignore", [143]),
    ]
    assert spec["backoffLimit"] == 3 * 2  # all machines of a lost run fail
    assert "backoffLimitPerIndex" not in spec
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_jobset_restarts_all_machines_together(kind: Kind) -> None:
    found = documents(made(), kind, replace(POD, restarts=5))
    spec = job_spec(found, kind)
    jobset = (
        found["JobSet"]["spec"] if kind == "jobset" else found["TrainingRuntime"]["spec"]["template"]["spec"]
    )
    assert spec["backoffLimit"] == 0
    assert actions(spec) == [
        ("FailJob", "DisruptionTarget"),
        ("FailJob", [143]),
        ("FailJob", [2, 3, 4, 126, 127]),
    ]
    assert jobset["failurePolicy"]["maxRestarts"] == 5
    assert jobset["failurePolicy"]["restartStrategy"] == "BlockingRecreate"


# What Kubernetes writes into the condition of the failed Job (pkg/controller/job/pod_failure_policy.go).
FAILURES = [
    (
        "Pod ns/p-0-x has condition DisruptionTarget matching FailJob rule at index 0",
        "RestartJobSetAndIgnoreMaxRestarts",
    ),
    (
        "Container node for pod ns/p-0-x failed with exit code 143 matching FailJob rule at index 1",
        "RestartJobSetAndIgnoreMaxRestarts",
    ),
    (
        "Container node for pod ns/p-0-x failed with exit code 2 matching FailJob rule at index 2",
        "FailJobSet",
    ),
    (
        "Container node for pod ns/p-0-x failed with exit code 4 matching FailJob rule at index 2",
        "FailJobSet",
    ),
]


@pytest.mark.parametrize(("message", "action"), FAILURES)
def test_jobset_tells_preemptions_from_mistakes_by_the_message_of_the_job(message: str, action: str) -> None:
    rules = documents(made(), "jobset")["JobSet"]["spec"]["failurePolicy"]["rules"]
    first = next(
        each
        for each in rules
        if any(re.search(it, message) for it in each.get("onJobFailureMessagePatterns", [""]))
    )
    assert first["action"] == action
    # a Job whose pod failed otherwise has BackoffLimitExceeded, and is restarted
    assert first["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", first["name"])  # JobSet's webhook


def test_trainjob_reports_progress_where_the_controller_collects_it() -> None:
    found = documents(made("training.report_to=[wandb]"), "trainjob")
    command = pod_spec(found, "trainjob")["containers"][0]["command"][-1]
    assert command.endswith('${KUBEFLOW_TRAINER_SERVER_URL:+--set "training.report_to=[wandb,kubeflow]"}')
    runtime = found["TrainingRuntime"]
    assert found["TrainJob"]["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    assert pod_spec(found, "trainjob")["containers"][0]["name"] == "node"


@pytest.mark.parametrize("kind", KINDS)
def test_pods_have_no_privileges_and_room_to_save(kind: Kind) -> None:
    spec = pod_spec(documents(made(), kind, replace(POD, user=2000)), kind)
    container = spec["containers"][0]
    assert spec["terminationGracePeriodSeconds"] == 900
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == 2000
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["requests"] == container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    shared = next(each for each in spec["volumes"] if each["name"] == "shared-memory")
    assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "4Gi"}


@pytest.mark.parametrize(("workers", "rows", "gib"), [(0, 2, 4), (8, 512, 8)])
def test_shared_memory_has_room_for_nccl_and_batches(workers: int, rows: int, gib: int) -> None:
    more = (
        f"training.dataloader_num_workers={workers}",
        f"training.per_device_train_batch_size={rows}",
        "data.max_length=2048",
    )
    # 8 ranks × (512 MiB + 8 processes × 2 batches × 512 rows × 2,048 tokens × 32 bytes = 512 MiB)
    assert made(*more, "training.global_batch_size=8192").shared_memory_bytes == gib * GIB


def test_recipe_is_named_by_its_content() -> None:
    one = documents(made(), "job")
    two = documents(made(text=f"{RECIPE}# changed\n"), "job")
    assert one["ConfigMap"]["metadata"]["name"] != two["ConfigMap"]["metadata"]["name"]
    assert one["Job"]["metadata"]["name"] == two["Job"]["metadata"]["name"]
    digest = one["Job"]["metadata"]["annotations"]["fsdp-tune-recipe-sha256"]
    assert one["ConfigMap"]["metadata"]["name"].endswith(digest[:8])


def test_dollar_of_an_override_reaches_the_shell() -> None:
    assert "A_PATH: $$(HOME)" in container("job", "launch.env={A_PATH: $(HOME)}")["command"][-1]


NO_TEXT_IN_YAML_1_2 = re.compile(
    r"null|Null|NULL|~|true|True|TRUE|false|False|FALSE|[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"
    r"|[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?(\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN"
    r"|[yYnN]|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF"  # of YAML 1.1, and kept by the parser of Kubernetes
)
"""Plain scalars of the core schema (YAML 1.2.2, 10.3.2) that are not strings."""


@pytest.mark.parametrize(
    "text",
    [
        "1e3",
        "1e-5",
        "1E400",
        "12e03",
        "y",
        "N",
        "0o17",
        "on",
        "null",
        ".5",
        "+1",
        "-1e3",
        "1_000",
        "1:30",
        "2x",
        "T",
    ],
)
def test_text_is_text_for_every_parser(text: str) -> None:
    """PyYAML reads YAML 1.1 and leaves `1e3` plain, a number for the parsers of the engines."""
    written = as_yaml({"value": text})
    assert yaml.safe_load(written) == {"value": text}
    assert not NO_TEXT_IN_YAML_1_2.fullmatch(written.removeprefix("value: ").strip())


@pytest.mark.parametrize(
    "text", ["0x1F", "0X1F", "-0x1F", "0o17", "0O17", "-0o17", "+0o7", "0b11", "0B11", "-0B1_1"]
)
def test_integer_of_another_base_in_go_is_quoted(text: str) -> None:
    """The parsers of the engines read it by Go's `ParseInt(text, 0, 64)`, which takes a sign and prefixes of
    either case."""
    assert as_yaml({"value": text}) == f"value: '{text}'\n"


def test_run_directory_must_be_on_a_volume() -> None:
    (problem,) = refusal(made, "output_dir=runs/{name}")
    assert problem.code == "not-on-a-volume"
    assert "every restart would begin without checkpoints" in problem.message
    assert problem.hint == "`--set output_dir='/runs/runs/{name}'`"


@pytest.mark.parametrize("path", ["/runs/../tmp/x", "/runs2/x", "/tmp/x"])
def test_run_directory_outside_a_volume_is_refused(path: str) -> None:
    assert codes(refusal(made, f"output_dir={path}")) == ["not-on-a-volume"]


def test_every_path_of_this_machine_is_reported_at_once() -> None:
    paths = (
        "model.name_or_path=./base",
        "data.train=[{path: rows.jsonl}]",
        "data.chat_template=mine.jinja",
        "data.cache_dir=/tmp/cache",
        "evaluation.sets=[{path: held.jsonl}]",
    )
    problems = refusal(made, *paths, "launch.main_process_ip=10.0.0.1", "output_dir=here")
    assert codes(problems) == [
        "not-on-a-volume",
        *["path-not-in-container"] * 4,
        "not-on-a-volume",
        "address-of-engine",
    ]


def test_path_in_the_image_is_a_notice() -> None:
    recipe = loaded("model.name_or_path=/models/base")
    assert [(each.code, each.where.key) for each in notices_of(recipe, MOUNTS)] == [
        ("not-on-a-volume", "model.name_or_path")
    ]


def test_secret_in_a_comment_does_not_travel() -> None:
    recipe = loaded(text=f"{RECIPE}# hf_{'x1' * 12}\n")
    assert made(text=recipe.text).recipe_text == f"{RECIPE}# ***\n"
    assert [each.code for each in notices_of(recipe, MOUNTS)] == ["secret-not-written"]


def test_unknown_number_of_gpus_is_refused() -> None:
    assert codes(refusal(made, "launch.num_processes=auto")) == ["submit-size"]


@pytest.mark.parametrize("text", ["runs", "runs:here", "runs:/", "runs:/a/../b", "Runs_1:/runs", ":/runs"])
def test_wrong_volume_is_refused(text: str) -> None:
    assert codes(refusal(parse_mount, text, "--pvc")) == ["usage"]


@pytest.mark.parametrize(
    "text", ["HUB_TOKEN", f"HF_TOKEN=hf_{'x1' * 12}", "1X=hub", "HF_TOKEN=hub:a b", "HF_TOKEN=r8-" + "S" * 20]
)
def test_value_in_the_place_of_a_secret_is_refused_and_not_repeated(text: str) -> None:
    (problem,) = refusal(parse_secret, text)
    assert text not in str(problem.as_dict())


def test_secret_has_the_key_of_its_variable() -> None:
    assert parse_secret("HF_TOKEN=hub") == SecretReference("HF_TOKEN", "hub", "HF_TOKEN")
    assert parse_secret("HF_TOKEN=hub:token") == SecretReference("HF_TOKEN", "hub", "token")
    assert parse_variable("HF_TOKEN") == SecretReference("HF_TOKEN", "HF_TOKEN", "HF_TOKEN")


CLOUD = CloudSettings("registry/fsdp-tune:1", "H100", spot=True, secrets=(parse_variable("HF_TOKEN"),))


def test_skypilot_task() -> None:
    found = yaml.safe_load(task(made(), CLOUD, "skypilot"))
    assert found["num_nodes"] == 2
    assert found["resources"]["accelerators"] == "H100:8"
    assert found["resources"]["job_recovery"] == {"max_restarts_on_errors": 0, "recover_on_exit_codes": [143]}
    assert found["volumes"] == {"/runs": "runs"}
    assert found["secrets"] == {"HF_TOKEN": None}
    assert '--machine-rank "$SKYPILOT_NODE_RANK"' in found["run"]


def test_dstack_task() -> None:
    found = yaml.safe_load(task(made(), CLOUD, "dstack"))
    assert (found["nodes"], found["resources"]) == (2, {"shm_size": "4GB", "gpu": "H100:8"})
    assert found["env"][-1] == "HF_TOKEN=${{ secrets.HF_TOKEN }}"
    assert found["volumes"] == ["runs:/runs"]
    assert found["retry"]["on_events"] == ["interruption", "no-capacity"]
    assert '--machine-rank "$DSTACK_NODE_RANK"' in found["commands"][0]
