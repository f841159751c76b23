"""What `test_warm.py` runs in a child: `python -m tests.warm_child ACTION`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    action = sys.argv[1]
    if action == "report":
        facts = {
            "arguments": sys.argv[1:],
            "folder": str(Path.cwd()),
            "variable": os.environ.get("OF_A_TEST"),
            "read": sys.stdin.read(),
        }
        print(
            json.dumps(
                facts
                | {"is_leader": os.getsid(0) == os.getpid(), "is_real": "transformers" not in sys.modules}
            )
        )
    elif action == "exit":
        sys.exit(int(sys.argv[2]))
    elif action == "raise":
        raise ValueError("no sooner said")
    elif action == "wait":
        print("waiting", flush=True)
        time.sleep(60)
    elif action == "leave":
        subprocess.Popen(
            [sys.executable, "-m", "tests.warm_child", "wait"],
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )


if __name__ == "__main__":
    main()
