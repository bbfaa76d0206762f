"""Programs of presets at unit costs, and small models and machines that are not a plain chain."""

from collections.abc import Callable

import pytest

from pipedejavu.facts import Cost, Device, Edge, Host, Link, Machine, Profile, Tie, Unit, UnitTime
from pipedejavu.plan import Plan, preset
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import unit_costs


@pytest.fixture
def build() -> Callable[..., Program]:
    """Compiles a preset at a size, with some fields of its plan changed."""

    def build(name: str, *, workers=None, microbatches=None, replicas=None, steps=None, fold=False, **changes):
        plan = preset(name).at(workers=workers, microbatches=microbatches, replicas=replicas, steps=steps)
        return compile_plan(*unit_costs(plan.replace(**changes), {}), fold=fold)

    return build


@pytest.fixture
def model() -> Callable[..., Profile]:
    """A profile of equal units, with edges or ties where they are given."""

    def model(
        count: int,
        *,
        edges: list[tuple[int, int]] | None = None,
        tie: tuple[int, ...] = (),
        kinds: dict[str, float] | None = None,
    ) -> Profile:
        times = {
            kind: UnitTime(
                forward=Cost(fixed_s=slowness),
                backward=Cost(fixed_s=2 * slowness),
                weight_backward=Cost(fixed_s=slowness),
                recompute=Cost(fixed_s=slowness),
                update_s=slowness / 10,
            )
            for kind, slowness in (kinds or {"gpu": 1.0, "cpu": 4.0}).items()
        }
        units = tuple(
            Unit(
                name=f"u{n}",
                times=times,
                parameter_bytes=100,
                gradient_bytes=100,
                optimizer_bytes=600,
                activation_bytes=50.0,
                boundary_bytes=10.0,
                expert_share=0.5,
                num_experts=8,
                expert_rows=3.0,
                expert_row_bytes=20.0,
            )
            for n in range(count)
        )
        return Profile(
            name="model",
            units=units,
            edges=None if edges is None else tuple(Edge(source=f"u{s}", target=f"u{t}") for s, t in edges),
            ties=(Tie(units=tuple(f"u{n}" for n in tie), size_bytes=100),) if tie else (),
        )

    return model


@pytest.fixture
def computer() -> Callable[..., Machine]:
    """One host with GPUs of given kinds and a CPU."""

    def computer(gpus: int | list[str], *, memory_bytes: int = 2**30, bytes_per_s: float = 1000.0) -> Machine:
        kinds = ["gpu"] * gpus if isinstance(gpus, int) else gpus
        devices = [
            Device(name=f"gpu{n}", kind=kind, type="gpu", host="here", memory_bytes=memory_bytes)
            for n, kind in enumerate(kinds)
        ]
        devices.append(Device(name="cpu", kind="cpu", type="cpu", host="here", memory_bytes=2**40))
        return Machine(
            name="computer",
            hosts=(Host(name="here"),),
            devices=tuple(devices),
            links=(Link(bytes_per_s=bytes_per_s, latency_s=0.01),),
        )

    return computer


@pytest.fixture
def resize() -> Callable[..., Plan]:
    """A preset at a size that suits how it grows."""

    def resize(name: str, size: int, microbatches: int, **sizes: int) -> Plan:
        found = preset(name)
        return found.at(workers=None if found.grows == "none" else size, microbatches=microbatches, **sizes)

    return resize
