"""A worker that raises, in any lane: its own exception reaches the caller and every thread ends."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipedejavu.engine import run_threads
from pipedejavu.engine.handlers import Handlers
from pipedejavu.engine.threads import Threads
from pipedejavu.engine.wire import ThreadWire
from pipedejavu.facts import InputError


class BrokenError(Exception):
    """What goes wrong below."""


def fails(case):
    """Runs a case in a thread of its own; returns the exception, once nothing of the run is left."""
    before = set(threading.enumerate())
    caught = []

    def run():
        try:
            run_threads(case.program, case.job, case.batches)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "the run did not end"
    left = [t for t in threading.enumerate() if t not in before]
    for other in left:
        other.join(5)
    assert not [t for t in left if t.is_alive()], "threads of the run are left"
    return caught[0]


class Breaks(nn.Linear):
    """A unit that raises at its n-th forward, or in a backward of that or a later one."""

    def __init__(self, at, where):
        super().__init__(5, 5)
        self.left, self.where = at, where
        self.error = BrokenError("the unit is broken")

    def __deepcopy__(self, memo):
        return self

    def forward(self, x):
        self.left -= 1
        y = super().forward(x)
        if self.left > 0:
            return y
        if self.where == "forward":
            raise self.error
        y.register_hook(self.raises)
        return y

    def raises(self, _):
        raise self.error


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("worker", [0, 1, 2])
@pytest.mark.parametrize("name", ["1f1b", "pipedream", "axonn", "zb-h1", "hippie", "fine"])
def test_the_exception_of_a_unit_reaches_the_caller(make, name, worker, where):
    case = make(name, workers=3, microbatches=6, units=6)
    case.units[2 * worker] = (f"u{2 * worker}", Breaks(3, where))
    error = fails(case)
    assert error is case.units[2 * worker][1].error


@pytest.mark.parametrize(
    "name", ["ddp", "zero-1", "zero-2", "zero-3", "parameter-server", "easgd", "hogwild", "coarse", "hetpipe", "byteps"]
)
def test_workers_that_wait_for_a_group_or_a_server_end_too(make, name):
    case = make(name, workers=2, microbatches=4, units=4)
    case.units[1] = ("u1", Breaks(2, "forward"))
    assert fails(case) is case.units[1][1].error


def broken_when(method, is_it):
    """Returns a method that raises where `is_it` says so."""

    def run(self, *args, **named):
        if is_it(self, *args):
            raise BrokenError(f"{method.__name__} is broken")
        return method(self, *args, **named)

    return run


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize(
    ("lane", "name", "method", "target"),
    [
        ("net out", "1f1b", "send", ThreadWire),
        ("net in", "1f1b", "receive", ThreadWire),
        ("net group", "ddp", "add_up", ThreadWire),
        ("scattered sum", "zero-2", "reduce_scatter", ThreadWire),
        ("gather", "zero-3", "all_gather", ThreadWire),
        ("server out", "parameter-server", "send", ThreadWire),
        ("host", "fine", "do", None),
        ("copy-out", "fine", "offload", Handlers),
        ("copy-in", "fine", "fetch", Handlers),
        ("data", "hyscale", "fetch", Handlers),
    ],
)
def test_the_exception_of_any_lane_reaches_the_caller(make, monkeypatch, lane, name, method, target, worker):
    case = make(name, workers=2, microbatches=4, units=4)
    if target is None:
        broken = broken_when(Handlers.do, lambda own, a: own.index == worker and a.via == "~host")
        monkeypatch.setattr(Handlers, "do", broken)
    else:
        of = (lambda own: own.worker) if target is ThreadWire else (lambda own: own.index)
        monkeypatch.setattr(target, method, broken_when(getattr(target, method), lambda own, *_: of(own) == worker))
    error = fails(case)
    assert isinstance(error, BrokenError)
    assert "is broken" in str(error)


def test_a_server_that_raises_stops_the_workers(make, monkeypatch):
    case = make("parameter-server", workers=3, microbatches=4)
    broken = broken_when(Handlers.do, lambda own, a: own.index == 3 and a.kind == "UPDATE" and a.version == 2)
    monkeypatch.setattr(Handlers, "do", broken)
    assert str(fails(case)) == "do is broken"


def test_the_loss_of_the_last_stage_raises(make):
    case = make("gpipe", workers=3, microbatches=4)
    case.batches.y[2] = torch.zeros(99, dtype=torch.int64)
    assert isinstance(fails(case), ValueError)


def test_a_loss_that_is_no_number_stops_with_step_and_worker(make):
    case = make("1f1b", workers=2, microbatches=2, steps=3)
    case.batches.x[3][0, 0] = float("nan")
    error = fails(case)
    assert isinstance(error, InputError)
    assert "the loss is nan in step 2, microbatch 3, on worker 1" in str(error)


def test_a_loss_that_is_no_number_can_be_skipped_where_there_is_a_norm(make):
    case = make("1f1b", workers=2, microbatches=2, steps=3, clip="global", extra={"on_nan": "skip"})
    case.batches.x[3][0, 0] = float("nan")
    assert case.audit() <= case.tolerance
    assert all(bool(w.isfinite().all()) for weights in case.outcome.weights.values() for w in weights.values())


def test_samples_that_cannot_be_read_stop_the_run(make):
    case = make("1f1b", workers=2, microbatches=4)
    del case.batches.x[5:]
    assert isinstance(fails(case), IndexError)


def test_clipping_needs_a_plan_that_takes_the_norm(make):
    error = fails(make("1f1b", workers=2, microbatches=2, clip_norm=0.5))
    assert isinstance(error, InputError)
    assert str(error).startswith("the job clips gradients to the norm 0.5, but plan '1f1b' takes no norm; set")


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_compiled_units_are_refused_where_the_backward_is_split(make, name):
    case = make(name, workers=2)
    case.units[1][1].compile(backend="eager")
    with pytest.raises(
        InputError, match=f"is compiled and order '{name}' splits the backward, which a compiled module"
    ):
        run_threads(case.program, case.job, case.batches)


class Losing:
    """A queue of which an interrupt takes the first word with it, as it may when it comes while one is handed over."""

    def __init__(self, words):
        self.words, self.is_lost = words, False

    def put(self, word):
        self.words.put(word)

    def get(self):
        word = self.words.get()
        if not self.is_lost:
            self.is_lost = True
            raise KeyboardInterrupt
        return word


@pytest.mark.timeout(60)
def test_an_interrupt_that_loses_a_message_leaves_no_worker_waiting(make):
    case = make("1f1b", workers=2, microbatches=2)
    threads = Threads(case.program, case.job, case.batches)
    threads._ends = Losing(threads._ends)
    for _ in range(2):  # what was interrupted has lost its state
        with pytest.raises(KeyboardInterrupt):
            threads.run()


@pytest.mark.timeout(60)
def test_an_interrupt_before_all_workers_have_begun_leaves_no_worker_waiting(make):
    before = set(threading.enumerate())
    case = make("1f1b", workers=2, microbatches=2)
    threads = Threads(case.program, case.job, case.batches)

    def do(call):
        raise KeyboardInterrupt

    threads.threads[1] = SimpleNamespace(do=do)
    with pytest.raises(KeyboardInterrupt):
        threads.run()
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(5)
    assert not any(thread.is_alive() for thread in left)
