"""A stand-in for torchrun's agent, without importing torch:
`fake_agent.py WORLD_SIZE [--early DIRECTORY] RUN_DIR`.

Starts ranks in sessions of their own, ends the others with SIGTERM when one fails and waits for them, passes
signals on and then waits, reports the first failure in torch's words. tests/launch/test_accelerate_real.py
runs the same through the real one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")


class SignalError(Exception):
    pass


def on_signal(number: int, _: object) -> None:
    raise SignalError(number)


def stop(ranks: list[subprocess.Popen[bytes]], number: int) -> None:
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, number)
    for rank in ranks:
        rank.wait()


def main() -> int:
    world_size, words = int(sys.argv[1]), sys.argv[2:]
    for name in SIGNALS:
        signal.signal(getattr(signal, name), on_signal)
    command = [sys.executable, "-m", "tests.launch.fake_worker", *words]
    ranks = [
        subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}, start_new_session=True)
        for rank in range(world_size)
    ]
    try:
        while True:
            time.sleep(0.02)
            codes = [rank.poll() for rank in ranks]
            if all(code == 0 for code in codes):
                return 0
            failed = [index for index, code in enumerate(codes) if code]
            if failed:
                stop(ranks, signal.SIGTERM)
                first = failed[0]
                print(
                    f"failed (exitcode: {ranks[first].returncode}) local_rank: {first} (pid: "
                    f"{ranks[first].pid}) of binary: python",
                    file=sys.stderr,
                )
                return 1
    except SignalError as error:
        stop(ranks, error.args[0])
        return 1


if __name__ == "__main__":
    sys.exit(main())
