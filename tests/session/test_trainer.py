"""The Trainer in a user's own loop."""

import copy
import gc
import re
import signal
import sys
import threading
import time
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from pipedejavu.engine import Applied, Job, Sgd, audit
from pipedejavu.facts import Device, Host, InputError, Link, Machine
from pipedejavu.health import WorkerError
from pipedejavu.plan import preset
from pipedejavu.planner.replan import first_runnable
from pipedejavu.profile import read_chain
from pipedejavu.run import throughput as pace_module
from pipedejavu.search import search
from pipedejavu.session import Trainer, trainer_plan


def model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5)]
    return nn.Sequential(*blocks, nn.Linear(6, 3)).double()


def loss(output, target):
    return nn.functional.cross_entropy(output, target, reduction="sum")


def batch(size: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return inputs, (inputs.sum(1) > 0).long()


LATE = preset("late-share").at(workers=2, microbatches=4)
PLANS = {"1f1b": 2, "ddp": 2, "zb-h1": 2, "chimera": 2, "interleaved": 2, "coarse": 2, "fine": 2}
PLANS |= {"zero-offload": 1, "cotrain": 1, "l2l": 1, "stronghold": 1}


@pytest.mark.parametrize(("plan", "workers"), PLANS.items())
def test_steps_equal_a_plain_loop_also_with_uneven_batches(plan, workers) -> None:
    plain, batches = model(), [batch(size, size) for size in (30, 25, 19)]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        mean = loss(plain(inputs), targets) / len(targets)
        mean.backward()
        optimizer.step()
        expected.append(mean.item())
    trainer = Trainer(model(), loss, sample=batches[0], plan=plan, workers=workers, optimizer=Sgd(lr=0.1, momentum=0.9))
    assert [trainer.step(b) for b in batches] == pytest.approx(expected, rel=1e-12)
    trained = trainer.save_to_model()
    for own, other in zip(trained.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own, other, rtol=0, atol=1e-13)


class Waits(nn.Linear):
    """A unit that waits, from when it is told to, until it is let go."""

    def __init__(self) -> None:
        super().__init__(6, 6, dtype=torch.float64)
        self.is_told = False

    def __deepcopy__(self, memo) -> "Waits":  # the workers' copies are this one
        return self

    def forward(self, x):
        while self.is_told:
            time.sleep(0.01)
        return super().forward(x)


@pytest.mark.parametrize("worker", [0, 1])
def test_an_action_that_hangs_is_named_by_the_step_that_it_was_in(worker) -> None:
    unit, plan = Waits(), preset("1f1b").at(workers=2, microbatches=4)
    plan = plan.replace(cut=plan.cut.replace(bounds=(1,)))
    parts = [nn.Linear(6, 6, dtype=torch.float64), nn.Linear(6, 3, dtype=torch.float64)]
    parts.insert(worker, unit)
    trainer = Trainer(nn.Sequential(*parts), loss, sample=batch(8), plan=plan, hang_after_s=1)
    trainer.step(batch(8))
    unit.is_told = True
    said = rf"worker {worker} hangs: F{worker}\.0@0 \(lane compute\) has lasted \d+ s, and 1 s were allowed; hang"
    with pytest.raises(WorkerError, match=said) as first:
        trainer.step(batch(8))
    assert "in forward" in "".join(first.value.__notes__)
    with pytest.raises(WorkerError, match=re.escape(str(first.value))):
        trainer.step(batch(8))
    unit.is_told = False


def test_a_trainer_that_is_gone_leaves_no_threads() -> None:
    before = {*threading.enumerate()}
    trainer = Trainer(model(), loss, sample=batch(8), workers=2)
    trainer.step(batch(8))
    threads = weakref.ref(trainer.threads)
    own = {*threading.enumerate()} - before
    assert len(own) == 4  # a hand and a vigil for each worker
    del trainer
    gc.collect()
    assert threads() is None
    for thread in own:
        thread.join()  # or the test runs into its timeout


def test_a_batch_smaller_than_the_microbatches_of_several_updates_is_refused() -> None:
    trainer = Trainer(model(), loss, sample=batch(48), plan="pipedream", workers=2)
    with pytest.raises(InputError, match=r"a batch of 3 samples has fewer than the plan's \d+ microbatches"):
        trainer.step(batch(3))


@pytest.mark.parametrize(
    "plan",
    [
        "pipedream",
        "pipedream-vertical",
        "pipedream-2bw",
        "parameter-server",
        "easgd",
        "easgd-sync",
        "hetpipe",
        LATE.replace(feed=LATE.feed.replace(shares=(0.75, 0.25))),  # those that are measured may be too small
    ],
    ids=lambda plan: getattr(plan, "name", plan),
)
def test_steps_of_plans_without_a_flush_equal_their_replay(plan) -> None:
    trainer = Trainer(model(), loss, sample=batch(48), plan=plan, workers=2, optimizer=Sgd(lr=0.05, momentum=0.9))
    given = Given([batch(48, 1), batch(41, 2), batch(37, 3)], len(trainer.batch.sizes))
    losses = [trainer.step(b) for b in given.batches]
    outcome = trainer.threads.outcome()
    job = Job(units=read_chain(model()), loss=loss, optimizer=Sgd(lr=0.05, momentum=0.9))
    # Sums of a few gradients of size one, over a few updates.
    assert max(audit(trainer.program, job, given, outcome).values()) < 1e-13
    assert losses[-1] < losses[0]
    updates = trainer.program.plan.steps * 3
    if plan != "parameter-server":
        own = range(trainer.program.num_replicas)
        applied = [e.version for log in outcome.logs for e in log.events if isinstance(e, Applied) and e.replica in own]
        assert max(applied) == updates > 3


class Given:
    """The batches of several steps as microbatches by number, cut by plain arithmetic."""

    def __init__(self, batches, parts: int):
        self.batches = batches
        self.cut = [tensors for b in batches for tensors in zip(*(t.tensor_split(parts) for t in b), strict=True)]

    def inputs(self, microbatch: int):
        return self.cut[microbatch][0]

    def targets(self, microbatch: int):
        return self.cut[microbatch][1]

    def count(self, microbatch: int) -> int:
        return len(self.cut[microbatch][1])


@pytest.mark.parametrize(
    ("change", "form"),
    [
        (lambda x, y: (x[:, :3], y), "inputs of 3 float64, targets of single int64"),
        (lambda x, y: (x.float(), y), "inputs of 6 float32, targets of single int64"),
        (lambda x, y: (x, y.int()), "inputs of 6 float64, targets of single int32"),
    ],
)
def test_a_batch_of_another_form_is_refused(change, form) -> None:
    trainer = Trainer(model(), loss, sample=batch(8), workers=2)
    with pytest.raises(InputError, match=f"a batch has {form}, where the first had inputs of 6 float64, targets of"):
        trainer.step(change(*batch(8)))


def test_what_is_measured_stays_as_it_was() -> None:
    own = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    before = copy.deepcopy(own.state_dict())
    Trainer(own, loss, sample=batch(8), workers=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in own.state_dict().items())


@pytest.mark.parametrize("plan", ["1f1b", "gpipe-recompute", "zb-h1"])
def test_units_that_begin_in_place_train_like_others(plan) -> None:
    """Also where they are the first of a piece, whose input is a leaf, and where samples are read again."""
    built = [nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True)]
    torch.manual_seed(0)
    own = nn.Sequential(*built, nn.Linear(6, 3)).double()
    plain = copy.deepcopy(own)
    inputs, targets = batch(16)
    kept = inputs.clone()
    (loss(plain(inputs.clone()), targets) / 16).backward()
    trainer = Trainer(own, loss, sample=(inputs, targets), plan=plan, workers=3, optimizer=Sgd(lr=1.0))
    trainer.step((inputs, targets))
    assert torch.equal(inputs, kept)
    for trained, expected in zip(trainer.save_to_model().parameters(), plain.parameters(), strict=True):
        assert torch.allclose(trained, expected - expected.grad, rtol=0, atol=1e-14)


