"""Several initialisations: who leaves when, that the choice is the same on any number of workers, and what goes on."""

import json
import math
from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file

from pipedejavu.facts import InputError
from pipedejavu.launch import RankGroup, choose_init, plan_run, train
from pipedejavu.launch.init_selection import InitSelection
from pipedejavu.launch.init_trial import InitTrial, run_init_trials
from pipedejavu.plan import preset
from pipedejavu.run import TrainOptions
from pipedejavu.source.task import prepare

SEED, SAMPLES = 3, 4
OPTIONS = TrainOptions(
    model="mlp", data="random:64", dtype="float64", seed=SEED, optimizer="sgd", lr=0.02, momentum=0.9, steps=14,
    init_candidates=5, init_steps=12, checkpoint_every=0,
)  # fmt: skip


def run_race(curves, steps):
    selection = InitSelection(len(curves), steps)
    while not selection.is_over:
        selection.take([curve(selection.updates) for curve in curves])
    return selection


def falling(update, floor):
    """A steep fall from 10 to its floor: halfway every three updates."""
    return floor + (10 - floor) * 0.5 ** (update / 3)


def test_the_first_steep_fall_drops_no_candidate_and_plateaus_drop_the_worse_half():
    floors = [5.0, 1.0, 4.0, 2.0, 8.0, 3.0, 7.0, 6.0]
    selection = run_race([partial(falling, floor=floor) for floor in floors], 50)
    # Windows of 5 shrink falls by 0.5^(5/3) = 0.31, then 0.1: the third fall, behind window 4, is the first below 0.25.
    assert selection.drops == [(20, (0, 4, 6, 7)), (25, (2, 5)), (30, (3,))]
    assert selection.winner == 1
    assert [len(losses) for losses in selection.losses] == [20, 30, 25, 30, 20, 25, 20, 20]


def test_who_falls_later_but_further_is_not_dropped_in_the_fall():
    """Candidate 1 is behind as long as candidate 0 falls, then far ahead; both still fall, so both stay."""
    selection = run_race([lambda t: 10 - 0.1 * t, lambda t: 11 - 0.15 * t], 50)
    assert selection.drops == []
    assert selection.winner == 1


def test_without_a_plateau_the_lowest_last_window_wins_at_the_end():
    selection = run_race([lambda t: 9 - 0.1 * t, lambda t: 8 - 0.1 * t, lambda t: 8 - 0.1 * t], 20)
    assert (selection.drops, selection.updates, selection.winner) == ([], 20, 1)


def test_what_is_no_number_loses():
    selection = run_race([lambda t: math.nan if t > 3 else 1.0, partial(falling, floor=2.0)], 30)
    assert selection.winner == 1
    assert selection.drops[0][1] == (0,)


def test_a_loss_that_only_rises_is_no_plateau():
    assert run_race([lambda t: 1.0 + t, lambda t: 2.0 + t], 30).drops == []


@pytest.fixture(scope="module")
def program():
    plan = preset("ddp").at(workers=2, microbatches=1, samples=SAMPLES)
    return plan_run(OPTIONS, plan).program


def nothing(_):
    return None


def test_the_choice_does_not_depend_on_who_trains_whom(program):
    alone, winner = run_init_trials(OPTIONS, program, 0, 1, nothing)
    assert winner is not None
    again, _ = run_init_trials(OPTIONS, program, 0, 1, nothing)
    assert alone.losses == again.losses
    halves = [compete_share(program, rank) for rank in (0, 1)]
    # Each rank fills in its own; together they are what one rank alone has.
    for number, losses in enumerate(alone.losses):
        assert halves[number % 2][number][: len(losses)] == losses


def compete_share(program, rank):
    """Returns the losses of a rank's candidates, none of which is dropped."""
    batches = prepare(OPTIONS, program.sizes).batches
    found = {}
    for number in range(rank, OPTIONS.init_candidates, 2):
        candidate = InitTrial(OPTIONS, program, rank, number, batches)
        found[number] = [candidate.step() for _ in range(OPTIONS.init_steps)]
    return found


