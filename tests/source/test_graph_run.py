"""Graph networks under plans: a plain loop, trainers with shares, and the replay agree."""

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.engine import Job, Sgd, audit, run_threads
from pipedejavu.facts import Cost, Device, Host, Link, Machine, Profile, Unit, UnitTime
from pipedejavu.plan import Place, Plan, preset
from pipedejavu.profile import cut_model
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.source.task import SampleOrder
from pipedejavu.zoo import Task, build, order

BATCH, STEPS, LR, SEED = 24, 3, 0.1, 4
TIME = UnitTime(forward=Cost(per_sample_s=1.0), backward=Cost(per_sample_s=2.0))


@pytest.fixture(autouse=True)
def double(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def task_of(kind: str) -> Task:
    return build(kind, data="graph:power:10000", fanouts=(3, 2), hidden=8, seed=SEED)


def program_of(plan: Plan, task: Task) -> Program:
    units = []
    for name, module in task.model.units():
        size = sum(8 * p.numel() for p in module.parameters())
        units.append(
            Unit(
                name=name,
                times={"cpu": TIME},
                parameter_bytes=size,
                gradient_bytes=size,
                optimizer_bytes=0,
                activation_bytes=8.0,
                boundary_bytes=8.0,
            )
        )
    devices = [
        Device(name=f"d{n}", kind="cpu", type="cpu", host="h", memory_bytes=2**40, reserved_bytes=0) for n in range(4)
    ]
    machine = Machine(name="m", hosts=(Host(name="h"),), devices=tuple(devices), links=(Link(bytes_per_s=1e30),))
    return compile_plan(plan, Profile(name="graph", units=tuple(units)), machine, fold=False)


def trained_plainly(task: Task) -> dict[str, torch.Tensor]:
    """A loop as one writes it: each step trains on a whole batch, with a mean loss and torch's SGD."""
    data, model = task.data, task.model
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for step in range(STEPS):
        indices = order(SEED, 0, len(data))[step * BATCH : (step + 1) * BATCH]
        inputs, targets = data.drawn(indices, step)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def plan_of(shares: tuple[float, ...], prefetch: int, steps: int) -> Plan:
    plan = preset("hyscale").plan
    return plan.replace(
        place=Place(replicas=len(shares) - 1, cpu_replicas=1),
        feed=plan.feed.replace(samples=8, microbatches=BATCH // 8, shares=shares),
        order=plan.order.replace(prefetch=prefetch),
        steps=steps,
    )


@pytest.mark.parametrize("kind", ["sage", "gcn", "gat"])
@pytest.mark.parametrize(("shares", "prefetch", "steps"), [((0.7, 0.3), 2, 1), ((0.5, 0.2, 0.3), 1, 3)])
def test_trainers_with_shares_equal_one_trainer_and_their_replay(kind, shares, prefetch, steps) -> None:
    task = task_of(kind)
    program = program_of(plan_of(shares, prefetch, steps), task)
    assert len(program.workers) == len(shares)
    assert sum(program.sizes) == BATCH
    cut = cut_model(task.model, task.data.batch(range(4))[0])
    job = Job(units=cut.units, loss=task.loss, optimizer=Sgd(lr=LR), seed=SEED)
    batches = SampleOrder(task, cut, program.sizes, SEED)
    outcome = run_threads(program, job, batches, STEPS // steps)
    assert max(audit(program, job, batches, outcome).values()) < 1e-12
    expected = trained_plainly(task_of(kind))
    for weights in outcome.weights.values():
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-12)
    moved = [float((expected[n] - p.detach()).abs().max()) for n, p in task_of(kind).model.named_parameters()]
    assert min(moved) > 1e-4  # a run that does nothing would not pass
