"""A real Ray of two nodes on this machine, on ports and in a directory of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# In a process of its own, since the tests' is to be a caller that has nothing to do with Ray. It answers each line with
# what is free in the cluster and which placement groups there are.
PROGRAM = """
import json, sys
import ray
from ray.cluster_utils import Cluster

node = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False, "temp_dir": sys.argv[1]})
cluster.add_node(**node)
ray.init(address=cluster.address, logging_level="ERROR")
print(cluster.address, flush=True)
for _ in sys.stdin:
    groups = [group["name"] for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
    print(json.dumps({"cpus": ray.available_resources().get("CPU", 0), "groups": groups}), flush=True)
ray.shutdown()
cluster.shutdown()
"""
# Workers that nobody has asked for cost a small machine more than they save.
QUIET = {"RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0", "RAY_AUTH_MODE": "disabled"}


def missing() -> str:
    """What this machine lacks for it, or ""."""
    return "" if importlib.util.find_spec("ray") else "needs Ray (pip install 'airdata[ray]')"


class RayCluster:
    """Started by construction, ended by `stop`, and by the end of this process."""

    CPUS = 4

    def __init__(self, folder: Path) -> None:
        self.sessions = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)  # a short name
        self.environ = dict(QUIET)
        with (folder / "cluster.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, self.sessions.name],
                env={**os.environ, **self.environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.address = self.process.stdout.readline().strip()
        assert self.address, (folder / "cluster.log").read_text()
        self.environ["RAY_ADDRESS"] = self.address

    def state(self) -> dict[str, Any]:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def wait_until_free(self, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while (state := self.state()) != {"cpus": self.CPUS, "groups": []}:
            assert time.monotonic() < deadline, f"left in the cluster after {seconds} s: {state}"
            time.sleep(0.1)

    def stop(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.sessions.cleanup()
