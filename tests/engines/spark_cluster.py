"""A real Spark of two executors on this machine, each a Java process of its own, with two GPUs that nobody has."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# Addresses of GPUs that no machine has, so that the tests are the same everywhere.
GPUS = ("97", "98")
_DISCOVER = f"""#!/bin/sh
echo '{{"name": "gpu", "addresses": [{", ".join(f'"{address}"' for address in GPUS)}]}}'
"""
# Small and quick to start, instead of fast after hours.
_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"


def missing() -> str:
    """What this machine lacks for it, or ""."""
    if importlib.util.find_spec("pyspark") is None:
        return "needs Spark (pip install pyspark)"
    if shutil.which("java") is None:
        return "needs Java 17 or newer, which Spark runs on"
    return ""


def start(home: str) -> Any:
    """A session in this process; what it writes goes to `home`."""
    import pyspark

    root = os.path.dirname(pyspark.__file__)
    for name in ("jars", "bin", "python", "sbin"):
        if not os.path.lexists(f"{home}/{name}"):
            os.symlink(f"{root}/{name}", f"{home}/{name}")
    os.makedirs(f"{home}/events", exist_ok=True)
    discover = Path(home, "gpus.sh")
    discover.write_text(_DISCOVER)
    discover.chmod(0o755)
    own = {"SPARK_HOME": home, "SPARK_LOCAL_IP": "127.0.0.1", "AIRDIST_RUN_DIR": f"{home}/runs"}
    os.environ.update(own, PYSPARK_PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": f"file://{home}/events",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.executor.memory": "512m",
        "spark.driver.extraJavaOptions": _JAVA,
        "spark.executor.extraJavaOptions": _JAVA,
        "spark.worker.resource.gpu.amount": "2",
        "spark.worker.resource.gpu.discoveryScript": str(discover),
        "spark.executor.resource.gpu.amount": "2",
        "spark.task.cpus": "2",
        "spark.task.resource.gpu.amount": "2",
    }
    builder = pyspark.sql.SparkSession.builder.master("local-cluster[2,2,512]").appName("tests")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")  # of the Java of this process; executors write to `home`
    return session


class SparkCluster:
    """Started by construction, ended by `stop`, and by the end of this process."""

    def __init__(self) -> None:
        self.home = tempfile.TemporaryDirectory(prefix="spark-", ignore_cleanup_errors=True)
        before = dict(os.environ)
        try:
            self.session = start(self.home.name)
        finally:
            os.environ.clear()
            os.environ.update(before)
        self.context = self.session.sparkContext

    def active_tasks(self) -> int:
        """How many tasks run in the whole cluster."""
        tracker = self.context.statusTracker()
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        return sum(stage.numActiveTasks for stage in stages if stage is not None)

    def stop(self) -> None:
        import pyspark

        gateway = pyspark.SparkContext._gateway
        self.session.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()  # which ends it
        try:
            gateway.proc.wait(60)
        except subprocess.TimeoutExpired:
            gateway.proc.kill()
            gateway.proc.wait()
        pyspark.SparkContext._gateway = pyspark.SparkContext._jvm = None
        self.home.cleanup()
