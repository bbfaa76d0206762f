"""Training algorithms as they are compared: each takes the same samples per update, or one worker's share of them.

A pipeline without a flush, a server and shared weights make an update of each microbatch; a synchronous plan divides
the same microbatch over its workers, so that all algorithms make the same number of updates of the same size.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pipedejavu.plan import Feed, Place, Plan, Reduce, Version, preset

LOCAL_STEPS = 4
"""Updates of a worker between two averages."""
RATE_UPDATES = 60
"""Updates over which rates by delay rise to the full rate."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """An algorithm of the comparison."""

    name: str
    family: str
    """`exact`, `pipeline` or `server`."""
    plan: Callable[[int, int, int], Plan]
    """Takes workers, samples per update and updates per round."""
    warm_up: float = 0.0
    """Share of the samples that a synchronous pipeline trains first."""
    replicas: Callable[[int], int] = lambda _: 1
    """Workers that make updates of their own, of so many workers."""


def _synchronous(name: str) -> Callable[[int, int, int], Plan]:
    def plan(workers: int, samples: int, steps: int) -> Plan:
        if name == "1f1b":
            return preset(name).at(workers=workers, microbatches=workers, samples=samples // workers, steps=steps)
        return preset(name).at(workers=workers, microbatches=1, samples=samples // workers, steps=steps)

    return plan


def _pipeline(name: str, version: Version | None = None) -> Callable[[int, int, int], Plan]:
    def plan(workers: int, samples: int, steps: int) -> Plan:
        found = preset(name).at(workers=workers, samples=samples).replace(steps=steps)
        return found if version is None else found.replace(version=version)

    return plan


def _double_buffer(workers: int, samples: int, steps: int) -> Plan:
    return preset("pipedream-2bw").at(workers=workers, microbatches=workers, samples=samples // workers, steps=steps)


def _server(name: str) -> Callable[[int, int, int], Plan]:
    def plan(workers: int, samples: int, steps: int) -> Plan:
        return preset(name).at(workers=workers, samples=samples).replace(steps=max(1, steps // workers))

    return plan


def _hetpipe(workers: int, samples: int, steps: int) -> Plan:
    return preset("hetpipe").at(workers=workers // 2, replicas=2, samples=samples).replace(steps=max(1, steps // 2))


def _local_steps(workers: int, samples: int, steps: int) -> Plan:
    rounds = max(1, steps // workers // LOCAL_STEPS)
    return Plan(
        name="local-steps", place=Place(replicas=workers), feed=Feed(kind="own", samples=samples),
        version=Version(kind="local"), steps=rounds * LOCAL_STEPS,
        reduce=Reduce(wire="all-reduce", combiner="average", period=LOCAL_STEPS),
    )  # fmt: skip


def _masked(workers: int, samples: int, steps: int) -> Plan:
    plan = preset("distreal").at(workers=workers, samples=samples)
    rounds = max(1, steps // workers // plan.reduce.period)
    return plan.replace(feed=plan.feed.replace(is_controlled=False), steps=rounds * plan.reduce.period)


def _own(workers: int) -> int:
    return workers


ALGORITHMS = (
    Algorithm(name="1f1b", family="exact", plan=_synchronous("1f1b")),
    Algorithm(name="ddp", family="exact", plan=_synchronous("ddp")),
    Algorithm(name="pipedream", family="pipeline", plan=_pipeline("pipedream")),
    Algorithm(name="pipedream-vertical", family="pipeline", plan=_pipeline("pipedream-vertical")),
    Algorithm(name="pipedream-2bw", family="pipeline", plan=_double_buffer),
    Algorithm(name="spectrain", family="pipeline", plan=_pipeline("spectrain")),
    Algorithm(name="pipemare", family="pipeline", plan=_pipeline("pipemare")),
    Algorithm(name="pipemare + rates", family="pipeline", plan=_pipeline(
        "pipemare", Version(kind="stash", correction="discrepancy", rate_updates=RATE_UPDATES))),
    Algorithm(name="pipedream + rates", family="pipeline", plan=_pipeline(
        "pipedream", Version(kind="stash", rate_updates=RATE_UPDATES))),
    Algorithm(name="pipedream + compensation", family="pipeline", plan=_pipeline(
        "pipedream", Version(kind="stash", correction="delay-compensation"))),
    Algorithm(name="pipedream after warm-up", family="pipeline", plan=_pipeline("pipedream"), warm_up=0.25),
    Algorithm(name="hetpipe", family="pipeline", plan=_hetpipe, replicas=lambda _: 2),
    Algorithm(name="parameter-server", family="server", plan=_server("parameter-server"), replicas=_own),
    Algorithm(name="dc-asgd", family="server", plan=_server("dc-asgd"), replicas=_own),
    Algorithm(name="hogwild", family="server", plan=_server("hogwild"), replicas=_own),
    Algorithm(name="easgd", family="server", plan=_server("easgd"), replicas=_own),
    Algorithm(name="easgd-sync", family="server", plan=_server("easgd-sync"), replicas=_own),
    Algorithm(name="local-steps", family="server", plan=_local_steps, replicas=_own),
    Algorithm(name="distreal", family="server", plan=_masked, replicas=_own),
    Algorithm(name="zeno", family="server", plan=_synchronous("zeno")),
)  # fmt: skip
