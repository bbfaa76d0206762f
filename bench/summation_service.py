"""The summation service against an all-reduce: hosts with limited interfaces, and the simulator's forecast beside it.

Run as root with `python bench/summation_service.py [--trainers 3] [--helpers 3] [--mbit 160] [--megabytes 12]`. Every
host is a network namespace whose cable to a switch (a bridge in another namespace) `tc` limits in both directions. The
trainers sum one vector of float32: by Gloo's ring, by the service without helpers, and with 1, 2, … helpers, in turns.
Bytes are those that the kernel counted on the busiest interface, in its busier direction; headers are in them.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from pipedejavu.facts import Cost, Device, Host, Link, Machine, Profile, Unit, UnitTime
from pipedejavu.plan import preset
from pipedejavu.program import compile as compile_plan
from pipedejavu.program.summation import interface_share
from pipedejavu.simulate import simulate

PORT = 29655
PAYLOAD = 1448 / 1514
"""Bytes of data in a full Ethernet frame with TCP and timestamps, as a share of those that `tc` counts."""


def run_ip(*words: str, checks: bool = True) -> None:
    subprocess.run(["ip", *words], check=checks, capture_output=not checks)


def limit(name: str, device: str, mbit: int) -> None:
    shape = ["rate", f"{mbit}mbit", "burst", "64kb", "latency", "20ms"]
    subprocess.run(
        ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", device, "root", "tbf", *shape], check=True
    )


@contextmanager
def hosts(count: int, mbit: int) -> Iterator[list[str]]:
    """Makes hosts 10.79.0.1, 10.79.0.2, … around a switch; ends and removes them afterwards."""
    switch = f"pds{os.getpid()}"
    names = [f"{switch}h{n}" for n in range(count)]
    try:
        run_ip("netns", "add", switch)
        run_ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        run_ip("-n", switch, "link", "set", "bridge", "up")
        for n, name in enumerate(names):
            run_ip("netns", "add", name)
            run_ip("link", "add", "cable", "netns", name, "type", "veth", "peer", "name", f"port{n}", "netns", switch)
            run_ip("-n", name, "addr", "add", f"10.79.0.{n + 1}/24", "dev", "cable")
            for link in ("cable", "lo"):
                run_ip("-n", name, "link", "set", link, "up")
            run_ip("-n", switch, "link", "set", f"port{n}", "master", "bridge", "up")
            limit(name, "cable", mbit)
            limit(switch, f"port{n}", mbit)
        yield names
    finally:
        for name in (*names, switch):
            run_ip("netns", "del", name, checks=False)


def counted_bytes() -> tuple[int, int]:
    """Returns the bytes that this host's interface has received and sent."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "cable" in line)
    fields = line.split(":")[1].split()
    return int(fields[0]), int(fields[8])


