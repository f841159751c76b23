"""A rank without torch that follows the script in RUN/fake.json. Started as `python -m tests.launch.fake_worker RUN_DIR`.

After `--early DIRECTORY` it first waits for the run directory. It knows the file names of `RunDir`, whose import is slow.
A part is a list of acts: ["beat", phase, step], ["stacks"], ["wait"], ["log", {...}], ["sleep", seconds],
["ignore-signals"], ["wait-for-signal"], ["die", signal], ["once", mark, *act] (not in a later launch),
["raise", text], ["exit", code], ["spawn"], ["rename-run", path], ["outcome", {...}], ["garble-outcome"], ["save", step],
["signalled"] (wait for a signal and go on). A signal that is waited for by "wait-for-signal" ends with a save
(0.2 s) and the outcome "preempted" or "interrupted", as a real rank does.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fsdp_tune.core.parent_death import die_with_launcher


class Rank:
    def __init__(self, run: Path) -> None:
        self.run = run
        self.rank = int(os.environ["RANK"])
        self.step = 0
        self.received: list[int] = []

    def log_file(self, suffix: str) -> Path:
        return self.run / "logs" / f"rank-{self.rank:04d}.{suffix}"

    def beat(self, phase: str, step: int) -> None:
        self.step = step
        content = {"rank": self.rank, "pid": os.getpid(), "step": step, "phase": phase, "time": time.time()}
        content |= {"progressed_at": time.monotonic(), "silent_seconds": 0.0}
        self.write(self.log_file("heartbeat.json"), content)

    def dump_stacks_on_request(self) -> None:
        log = os.open(self.log_file("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        faulthandler.register(signal.SIGUSR2, file=log, all_threads=True)

    def wait_for_others(self) -> None:
        """Wait in a frame that looks like a collective, by its file name."""
        source = "import time\ndef all_reduce():\n    time.sleep(60)\nall_reduce()\n"
        exec(compile(source, "/site-packages/torch/distributed/distributed_c10d.py", "exec"), {})

    def outcome(self, exit_code: int, exit_reason: str, problem: dict[str, Any] | None = None, **facts: Any) -> None:
        content = {
            "rank": self.rank,
            "exit_code": exit_code,
            "exit_reason": exit_reason,
            "step": self.step,
            "time": time.time(),
            "problem": problem,
        }
        self.write(self.log_file("outcome.json"), content | facts)

    def write(self, path: Path, content: dict[str, Any]) -> None:
        stage = path.with_suffix(".tmp")
        stage.write_text(json.dumps(content))
        os.replace(stage, path)

    def log(self, line: dict[str, Any]) -> None:
        with open(self.run / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, lambda received, _: self.received.append(received))

    def save_and_stop(self) -> None:
        self.beat("saving", self.step)
        time.sleep(0.2)
        interrupted = signal.SIGINT in self.received
        self.outcome(130 if interrupted else 143, "interrupted" if interrupted else "preempted")
        sys.exit(130 if interrupted else 143)

    def act(self, name: str, *arguments: Any) -> None:
        if name == "beat":
            self.beat(*arguments)
        elif name == "log":
            self.log(arguments[0])
        elif name == "sleep":
            time.sleep(arguments[0])
        elif name == "once":
            mark = self.run / arguments[0]
            if not mark.exists():
                mark.touch()
                self.act(*arguments[1:])
        elif name == "rename-run":
            self.run.rename(arguments[0])
        elif name == "garble-outcome":
            self.log_file("outcome.json").write_bytes(b"\x00\xff garbage")
        elif name == "save":
            folder = self.run / f"checkpoint-{arguments[0]}"
            folder.mkdir(exist_ok=True)
            (folder / "manifest.json").touch()
        elif name == "signalled":
            self.listen()
            while not self.received:
                time.sleep(0.02)
        elif name == "stacks":
            self.dump_stacks_on_request()
        elif name == "wait":
            self.wait_for_others()
        elif name == "listen":
            self.listen()
        elif name == "wait-for-signal":
            self.listen()
            while not self.received:
                time.sleep(0.02)
            self.save_and_stop()
        elif name == "ignore-signals":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
        elif name == "die":
            os.kill(os.getpid(), arguments[0])
            time.sleep(60)
        elif name == "raise":
            raise RuntimeError(arguments[0])
        elif name == "exit":
            sys.exit(arguments[0])
        elif name == "spawn":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        elif name == "outcome":
            self.outcome(**arguments[0])
        elif name == "environment":
            (self.run / f"environment-{self.rank}.json").write_text(json.dumps(dict(os.environ)))
        else:
            raise AssertionError(name)


def main() -> None:
    die_with_launcher()
    *early, folder = sys.argv[1:]
    while early and not (Path(early[1]) / "opened").exists():
        time.sleep(0.02)
    rank = Rank(Path(folder))
    parts = json.loads((rank.run / "fake.json").read_text())
    for name, *arguments in parts[str(rank.rank)]:
        rank.act(name, *arguments)


if __name__ == "__main__":
    main()