class Residual(nn.Module):
    """A model that is no chain, with a loss of its own and an embedding that is also its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens, *, mask, labels=None):
        x = start = self.embedding(tokens)
        for block in self.blocks:
            x = x + self.scale * block(x) * mask
        logits = self.head(x + start)
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def residual() -> Residual:
    torch.manual_seed(0)
    return Residual().double()


def texts(size: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(12, (size, 5), generator=generator)
    return {"mask": torch.linspace(0, 1, 5, dtype=torch.float64)[:, None], "tokens": tokens, "labels": tokens.flip(1)}


@pytest.mark.parametrize("plan", ["1f1b", "ddp", "zb-h1", "gpipe-recompute", "chimera", "coarse"])
@pytest.mark.parametrize("has_own_loss", [True, False])
def test_a_module_that_is_no_chain_trains_like_in_a_plain_loop(plan, has_own_loss) -> None:
    plain, batches = residual(), [texts(size, size) for size in (8, 8, 11)]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for given in batches:
        optimizer.zero_grad()
        mean = plain(**given)["loss"]
        mean.backward()
        optimizer.step()
        expected.append(mean.item())
    steps = batches
    if not has_own_loss:
        steps = [({"tokens": b["tokens"], "mask": b["mask"]}, b["labels"]) for b in batches]
    trainer = Trainer(
        residual(),
        None if has_own_loss else lambda output, target: loss(output["logits"].flatten(0, 1), target.flatten()) / 5,
        sample=steps[0],
        plan=plan,
        workers=2,
        optimizer=Sgd(lr=0.1, momentum=0.9),
    )
    assert [trainer.step(b) for b in steps] == pytest.approx(expected, rel=1e-12)
    for (name, own), other in zip(trainer.save_to_model().named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own, other, rtol=0, atol=1e-13), name


def test_a_model_without_a_loss_of_its_own_is_refused() -> None:
    given = texts(8, 0)
    inputs = {"tokens": given["tokens"], "mask": given["mask"]}
    with pytest.raises(InputError, match="the model computes no loss of its own"):
        Trainer(residual(), None, sample=(inputs, given["labels"]), workers=2)


def test_a_module_that_does_not_take_the_sample_is_refused() -> None:
    with pytest.raises(InputError, match="a Linear cannot be cut: a and b must have same reduction dim"):
        Trainer(nn.Linear(2, 2), loss, sample=batch(8))


def test_a_step_is_predicted() -> None:
    trainer = Trainer(copy.deepcopy(model()), loss, sample=batch(16), workers=2)
    assert [w.peak_live_microbatches for w in trainer.predict().workers] == [2, 1]


def test_the_plan_auto_is_searched_for_what_is_here(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plain, batches = model(), [batch(8, seed) for seed in (1, 2)]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    trainer = Trainer(copy.deepcopy(plain), loss, sample=batches[0], plan="auto", optimizer=Sgd(lr=0.1))
    assert trainer.program.plan.decisions
    assert sum(trainer.program.sizes) == 8
    for inputs, targets in batches:
        optimizer.zero_grad()
        (loss(plain(inputs), targets) / 8).backward()
        optimizer.step()
        trainer.step((inputs, targets))
    trained = trainer.save_to_model().state_dict()
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(trained[name], weight, rtol=1e-10, atol=1e-12)


class Noted:
    """Notes what is measured: the kinds of devices, and whether units are compiled; measures eager units."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[set[str], bool]] = []
        self._measure = trainer_plan.measure_with
        monkeypatch.setattr(trainer_plan, "measure_with", self)

    def __call__(self, name, unit_samples, job, setups, report, *, is_compiled, **others):
        self.calls.append(({setup.kind for setup in setups}, is_compiled))
        return self._measure(name, unit_samples, job, setups, report, **others)