def run_rank(rank: int, asked: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from pipedejavu.engine.summation_service import SummationService
    from pipedejavu.runtime.memory_group import sum_in_order
    from pipedejavu.runtime.traffic import Traffic

    torch.set_num_threads(1)
    size = asked.trainers + asked.helpers
    os.environ["GLOO_SOCKET_IFNAME"] = "cable"
    dist.init_process_group("gloo", init_method=f"tcp://10.79.0.1:{PORT}", rank=rank, world_size=size)
    trainers = range(asked.trainers)
    ring = dist.new_group([*trainers])
    services = [
        SummationService("s0", trainers, range(asked.trainers, asked.trainers + k), rank, Traffic())
        for k in range(asked.helpers + 1)
    ]
    numel = asked.megabytes * 250_000
    vectors = [torch.randn(numel, generator=torch.Generator().manual_seed(n)) for n in trainers]
    vector, expected = vectors[rank] if rank < asked.trainers else torch.zeros(0), sum_in_order(vectors)
    rows: dict[str, list[list[float]]] = {}
    for number in range(asked.rounds + 1):
        for name in ["ring", *map(str, range(asked.helpers + 1))]:
            dist.barrier()
            before, start = counted_bytes(), time.monotonic()
            if name == "ring" and rank < asked.trainers:
                dist.all_reduce(vector.clone(), group=ring)
            elif name != "ring" and rank < asked.trainers:
                assert torch.equal(services[int(name)].push_pull(vector), expected)
            elif name != "ring" and rank < asked.trainers + int(name):
                services[int(name)].serve()
            seconds = time.monotonic() - start
            moved = max(b - a for a, b in zip(before, counted_bytes(), strict=True))
            most = torch.tensor([seconds, float(moved)], dtype=torch.float64)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            if number:  # the first round connects
                rows.setdefault(name, []).append(most.tolist())
    if rank == 0:
        print(json.dumps(rows), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def forecast_s(trainers: int, helpers: int, asked: argparse.Namespace, *, is_ring: bool = False) -> float:
    """Returns the simulated time of the REDUCE of one update, by the stated rate of the interfaces."""
    size = asked.megabytes * 1_000_000
    unit = Unit(
        name="u0",
        times={"cpu": UnitTime(forward=Cost(), backward=Cost(), recompute=Cost(), update_s=0.0)},
        parameter_bytes=size,
        gradient_bytes=size,
        optimizer_bytes=0,
        activation_bytes=1.0,
        boundary_bytes=1.0,
    )
    names = [f"h{n}" for n in range(trainers + helpers)]
    link = Link(
        scope="other-host",
        latency_s=1e-4,
        bytes_per_s=asked.mbit * 1e6 / 8 * PAYLOAD,
        wires=("out:{source_host}", "in:{target_host}"),
    )
    machine = Machine(
        name="hosts",
        hosts=tuple(Host(name=name) for name in names),
        devices=tuple(Device(name=n, kind="cpu", type="cpu", host=n, memory_bytes=1 << 40) for n in names),
        links=(link,),
    )
    plan = preset("ddp" if is_ring else "byteps").at(workers=trainers, microbatches=1)
    plan = plan.replace(steps=1, place=plan.place.replace(servers=helpers))
    program = compile_plan(plan, Profile(name="vector", units=(unit,)), machine)
    spans = simulate(program).timeline().spans()
    return max(span.end_s - span.start_s for span in spans if span.action.startswith("REDUCE"))


def show(rows: dict[str, Any], asked: argparse.Namespace) -> None:
    n, size = asked.trainers, asked.megabytes
    ring_s = median(row[0] for row in rows["ring"])
    print(f"\n{n} trainers, {size} MB, interfaces of {asked.mbit} Mbit/s, median of {asked.rounds} rounds\n")
    print("| sum | seconds | forecast | ratio to the ring | forecast | MB on the busiest interface | formula |")
    print("|---|---|---|---|---|---|---|")
    ring_forecast = forecast_s(n, 0, asked, is_ring=True)
    for name, values in rows.items():
        seconds, moved = (median(column) for column in zip(*values, strict=True))
        helpers = 0 if name == "ring" else int(name)
        forecast = ring_forecast if name == "ring" else forecast_s(n, helpers, asked)
        title = "all-reduce (Gloo)" if name == "ring" else f"service, {helpers} helpers"
        formula = interface_share(n, helpers) * size
        print(
            f"| {title} | {seconds:.2f} | {forecast:.2f} | {ring_s / seconds:.2f} | {ring_forecast / forecast:.2f}"
            f" | {moved / 1e6:.2f} | {formula:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trainers", type=int, default=3)
    parser.add_argument("--helpers", type=int, default=3, help="most helpers")
    parser.add_argument("--mbit", type=int, default=160)
    parser.add_argument("--megabytes", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        run_rank(asked.rank, asked)
        return
    with hosts(asked.trainers + asked.helpers, asked.mbit) as names:
        command = [sys.executable, __file__, *sys.argv[1:]]
        started = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command, "--rank", str(n)],
                stdout=subprocess.PIPE if n == 0 else subprocess.DEVNULL, text=True,
            )
            for n, name in enumerate(names)
        ]  # fmt: skip
        try:
            out, _ = started[0].communicate(timeout=600)
        finally:
            for process in started:
                process.kill()
                process.wait()
    if not out.strip():
        sys.exit("the hosts could not sum; see above")
    show(json.loads(out.splitlines()[-1]), asked)


if __name__ == "__main__":
    main()
