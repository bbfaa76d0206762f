"""Traces of jobs under each policy: Synergy's 100 jobs with its published throughput, and a production trace of tasks.

Run with `python bench/schedule.py --synergy TRACE.csv [--pods PODS.csv --nodes NODES.csv]`. The throughput of Synergy's
models by CPU cores and memory is `bench/synergy_rates.csv`, from the profiles published with it (MIT licence), for
servers of 8 V100, 24 cores and 500 GB. Besides the trace as it is, all jobs at once, the same jobs arrive at random
(seed 0) so often that they offer a share of what GPU-proportional parts can serve. The production trace also runs on
one in so many of its nodes, as the whole cluster never has a queue.
"""

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path

from pipedejavu.cluster import (
    POLICIES,
    ClusterJob,
    ScheduleOptions,
    ScheduleSummary,
    Server,
    simulate_cluster,
    summarise,
)
from pipedejavu.cluster.job_file import read_jobs, read_rates, read_servers
from pipedejavu.cluster.server_pool import PACKINGS

GB = 10**9
RATES = Path(__file__).with_name("synergy_rates.csv")


def hours(seconds: float) -> str:
    return f"{seconds / 3600:.2f}"


def schedule(jobs: Sequence[ClusterJob], servers: Sequence[Server], **options: object) -> tuple[ScheduleSummary, float]:
    """Returns the figures, and the seconds of this process."""
    before = time.process_time()
    figures = summarise(simulate_cluster(jobs, servers, ScheduleOptions(**options)))  # type: ignore[arg-type]
    return figures, time.process_time() - before


def servers_of_8(count: int) -> list[Server]:
    return [Server(f"s{n}", "v100", 8, 24_000, 500 * GB) for n in range(count)]


def show_synergy(jobs: Sequence[ClusterJob], servers: Sequence[Server], title: str, policies: Sequence[str]) -> None:
    print(f"\n{title}\n\n| policy | mean h | tuned | ratio | 99 % h | tuned | makespan h | tuned | ratio | CPU s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for policy in policies:
        (one, first_s), (two, second_s) = (
            schedule(jobs, servers, policy=policy, allocation=allocation) for allocation in ("proportional", "tuned")
        )
        print(
            f"| {policy} | {hours(one.mean_completion_s)} | {hours(two.mean_completion_s)}"
            f" | {one.mean_completion_s / two.mean_completion_s:.2f} | {hours(one.p99_completion_s)}"
            f" | {hours(two.p99_completion_s)} | {hours(one.makespan_s)} | {hours(two.makespan_s)}"
            f" | {one.makespan_s / two.makespan_s:.2f} | {first_s + second_s:.1f} |",
            flush=True,
        )


def arriving(jobs: Sequence[ClusterJob], num_gpus: int, load: float, rounds: int) -> list[ClusterJob]:
    """Returns the jobs some times over, at random times, offering a share of what proportional parts serve."""
    lengths = [job.work / job.table.rate("v100", 1000, 3000, 500 * GB // 8) for job in jobs]
    gap_s = sum(lengths) / len(lengths) / (num_gpus * load)
    draws, now_s, done = random.Random(0), 0.0, []
    for n in range(rounds * len(jobs)):
        now_s += draws.expovariate(1 / gap_s)
        done.append(jobs[draws.randrange(len(jobs))].replace(name=f"r{n}", arrival_s=now_s))
    return done


def synergy(path: str, loads: Sequence[float], rounds: int) -> None:
    rates = read_rates(str(RATES))
    jobs = [job.replace(rates=rates[job.model]) for job in read_jobs(path)]
    for count in (1, 2, 4):
        policies = [name for name in POLICIES if name != "deadline"] if count == 4 else ["fifo", "srtf"]
        show_synergy(jobs, servers_of_8(count), f"All {len(jobs)} jobs at once on {8 * count} V100", policies)
    for load in loads:
        queue = arriving(jobs, 16, load, rounds)
        show_synergy(queue, servers_of_8(2), f"{len(queue)} arriving jobs, load {load:g}, 16 V100", ["fifo", "srtf"])


def production(pods: str, nodes: str, parts: Sequence[int]) -> None:
    jobs, servers = read_jobs(pods), read_servers(nodes)
    assert servers is not None
    print("\n| servers | policy | packing | mean h | median s | 99 % h | mean wait h | GPUs held | CPU s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for part in parts:
        some = [server for n, server in enumerate(servers) if n % part == 0]
        chosen = [("fifo", packing) for packing in PACKINGS]
        for policy, packing in [*chosen, ("srtf", "best")] if part > 1 else chosen:
            figures, seconds = schedule(
                jobs, some, policy=policy, packing=packing, start_s=0.0, backfill=True, round_s=3600.0
            )
            print(
                f"| {len(some):,} | {policy} | {packing} | {hours(figures.mean_completion_s)}"
                f" | {figures.median_completion_s:.0f} | {hours(figures.p99_completion_s)}"
                f" | {hours(figures.mean_wait_s)} | {figures.gpu_utilisation:.1%} | {seconds:.1f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--synergy", help="the trace of 100 jobs")
    parser.add_argument("--pods", help="tasks of the production trace")
    parser.add_argument("--nodes", help="its nodes")
    parser.add_argument("--loads", type=float, nargs="*", default=[0.8, 1.0, 1.2])
    parser.add_argument("--rounds", type=int, default=3, help="arriving jobs, in hundreds")
    parser.add_argument("--parts", type=int, nargs="*", default=[1, 60], help="one in so many nodes")
    asked = parser.parse_args()
    if asked.synergy:
        synergy(asked.synergy, asked.loads, asked.rounds)
    if asked.pods and asked.nodes:
        production(asked.pods, asked.nodes, asked.parts)


if __name__ == "__main__":
    main()
