"""`submit kubernetes|skypilot|dstack`: what a user sees, and the commands of the files, run as the engines
would run them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from fsdp_tune.cli.app import app
from fsdp_tune.cluster.submit import container_engines
from fsdp_tune.core.errors import ExitCode
from fsdp_tune.jobs import submit_containers as jobs
from fsdp_tune.run.directory import RunDir, latest_checkpoint
from fsdp_tune.run.metrics_file import read_metrics
from tests.cli.conftest import refuse_undeclared
from tests.recipe.loading import MINIMAL

IMAGE = "registry/fsdp-tune@sha256:0a"
SECRET = f"hf_{'x1' * 12}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(
        f"{MINIMAL}launch: {{num_machines: 2, num_processes: 16}}\n", encoding="utf-8"
    )
    return tmp_path


def submit(*arguments: str) -> Result:
    done = CliRunner().invoke(app, ["submit", *arguments])
    if "--json" in arguments:
        refuse_undeclared(["submit", *arguments], done.stdout)
    return done


def kubernetes_file(*arguments: str) -> Result:
    words = ["--image", IMAGE, "--pvc", "runs:/runs", "--set", "output_dir=/runs/{name}", "--grace", "15m"]
    return submit("kubernetes", "my.yaml", *words, *arguments)


def errors(done: Result) -> list[str]:
    assert done.exit_code == ExitCode.USAGE
    return [each["code"] for each in json.loads(done.stdout)["errors"]]


def test_manifest_is_printed_alone_on_stdout(folder: Path) -> None:
    done = kubernetes_file()
    assert done.exit_code == 0
    assert [each["kind"] for each in yaml.safe_load_all(done.stdout)] == ["ConfigMap", "Service", "Job"]
    assert "Time to save: 900 s (`--grace`)." in done.stdout
    assert list(folder.iterdir()) == [folder / "my.yaml"]


def test_file_is_written_once_and_the_command_to_submit_it_is_told(folder: Path) -> None:
    done = kubernetes_file(
        "--output", "my.job.yaml", "--kind", "jobset", "--namespace", "team", "--queue", "gpus"
    )
    assert done.stdout == "wrote my.job.yaml; submit it with `kubectl apply -f my.job.yaml`\n"
    jobset = list(yaml.safe_load_all((folder / "my.job.yaml").read_text(encoding="utf-8")))[1]
    assert jobset["metadata"]["namespace"] == "team"
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert errors(kubernetes_file("--output", "my.job.yaml", "--json")) == ["output-exists"]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("engine", ["kubernetes", "skypilot", "dstack"])
def test_json_has_the_file_and_the_commands(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "checkpoint_bytes", lambda _: 90e9)  # which a trace takes seconds to find
    words = ["--set", "output_dir=/runs/{name}", "--json"]
    more = (
        ["--volume", "runs:/runs", "--gpu", "H100"]
        if engine != "kubernetes"
        else ["--pvc", "runs:/runs", "--image", IMAGE]
    )
    done = submit(engine, "my.yaml", *words, *more)
    answer = json.loads(done.stdout)
    assert (answer["engine"], answer["name"], answer["output"]) == (engine, "my", None)
    assert answer["recipe_sha256"] in answer["manifest"]
    lead = {
        "kubernetes": "terminationGracePeriodSeconds: 1800",
        "dstack": "stop_duration: 1800s",
        "skypilot": "",
    }[engine]
    assert lead in answer["manifest"]
    assert all(command.split()[0] in ("kubectl", "sky", "dstack") for command in answer["commands"])
    assert all(f"#   {command}" in answer["manifest"] for command in answer["commands"])


@pytest.mark.usefixtures("folder")
def test_resources_are_limits_and_requests() -> None:
    words = (
        "--memory",
        "200GiB",
        "--cpus-per-node",
        "32",
        "--gpu-resource",
        "amd.com/gpu",
        "--resource",
        "rdma/hca=1",
        "--shared-memory",
        "16GB",
    )
    job = list(yaml.safe_load_all(kubernetes_file(*words, "--gpus-per-node", "4", "--nodes", "3").stdout))[-1]
    spec = job["spec"]["template"]["spec"]
    wanted = {"cpu": "32", "memory": str(200 * 2**30), "amd.com/gpu": "4", "rdma/hca": "1"}
    assert spec["containers"][0]["resources"] == {"requests": wanted, "limits": wanted}
    assert spec["volumes"][1]["emptyDir"]["sizeLimit"] == "15Gi"
    assert job["spec"]["completions"] == 3
    assert "--set launch.num_machines=3 --set launch.num_processes=12" in spec["containers"][0]["command"][-1]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--memory", "4GiB"), "usage"),
        (("--resource", "rdma/hca"), "usage"),
        (("--namespace", "My_Team"), "usage"),
        (("--grace", "15"), "usage"),
        (("--secret", "A=x", "--secret", "A=y"), "usage"),
        (("--secret", f"HF_TOKEN={SECRET}"), "usage"),
        (("--set", f"launch.env.MY_SETTING={SECRET}"), "secret-in-recipe"),
        (("--set", "launch.num_processes=auto"), "submit-size"),
        (("--set", "model.trust_remote_code=true"), "remote-code-not-trusted"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_wrong_input_is_refused_before_the_trace_and_secrets_are_not_repeated(
    arguments: Sequence[str], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[object] = []
    monkeypatch.setattr(jobs, "_lead", lambda *inputs: traced.append(inputs))
    done = kubernetes_file(*arguments, "--json")
    assert errors(done) == [code]
    assert SECRET not in done.output
    assert not traced


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("engine", "hint"),
    [("kubernetes", "`--image IMAGE`"), ("skypilot", "`--gpu H100`"), ("dstack", "`--gpu H100`")],
)
def test_everything_that_is_missing_is_named_at_once(engine: str, hint: str) -> None:
    done = submit(engine, "my.yaml", "--set", "data.train=[{path: here.jsonl}]", "--json")
    assert errors(done) == ["usage", "not-on-a-volume", "path-not-in-container"]
    image, volume, _ = (each["hint"] for each in json.loads(done.stdout)["errors"])
    assert image == hint
    own, other = ("--pvc", "--volume") if engine == "kubernetes" else ("--volume", "--pvc")
    assert own in volume
    assert other not in volume


def test_print_writes_no_file(folder: Path) -> None:
    assert kubernetes_file("--print").stdout == kubernetes_file().stdout != ""
    assert errors(kubernetes_file("--print", "--output", "my.job.yaml", "--json")) == ["usage"]
    assert list(folder.iterdir()) == [folder / "my.yaml"]


@pytest.mark.usefixtures("folder")
def test_tag_of_an_image_is_a_notice() -> None:
    done = submit("kubernetes", "my.yaml", "--image", "registry/fsdp-tune:1", "--pvc", "runs:/", "--json")
    assert errors(done) == ["usage"]
    done = submit(
        "skypilot",
        "my.yaml",
        "--image",
        "r/f:1",
        "--gpu",
        "H100",
        "--volume",
        "r:/runs",
        "--set",
        "output_dir=/runs/x",
        "--json",
    )
    assert [each["code"] for each in json.loads(done.stdout)["notices"]] == ["image-not-pinned"]


class Pods:
    """The containers of a file, as processes of this machine: directories are replaced, and the variables of
    the engine are set."""

    def __init__(self, folder: Path) -> None:
        self.volume, self.directory = folder / "volume", folder / "recipe"
        self.volume.mkdir()
        self.directory.mkdir()
        self.run = RunDir(self.volume / "gpt2_smoke")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def render(self, *words: str, steps: int = 4) -> str:
        small = {
            "training.max_steps": steps,
            "training.save_steps": 2,
            "training.logging_steps": 1,
            "launch.main_process_port": self.port,
        }
        settings = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
        done = submit(*words, "gpt2_smoke", "--set", "output_dir=/runs/{name}", *settings)
        assert done.exit_code == 0, done.output
        return done.stdout

    def start(self, script: str, variables: dict[str, str], directory: str) -> subprocess.Popen[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "JOB_"))}
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        here = {name: value.replace("/runs", str(self.volume)) for name, value in variables.items()}
        script = script.replace(directory, str(self.directory)).replace("=/runs/", f"={self.volume}/")
        return subprocess.Popen(
            ["sh", "-c", script], env=env | here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def of_kubernetes(self, text: str, **more: str) -> list[subprocess.Popen[str]]:
        found = {each["kind"]: each for each in yaml.safe_load_all(text)}
        spec = next(each for each in specs(found) if "completions" in each)
        for name, content in found["ConfigMap"]["data"].items():
            (self.directory / name).write_text(content, encoding="utf-8")
        container = spec["template"]["spec"]["containers"][0]
        variables = {each["name"]: each["value"] for each in container["env"]}
        # no DNS of a cluster here, and no network of a pod
        variables |= {
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        script = container["command"][-1].replace("$$", "$")  # as the kubelet does
        return [
            self.start(
                script,
                variables | more | {"JOB_COMPLETION_INDEX": str(index)},
                container_engines.RECIPE_DIRECTORY,
            )
            for index in range(spec["completions"])
        ]


def specs(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
        for each in node.values():
            yield from specs(each)
    elif isinstance(node, list):
        for each in node:
            yield from specs(each)


@pytest.fixture
def pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pods:
    monkeypatch.chdir(tmp_path)
    return Pods(tmp_path)


def exit_codes(processes: Sequence[subprocess.Popen[str]]) -> list[int]:
    try:
        outputs = [each.communicate(timeout=280)[0] for each in processes]
    finally:
        for each in processes:
            each.kill()
    print(*outputs, sep="\n")
    return [each.returncode for each in processes]


class Controller:
    """The status server of Kubeflow Trainer, as far as transformers' callback needs it."""

    def __init__(self, folder: Path) -> None:
        self.statuses: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()
        controller = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                controller.tokens.add(self.headers["Authorization"])
                controller.statuses.append(json.loads(body)["trainerStatus"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        (folder / "token").write_text("word")
        url = f"http://127.0.0.1:{self._server.server_port}/apis/status"
        self.variables = {
            container_engines.STATUS_VARIABLE: url,
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(folder / "token"),
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    made = Controller(tmp_path)
    yield made
    made.close()


TWO_PODS = ("--image", IMAGE, "--pvc", "runs:/runs", "--nodes", "2", "--gpus-per-node", "1", "--grace", "10m")


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.ranks
def test_pods_of_a_trainjob_train_and_report_their_progress(pods: Pods, controller: Controller) -> None:
    text = pods.render("kubernetes", "--kind", "trainjob", *TWO_PODS)
    assert exit_codes(pods.of_kubernetes(text, **controller.variables)) == [0, 0]
    assert (pods.run.path / "merged" / "config.json").is_file()
    assert controller.tokens == {"Bearer word"}
    assert [controller.statuses[0]["progressPercentage"], controller.statuses[-1]["progressPercentage"]] == [
        0,
        100,
    ]
    assert {"name": "total_steps", "value": "4"} in controller.statuses[0]["metrics"]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_preempted_pod_ends_all_with_143_and_all_continue(pods: Pods, kind: str) -> None:
    text = pods.render("kubernetes", "--kind", kind, *TWO_PODS, steps=4000)
    first = pods.of_kubernetes(text)
    deadline = time.monotonic() + 200
    while (
        not any(line.get("step", 0) >= 3 for line in read_metrics(pods.run)) and time.monotonic() < deadline
    ):
        time.sleep(0.2)
    first[1].send_signal(signal.SIGTERM)  # as the kubelet does, to the pod that is preempted
    assert exit_codes(first) == [143, 143]  # which the file restarts without counting
    saved, _ = latest_checkpoint(pods.run)
    assert saved is not None
    assert saved.step >= 3
    again = pods.of_kubernetes(
        text.replace("training.max_steps=4000", f"training.max_steps={saved.step + 2}")
    )
    assert exit_codes(again) == [0, 0]
    assert [line["step"] for line in read_metrics(pods.run) if "loss" in line] == list(
        range(1, saved.step + 3)
    )


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.ranks
@pytest.mark.parametrize("engine", ["skypilot", "dstack"])
def test_script_of_a_cloud_trains(pods: Pods, engine: str) -> None:
    task = yaml.safe_load(
        pods.render(engine, "--volume", "runs:/runs", "--nodes", "2", "--gpus-per-node", "1")
    )
    if engine == "skypilot":
        script, variables = task["run"], task["envs"] | {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}
    else:
        script, variables = (
            task["commands"][0],
            dict(each.split("=", 1) for each in task["env"]) | {"DSTACK_MASTER_NODE_IP": "127.0.0.1"},
        )
    rank = {"skypilot": "SKYPILOT_NODE_RANK", "dstack": "DSTACK_NODE_RANK"}[engine]
    processes = [
        pods.start(script, variables | {rank: str(index)}, container_engines.TASK_RECIPE_DIRECTORY)
        for index in range(2)
    ]
    assert exit_codes(processes) == [0, 0]
    assert (pods.run.path / "merged" / "config.json").is_file()