def two_kinds() -> Machine:
    devices = [
        Device(name=kind, kind=kind, type="cpu", host="here", memory_bytes=2**30, most_workers=1) for kind in ("a", "b")
    ]
    return Machine(
        name="m", hosts=(Host(name="here", cores=2),), devices=tuple(devices), links=(Link(bytes_per_s=1e9),)
    )


def test_compiled_units_are_measured_only_on_devices_that_the_plan_uses(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    noted = Noted(monkeypatch)

    def on_b(profile, machine, options):
        options = options.replace(is_runnable=True, devices=("b",))
        return first_runnable(search(profile, machine, options).candidates, num_workers=1)

    monkeypatch.setattr(trainer_plan, "choose_plan", on_b)
    common = {"plan": "auto", "optimizer": Sgd(lr=0.1), "machine": two_kinds(), "check_model": False}
    trainer = Trainer(model(), loss, sample=batch(8), compile="on", **common)
    assert trainer.program.plan.is_compiled
    assert noted.calls == [({"a", "b"}, False), ({"b"}, True)]


def test_a_second_trainer_of_the_model_measures_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    noted = Noted(monkeypatch)
    common = {"plan": "auto", "machine": two_kinds(), "check_model": False}
    first = Trainer(model(), loss, sample=batch(8), optimizer=Sgd(lr=0.1), **common)
    again = Trainer(model(), loss, sample=batch(8, seed=3), optimizer=Sgd(lr=0.5), **common)
    assert len(noted.calls) == 1
    assert again.program.profile == first.program.profile
    Trainer(model(), loss, sample=batch(6), optimizer=Sgd(lr=0.1), **common)
    Trainer(model(), lambda o, t: 2 * loss(o, t), sample=batch(8), optimizer=Sgd(lr=0.1), **common)
    Trainer(model(), loss, sample=batch(8), optimizer=Sgd(lr=0.1), measure_budget_s=5.0, **common)
    assert len(noted.calls) == 4  # another batch, another loss, another budget


def test_a_trainer_under_a_given_plan_keeps_its_measurements_too(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []
    measure = trainer_plan.measure
    monkeypatch.setattr(trainer_plan, "measure", lambda *a, **o: calls.append(o["is_compiled"]) or measure(*a, **o))
    for precision, plan in (("auto", "1f1b"), ("auto", "1f1b"), ("bf16", "1f1b"), ("bf16", "1f1b"), ("auto", "gpipe")):
        Trainer(model().float(), loss, sample=float_batch(), plan=plan, precision=precision, check_model=False)
    assert calls == [False, False]  # once per precision: the order of actions changes no unit


def float_batch():
    inputs, targets = batch(8)
    return inputs.float(), targets


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces inductor by the eager graph, which Dynamo guards in the same way; returns the graphs so far."""
    compiled: list[str] = []
    real = torch.compile

    def backend(graph, _):
        compiled.append(graph.code)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda call, **_: real(call, fullgraph=True, backend=backend))
    return compiled


@pytest.mark.parametrize(("plan", "workers"), [("1f1b", 2), ("ddp", 2), ("gpipe-recompute", 2)])
def test_alike_units_are_compiled_once_in_a_process(tmp_path, monkeypatch, graphs, plan, workers) -> None:
    """The measurement, both workers, all steps and evaluations share three graphs: first, middle and last units."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    common = {"optimizer": Sgd(lr=0.1), "compile": True, "check_model": False}
    trainer = Trainer(model(), loss, sample=batch(8), plan=plan, workers=workers, **common)
    for seed in range(3):
        trainer.step(batch(8, seed))
    trainer.evaluate([batch(8, 4), batch(5, 5)])
    assert len(graphs) == 3
    trainer.step(batch(6, 6))
    shorter = len(graphs)
    assert shorter <= 6  # once more for microbatches of any size
    trainer.step(batch(8, 7))
    trainer.step(batch(7, 8))
    assert len(graphs) <= shorter + 1


def two_workers(profile, machine, options):
    """Chooses as the Trainer does, but for the best plan of two workers."""
    options = options.replace(is_runnable=True, candidates=20)
    found = first_runnable(search(profile, machine, options).candidates, num_workers=2)
    assert found is not None
    return found


@pytest.mark.parametrize("replan", [True, False])
def test_the_plan_auto_is_exchanged_where_a_worker_becomes_slow(tmp_path, monkeypatch, capsys, replan) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(pace_module, "WINDOW_S", 0.0)
    monkeypatch.setattr(trainer_plan, "choose_plan", two_workers)
    here = machine_with_cores(2)
    batches = [batch(8, seed) for seed in range(12)]
    optimizer = {"optimizer": Sgd(lr=0.1, momentum=0.9), "machine": here}
    trainer = Trainer(model(), loss, sample=batches[0], plan="auto", replan=replan, **optimizer)
    first = trainer.program.plan
    assert first.num_workers == 2
    own = trainer.threads.handlers[1]
    do = own.do

    def slowly(action) -> None:
        time.sleep(0.01)
        do(action)

    monkeypatch.setattr(own, "do", slowly)
    for each in batches:
        trainer.step(each)
        for thread in threading.enumerate():
            if thread.name == "pilot":
                thread.join()
    said = capsys.readouterr()
    assert ("times its forecast: the run goes on under plan" in said.out + said.err) == replan
    assert (trainer.program.plan != first) == replan
    assert trainer.updates == 12
    plain = model()
    own_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in batches:
        own_optimizer.zero_grad()
        (loss(plain(inputs), targets) / 8).backward()
        own_optimizer.step()
    for name, weight in trainer.save_to_model().state_dict().items():
        torch.testing.assert_close(weight, plain.state_dict()[name], rtol=1e-10, atol=1e-12)


def machine_with_cores(count: int) -> Machine:
    """One host whose CPU is divided over so many workers."""
    cpu = Device(name="cpu", kind="cpu", type="cpu", host="here", memory_bytes=2**40, most_workers=count)
    return Machine(name="here", hosts=(Host(name="here"),), devices=(cpu,), links=(Link(bytes_per_s=1e9),))


def test_contributions_are_scored_on_the_sample_and_the_worst_is_dropped() -> None:
    sample, batches = batch(30, seed=1), [batch(size, size) for size in (30, 25)]
    plan = preset("zeno").at(workers=3, microbatches=1)
    trainer = Trainer(model(), loss, sample=sample, plan=plan, optimizer=Sgd(lr=0.1))
    for each in batches:
        trainer.step(each)
    plain = model()
    for inputs, targets in batches:
        scores, gradients = [], []
        for own, wanted in zip(torch.tensor_split(inputs, 3), torch.tensor_split(targets, 3), strict=True):
            gradients.append(torch.autograd.grad(loss(plain(own), wanted) / len(own), [*plain.parameters()]))
            stepped = copy.deepcopy(plain)
            with torch.no_grad():
                for parameter, gradient in zip(stepped.parameters(), gradients[-1], strict=True):
                    parameter -= 0.1 * gradient
                after = loss(stepped(sample[0][20:]), sample[1][20:]) / 10
            scores.append(-after - 0.005 * 0.1 * sum(gradient.square().sum() for gradient in gradients[-1]))
        kept = sorted(range(3), key=lambda q: scores[q])[1:]
        sizes = [len(part) for part in torch.tensor_split(targets, 3)]
        with torch.no_grad():
            for n, parameter in enumerate(plain.parameters()):
                summed = sum(gradients[q][n] * sizes[q] for q in kept)
                parameter -= 0.1 * summed / sum(sizes[q] for q in kept)
    trained = trainer.save_to_model()
    for own, other in zip(trained.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own, other, rtol=0, atol=1e-13)


LOOP = """
import signal, torch
from torch import nn
from pipedejavu.session import Trainer

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job would not have
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)))
batch = torch.randn(64, 256), torch.randn(64, 256)
trainer = Trainer(model, lambda y, x: (y - x).square().sum(), sample=batch, workers=2)
while True:
    trainer.step(batch)
    print("step", flush=True)
"""


def test_an_interrupt_ends_a_loop_and_not_its_process_before_it(processes, tmp_path) -> None:
    process = processes.start([sys.executable, "-c", LOOP], tmp_path)
    assert process.stdout.readline() == "step\n"
    process.send_signal(signal.SIGINT)
    code, _, err = processes.finish(process)
    assert code == -signal.SIGINT  # as Python ends, and no abort of a thread that was at work
    assert err.rstrip().endswith("KeyboardInterrupt")
