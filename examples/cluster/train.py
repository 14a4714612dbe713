"""A small training that runs anywhere: on this machine, and on nodes by Slurm, torchrun, a JobSet.

python train.py                     every accelerator of this machine (or two CPU processes)
sbatch slurm.sbatch                 a script in an allocation, which starts its own nodes
python train.py --submit gpu        from a login node: the job is submitted to the partition "gpu"
torchrun --nproc-per-node 2 train.py
kubectl apply -f jobset.yaml
"""

from __future__ import annotations

import argparse
import os

from airdist import distributed, runtime


@distributed(timeout=3600, tracking="MLFLOW_TRACKING_URI" in os.environ)
def train(steps: int) -> float:
    """Fit a line by gradient descent, on every rank with its own data; returns the loss."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    cuda = torch.cuda.is_available()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", runtime.get_local_rank()) if cuda else torch.device("cpu")
    torch.manual_seed(runtime.get_global_rank())
    model = DistributedDataParallel(torch.nn.Linear(8, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        inputs = torch.randn(64, 8, device=device)
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 and runtime.get_global_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    print(
        f"rank {runtime.get_global_rank()} of {runtime.get_world_size()} on node {runtime.get_node_rank()}", flush=True
    )
    return loss.item()


def main() -> None:
    """Choose where to run, and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--processes", type=int, help="processes on each node; by default one for each accelerator")
    parser.add_argument("--engine", help="local, slurm, ray, spark")
    parser.add_argument("--submit", metavar="PARTITION", help="have Slurm run it in this partition")
    args = parser.parse_args()
    changes = {"nodes": args.nodes, "num_accelerators": args.processes, "engine": args.engine}
    if args.submit:
        changes |= {
            "engine": "slurm",
            "engine_options": {"partition": args.submit, "time": "0:30:00"},
            "max_restarts": 3,
        }
    losses = train.with_overrides(**changes).distributed(args.steps)
    if runtime.get_global_rank() == 0:
        print("losses:", [round(loss, 4) for loss in losses])


if __name__ == "__main__":
    main()
