"""The names at the top of the package: functions that are packages too, and what they return."""

import inspect
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch import nn

import pipedejavu as pdv
from pipedejavu.facts import InputError

WITHOUT_TORCH = """
import sys
import pipedejavu
from pipedejavu.plan import Plan
import pipedejavu.simulate
from pipedejavu import plan
assert plan.Plan is Plan and pipedejavu.plan is plan and callable(plan)
assert "torch" not in sys.modules
"""


def test_packages_that_are_functions_are_imported_as_before() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True)
    for name in ("plan", "probe", "profile", "simulate"):
        assert inspect.ismodule(getattr(pdv, name))
        assert inspect.signature(getattr(pdv, name)).parameters


def test_every_public_name_is_there() -> None:
    for name in pdv.__all__:
        assert getattr(pdv, name) is not None


def test_a_model_is_profiled_planned_and_simulated() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    profile = pdv.profile(model, (torch.randn(4, 16), torch.randn(4, 16)), nn.MSELoss())
    assert [unit.name for unit in profile.units] == ["0", "1", "2"]
    ranked = pdv.plan(profile, batch_size=8)
    assert ranked.samples == 8
    assert pdv.simulate(ranked).makespan_s == pytest.approx(ranked.time_s)
    assert pdv.simulate(ranked.plan, ranked.profile, ranked.machine).makespan_s == pytest.approx(ranked.time_s)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(InputError, match=r"^simulating a Plan needs its profile and machine; call simulate\(plan, "):
        pdv.simulate(ranked.plan)
    with pytest.raises(InputError, match=r"^plan\(\) has no option 'samlpes'; its options are searcher, "):
        pdv.plan(profile, samlpes=3)
