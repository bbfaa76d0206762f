"""Ray Train as a launcher: the workers that Ray places are the ranks of `pipedejavu train`."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

WORKERS = 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def work(config: dict[str, list[str]]) -> None:
    """Starts one rank where Ray has placed this worker; the first says where all meet."""
    context = get_context()
    place = (ray.util.get_node_ip_address(), free_port()) if context.get_world_rank() == 0 else None
    address, port = broadcast_from_rank_zero(place)
    ranks = {
        "RANK": context.get_world_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "GROUP_RANK": context.get_node_rank(),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    environment = os.environ | {name: str(value) for name, value in ranks.items()}
    subprocess.run([sys.executable, "-m", "pipedejavu", "train", *config["arguments"]], env=environment, check=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, ray.init(num_cpus=WORKERS + 2, include_dashboard=False):
        run = ["zoo:mlp", "--plan", "preset:ddp", "--steps", "4", "--run-dir", f"{folder}/run"]
        size = ScalingConfig(num_workers=WORKERS, resources_per_worker={"CPU": 1})
        settings = {"scaling_config": size, "run_config": RunConfig(storage_path=folder)}
        DataParallelTrainer(work, train_loop_config={"arguments": run}, **settings).fit()
        print(Path(folder, "run", "metrics.jsonl").read_text())
