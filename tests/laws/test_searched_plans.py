"""What the search proposes for devices that are here, the engine runs: each plan equals plain training."""

from collections import Counter
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.engine import AdamW
from pipedejavu.facts import Link
from pipedejavu.program import compile as compile_plan
from pipedejavu.search import SearchOptions, search
from tests.engine.case import machine_of, make_case, profile_of


@pytest.fixture(autouse=True)
def _float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("clip", "memory_bytes"),
    [
        ("none", 3400),
        ("global", 4500),
        *(pytest.param(clip, size, marks=pytest.mark.slow) for clip in ("none", "global") for size in (2600, 2**40)),
    ],
)
def test_all_candidates_on_four_cpus_equal_plain_training(clip, memory_bytes):
    """The less memory there is, the more of the candidates divide state."""
    optimizer = AdamW(lr=0.01, eps=0.01)
    clip_norm = 0.1 if clip == "global" else None
    base = make_case(
        "ddp", replicas=4, microbatches=1, units=8, optimizer=optimizer, clip=clip, clip_norm=clip_norm
    )  # fmt: skip
    profile, machine = profile_of(base.units, 0), machine_of(base.plan, "cpu")
    devices = tuple(device.replace(memory_bytes=memory_bytes) for device in machine.devices[:4])
    machine = machine.replace(devices=devices, links=(Link(bytes_per_s=1e3),))
    options = SearchOptions(batch=8, candidates=10, clip=clip, is_runnable=True)
    kinds = Counter[str]()
    for ranked in search(profile, machine, options).candidates:
        case = replace(base, plan=ranked.plan.replace(steps=2), sizes=(ranked.plan.feed.samples,))
        case.__dict__["program"] = compile_plan(case.plan, profile, machine, fold=False)
        assert case.furthest(case.trained_plainly()) <= 1e-12, ranked.plan.name
        assert case.audit() <= case.tolerance, ranked.plan.name
        kinds[ranked.plan.keep.kind] += 1
    if memory_bytes in (3400, 4500):
        assert any(kind.startswith("zero") for kind in kinds), kinds
