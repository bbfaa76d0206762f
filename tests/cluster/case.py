"""Small clusters and jobs: one update per second for each GPU, unless a test says otherwise."""

from typing import Any

from pipedejavu.cluster import ClusterJob, RateRow, Server

GIB = 1 << 30


def server(name: str = "s", gpus: int = 1, kind: str = "g", cores: int = 8, gib: int = 64, **more: Any) -> Server:
    return Server(name, kind, gpus, 1000 * cores, gib * GIB, **more)


def job(name: str, steps: float = 10, arrival_s: float = 0, gpus: float = 1, **more: Any) -> ClusterJob:
    more.setdefault("rates", (RateRow(gpus=gpus, cores=0, steps_per_s=1),))
    return ClusterJob(name=name, steps=steps, arrival_s=arrival_s, gpus=gpus, **more)