def test_candidates_differ_in_their_weights_and_in_nothing_else(program):
    batches = prepare(OPTIONS, program.sizes).batches
    first = InitTrial(OPTIONS, program, 0, 0, batches)
    other = InitTrial(OPTIONS, program, 0, 2, batches)
    own = dict(prepare(OPTIONS.replace(seed=SEED + 2), program.sizes).job.units)
    for unit, module in own.items():
        for name, parameter in module.named_parameters(prefix=unit):
            assert torch.equal(other.state()[f"weight/{name}"], parameter)
            assert name.endswith("bias") or not torch.equal(first.state()[f"weight/{name}"], parameter)
    assert first.threads.handlers[0].job.seed == other.threads.handlers[0].job.seed == SEED


@pytest.mark.slow
def test_a_run_continues_from_the_winner_and_counts_every_sample(tmp_path, program):
    """The weights that a run leaves are those of the winner's own training, from its first update to the last."""
    folder = str(tmp_path / "run")
    chosen = choose_init(OPTIONS, program, folder, RankGroup())
    selection, winner = run_init_trials(OPTIONS, program, 0, 1, nothing)
    assert winner is not None
    assert chosen.winner == selection.winner
    assert chosen.updates == tuple(map(len, selection.losses))
    assert (chosen.start.step, chosen.start.samples) == (selection.updates, selection.updates * 2 * SAMPLES)
    assert chosen.samples == sum(map(len, selection.losses)) * 2 * SAMPLES
    options, goes_on, _ = plan_run(OPTIONS, program.plan, program.machine, profile=program.profile, start=chosen.start)
    done = train(options, goes_on, folder, chosen.start)
    expected = [winner.step() for _ in range(selection.updates, OPTIONS.steps)]
    state = winner.state()
    # Two replicas sum what one sums one after the other: a few roundings of weights below 4 in each update.
    tolerance = OPTIONS.steps * 4 * torch.finfo(torch.float64).eps * 8
    for name, weight in load_file(done.folder.model).items():
        assert float((weight - state[f"weight/{name}"]).abs().max()) <= tolerance
    rows = [json.loads(line) for line in done.folder.metrics.read_text().splitlines()]
    steps = [row for row in rows if "step" in row]
    assert [row["step"] for row in steps] == [*range(1, OPTIONS.steps + 1)]
    assert [row["loss"] for row in steps] == pytest.approx([*selection.losses[selection.winner], *expected], rel=1e-12)
    told = next(row["candidates"] for row in rows if "candidates" in row)
    assert (told["winner"], told["samples"]) == (chosen.winner, chosen.samples)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"init_steps": 14}, "candidates train for up to 14 steps (--init-steps) of the run's 14; use fewer"),
        ({"keeps_log": True}, "--audit replays a run from its beginning, which is before the winner is chosen"),
    ],
)
def test_what_candidates_cannot_do_is_refused_before_anything_starts(tmp_path, program, changes, sentence):
    with pytest.raises(InputError) as told:
        choose_init(OPTIONS.replace(**changes), program, str(tmp_path / "run"), RankGroup())
    assert sentence in str(told.value)
    assert list(tmp_path.iterdir()) == []


def test_models_that_do_not_depend_on_the_seed_are_refused(tmp_path, program, monkeypatch):
    lines = (
        "from torch.nn.functional import cross_entropy",
        "from pipedejavu.zoo import build",
        "def make():",
        "    task = build('mlp', seed=1, data='random:64')",
        "    samples = list(zip(*task.data.batch(range(64))))",
        "    return task.model, lambda out, y: cross_entropy(out, y, reduction='sum'), samples",
    )
    (tmp_path / "same.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        InputError, match=r"all 5 candidates begin alike, with a loss of .*: the model does not depend on"
    ):
        run_init_trials(OPTIONS.replace(model="same.py:make", data=None, dtype="float32"), program, 0, 1, nothing)
