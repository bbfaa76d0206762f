"""Workers that divide the sequence or the vocabulary train as one process does."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from pipedejavu.engine.threads import Threads
from pipedejavu.facts import FaultsError, InputError
from pipedejavu.plan import preset
from pipedejavu.plan.axis import Cut, Keep, Order, Place
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate.unit_cost import unit_costs
from tests.engine.divided_case import divided_case
from tests.engine.test_divided_run import _run

LAYOUTS = [("sequence",), ("vocabulary",), ("sequence", "vocabulary"), ("context",)]
PLACES = [{"shards": 2}, {"shards": 4}, {"shards": 2, "workers": 2}, {"shards": 2, "workers": 2, "replicas": 2}]
SAMPLE = [(LAYOUTS[2], PLACES[1]), (LAYOUTS[3], PLACES[1]), (LAYOUTS[2], PLACES[2]), (LAYOUTS[3], PLACES[2])]
"""What runs each time; the rest is slow."""
ALL = [(layouts, place) for layouts in LAYOUTS for place in PLACES]


@pytest.fixture(autouse=True)
def _double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("layouts", "place"),
    [pytest.param(*row, marks=[] if row in SAMPLE else pytest.mark.slow, id=str(row)) for row in ALL],
)
def test_training_equals_a_plain_loop(layouts, place):
    # With targets that do not count, dropout and tied weights.
    case = divided_case("tokens", **place, layouts=layouts, clip_norm=0.5)
    assert case.furthest(case.trained_plainly()) <= 1e-12
    assert case.audit() <= 1e-12
    assert case.moved() > 1e-6


@pytest.mark.parametrize("kept", [{"recompute": 1.0}, {"recompute_units": (1, 3)}, {"is_eager": True}])
@pytest.mark.parametrize("layouts", [LAYOUTS[2], LAYOUTS[3]])
def test_recomputed_and_eager_pieces_equal_a_plain_loop(layouts, kept):
    case = divided_case("tokens", layouts=layouts, **kept)
    assert case.furthest(case.trained_plainly()) <= 1e-12


@pytest.mark.parametrize("layouts", [LAYOUTS[0], LAYOUTS[3]])
def test_a_recomputed_unit_keeps_its_part_of_the_sequence(layouts):
    case = divided_case("tokens", layouts=layouts, recompute=1.0, units=4, is_eager=True)
    threads = Threads(case.program, case.job, case.batches)
    (_, _, unit), *_ = threads.handlers[0].runners[0, 0].units
    kept = unit(case.batches.inputs(0))  # of an embedding, which calls no other worker unless it is divided itself
    threads.close()
    assert kept.shape[1] == 4


@pytest.mark.parametrize(
    ("model", "options", "sentence"),
    [
        ("heads", {"layouts": ("context",)}, r"the sequence of an attention .*: its attentions .* have 3 tokens"),
        ("heads", {"layouts": ("sequence",)}, r"the sequence of an attention .*: its attentions .* have 3 tokens"),
        ("heads", {"layouts": ("vocabulary",)}, "its cross-entropy has 7 classes, which must divide evenly"),
        ("wide-mlp", {"layouts": ("context",)}, r"none for the sequence .* have no tokens per sample"),
    ],
)
def test_what_cannot_be_divided_is_refused(model, options, sentence):
    case = divided_case(model, **options)
    with pytest.raises(InputError, match=sentence):
        Threads(case.program, case.job, case.batches)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cut": Cut(kind="layout", layouts=("sequence",))}, "add 'head', 'row', 'col' and 'row' to cut.layouts"),
        ({"cut": Cut(kind="layout", layouts=("context", "head"))}, "leave the other layouts out, or use 'sequence'"),
        ({"cut": Cut(kind="chain", layouts=("context",)), "place": Place()}, "set place.stage_shards, or leave"),
        ({"cut": Cut(kind="chain", layouts=("row",))}, "leave all but 'sequence', 'vocabulary' and 'context' out"),
        ({"cut": Cut(kind="layout", layouts=("stationary-x", "sequence", "row"))}, "both channels of pictures and tok"),
        ({"order": Order(head_chunks=4)}, "leave order.head_chunks out, or use layout 'sequence' without 'vocabulary'"),
    ],
)
def test_plans_that_divide_twice_are_refused(changes, sentence):
    plan = preset("vocabulary").plan.replace(**changes)
    with pytest.raises(FaultsError, match=sentence):
        compile_plan(*unit_costs(plan, {}), fold=False)


@pytest.mark.parametrize("layouts", [LAYOUTS[2], LAYOUTS[3]])
def test_a_checkpoint_continues_under_any_plan(layouts):
    torch.manual_seed(3)
    expected = divided_case("tokens", shards=1, rounds=4).trained_plainly()
    torch.manual_seed(3)
    state = _run(divided_case("tokens", layouts=layouts, shards=4, rounds=4), 0, 2, None)
    for options in ({"shards": 2, "layouts": LAYOUTS[3]}, {"shards": 1}, {"shards": 2, "layouts": LAYOUTS[1]}):
        torch.manual_seed(3)
        final = _run(divided_case("tokens", **options, rounds=4), 2, 2, state)
        for name, tensor in final.items():
            if name.startswith("weight/"):
                torch.testing.assert_close(tensor, expected[name.removeprefix("weight/")], rtol=0, atol=1e-12)


@pytest.mark.parametrize("layouts", [LAYOUTS[0], LAYOUTS[3]])
def test_parts_of_checkpoints_rest_on_the_host(layouts):
    case = divided_case("tokens", layouts=layouts, workers=2, recompute_units=(1, 3))
    case = replace(case, type_="gpu", plan=case.plan.replace(keep=Keep(activations="host")))
    assert case.furthest(case.trained_plainly()) <= 1e-12
    copies = [str(a) for worker in case.program.workers for a in worker.actions if str(a).startswith("OFFLOAD")]
    assert copies


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


@pytest.mark.parametrize("layouts", [(), LAYOUTS[0]])
def test_a_unit_that_draws_more_than_dropouts_is_refused(layouts):
    case = divided_case("tokens", layouts=layouts)
    case.units.insert(2, ("noise", Noisy()))
    with pytest.raises(InputError, match="unit 'noise' draws random numbers with 'rand_like', which they would not"):
        Threads(case.program, case.job, case.batches)
