"""Utilisation, memory and power of each rank's GPU in the MLflow run of the launch."""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections import defaultdict

import torch
import torch.distributed as dist

from gpu.machine import Setting, join, synchronize
from gpu.results import Result, publish

SECONDS = 8.0
_MEASURES = {
    "utilization_percentage": "utilisation, %",
    "memory_usage_megabytes": "memory, MB",
    "power_usage_watts": "power, W",
}


def measure(setting: Setting) -> None:
    """A launch that works its GPUs hard, and what MLflow then knows of it."""
    missing = [name for name in ("psutil", "pynvml") if importlib.util.find_spec(name) is None]
    result = Result("GPU metrics in the launch's MLflow run", ["GPU = local rank", *_MEASURES.values(), "samples"])
    env = {"MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "1", "MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING": "1"}
    setting.launcher(tracking=True, name="gpu-metrics", env=env)(work).distributed(setting.device)
    system, status = logged()
    for gpu in sorted({int(found[1]) for name in system if (found := re.search(r"gpu_(\d+)_", name))}):
        series = {
            shown: max(values)
            for measure, shown in _MEASURES.items()
            for name, values in system.items()
            if name.endswith(f"gpu_{gpu}_{measure}")
        }
        samples = max(len(values) for name, values in system.items() if f"gpu_{gpu}_" in name)
        result.rows.append([gpu, *(series.get(shown, "-") for shown in _MEASURES.values()), samples])
    result.checks.append((f"the run is {status}", status == "FINISHED"))
    if missing:
        result.notes.append(f"{', '.join(missing)} not installed: MLflow measures what the others give it")
    if setting.device == "cuda" and "pynvml" not in missing:
        whole = [row for row in result.rows if "-" not in row]
        result.checks.append((f"all three of {setting.ranks} GPUs are there", len(whole) >= setting.ranks))
        busy = sum(row[1] > 50 for row in whole)
        result.checks.append((f"{busy} GPUs were seen more than half busy", busy >= setting.ranks))
    elif setting.device == "cpu":
        result.notes.append(
            "no GPU is used; of the node there are " + (", ".join(sorted(system)) or "no system metrics")
        )
    result.notes.append("the largest value of each; one rank of a node measures all of its GPUs, in the driver's order")
    publish(setting.report, result)


def work(device_kind: str) -> None:
    """Multiply matrices for some seconds; rank 0 logs something, as training does."""
    import mlflow

    device = join(device_kind)
    if dist.get_rank() == 0:
        mlflow.log_metric("step", 0)
    size = 8192 if device.type == "cuda" else 128
    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    end = time.monotonic() + (SECONDS if device.type == "cuda" else 3)
    while time.monotonic() < end:
        for _ in range(10):
            matrix = torch.nn.functional.normalize(matrix @ matrix, dim=0)
        synchronize(device)
    dist.destroy_process_group()


def logged() -> tuple[dict[str, list[float]], str]:
    """Every system metric of the launch's run with all its values, and the run's status."""
    from mlflow import MlflowClient

    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = client.search_runs(experiments, "attributes.run_name = 'gpu-metrics'")
    found: dict[str, list[float]] = defaultdict(list)
    for name in run.data.metrics:
        if name.startswith("system/"):
            found[name] = [point.value for point in client.get_metric_history(run.info.run_id, name)]
    return dict(found), run.info.status
