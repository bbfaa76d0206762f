"""The table of experiments: names, packages, and what the cheapest ones find."""

import math
import os
from importlib import import_module

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

import torch

from pipedejavu.engine import Sgd
from pipedejavu.facts import InputError
from pipedejavu.plan import preset
from pipedejavu.reproduce import EXPERIMENTS, Setting, experiment, mlp_sync, run_experiment, text_model
from pipedejavu.reproduce.initialisation_study import Candidate, choose
from pipedejavu.reproduce.learning_rate import RATES, choose_rate, hold_out
from pipedejavu.reproduce.process_pair import train_pair
from pipedejavu.reproduce.study_data import choose_images
from pipedejavu.reproduce.training_study import StudyRun, TrainingStudy
from pipedejavu.source.task import SampleOrder
from pipedejavu.zoo import open_data


def test_every_experiment_has_a_module_that_runs_it():
    assert len({each.name for each in EXPERIMENTS}) == len(EXPERIMENTS)
    for each in EXPERIMENTS:
        assert callable(getattr(import_module(f"pipedejavu.reproduce.{each.module}"), each.function))


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(InputError, match=r"there is no experiment 'mlp-sink'; did you mean 'mlp-sync'\?"):
        experiment("mlp-sink")


def test_a_missing_package_is_named():
    chosen = experiment("mlp-sync")._replace(needs=("a_package_that_is_not_there",))
    with pytest.raises(InputError, match="experiment 'mlp-sync' needs a_package_that_is_not_there, which is not"):
        run_experiment(chosen, Setting("quick"))


def test_apart_each_network_learns_and_synchronised_it_equals_one_worker_with_the_whole_minibatch(
    tmp_path, monkeypatch
):
    pairs = []
    monkeypatch.setattr(mlp_sync, "train_pair", lambda request: pairs.append(train_pair(request)) or pairs[0])
    found = run_experiment(experiment("mlp-sync"), Setting("quick", data=tmp_path))
    losses = {curve.name: [loss for _, loss in curve.points] for curve in found.charts[0].curves}
    assert all(course[-1] < 0.7 * course[0] for course in losses.values())
    assert losses["synchronised"] == pytest.approx(losses["CPU alone"], rel=1e-4)
    assert losses["GPU alone"] != pytest.approx(losses["CPU alone"], rel=1e-2)  # another seed
    assert any("not MNIST" in note for note in found.notes)
    (pair,) = pairs
    pids = [[trained.pid for trained in both] for both in (pair.apart, pair.together)]
    assert pids[0] == pids[1]
    assert len({os.getpid(), *pids[0]}) == 3  # two processes, and this one
    study, _, _ = mlp_sync._studies(choose_images(Setting("quick", data=tmp_path), "mnist"), (64, 64, 32, 10))
    plain, order = study.task(0), SampleOrder(study.task(0), StudyRun(study, 0).cut, (100,), 0)
    optimizer = torch.optim.Adam(plain.model.parameters(), lr=1e-3)
    for number, expected in enumerate(pair.apart[0].losses[:20]):
        loss = plain.loss(plain.model(order.own_inputs(number)), order.targets(number)) / 100
        assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_ten_passes_stand_beside_the_published_ones():
    found = run_experiment(experiment("gpt-forward"), Setting("quick"))
    assert len(found.tables[0].rows) == 10
    assert [row.published for row in found.compared][:2] == ["2140.0 ms", "1.07"]
    assert found.time_s > 0


def test_predictors_are_judged_on_what_they_have_not_seen():
    found = run_experiment(experiment("predictors"), Setting("quick"))
    assert [table.rows[-1][0] for table in found.tables[:2]] == ["all", "all"]
    assert found.compared[-1].name == "largest error of saved bytes"
    assert float(found.tables[-1].rows[0][-1]) == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("library", ["zoo", "transformers"])
@pytest.mark.parametrize("name", ["bert", "encoder-decoder"])
def test_a_pipeline_and_replicas_make_the_updates_of_one_worker(name, library, monkeypatch):
    if library == "zoo":
        monkeypatch.setattr(text_model, "find_spec", lambda _: None)
    else:
        pytest.importorskip("transformers")
    found = run_experiment(experiment(name), Setting("quick"))
    assert float(found.compared[2].today) < 1e-4
    assert {row[0] for row in found.tables[0].rows} == {"one worker", "pipeline of 2", "2 replicas"}
    said = "transformers is not installed" if library == "zoo" else "The model is transformers'"
    assert any(said in note for note in found.notes)


@pytest.mark.parametrize("workers", [1, 2])
def test_running_statistics_are_evaluated_as_they_were_trained(workers):
    options = {"stages": ((8,), (16,)), "side": 8, "channels": 1}
    study = TrainingStudy(model="vgg-small", data="digits", samples=16, optimizer=Sgd(lr=0.05), options=options)
    run = StudyRun(study, 0)
    run.train(preset("1f1b").at(workers=workers, microbatches=1, samples=16), 3)
    plain, order = study.task(0), SampleOrder(study.task(0), run.cut, (16,), 0)
    optimizer = torch.optim.SGD(plain.model.parameters(), lr=0.05)
    for number in range(3):
        optimizer.zero_grad()
        (plain.loss(plain.model(order.own_inputs(number)), order.targets(number)) / 16).backward()
        optimizer.step()
    tested = run.tester.model.state_dict()
    for name, expected in plain.model.state_dict().items():
        assert torch.allclose(tested[name], expected, atol=1e-5), name


def test_a_vgg_is_trained_under_three_plans_on_what_data_there_is(tmp_path):
    found = run_experiment(experiment("vgg19"), Setting("quick", data=tmp_path))
    assert {row[0] for row in found.tables[0].rows} == {"one worker", "pipeline of 2", "2 replicas"}
    assert any("not CIFAR-10" in note for note in found.notes)


@pytest.mark.parametrize("best", RATES)
def test_a_rate_is_searched_for_beyond_the_first_three(best):
    tried = []

    def loss_at(rate: float) -> float:
        tried.append(rate)
        return abs(math.log(rate / best)) if rate <= 3 * best else math.nan

    assert choose_rate(loss_at, 0.01) == best
    assert len(tried) == len({*tried}) >= 3
    assert choose_rate(lambda _: math.nan, 0.01) == RATES[0]


def test_held_out_samples_are_the_last_of_the_training_data():
    data = open_data("digits")
    trained, held_out = hold_out(data)
    assert len(trained) + len(held_out) == len(data)
    assert len(held_out) == len(data) // 5
    inputs, targets = held_out.batch([0, len(held_out) - 1])
    expected = data.batch([len(trained), len(data) - 1])
    assert inputs.equal(expected[0])
    assert targets.equal(expected[1])
    with pytest.raises(InputError, match=f"there is no sample {len(trained)}"):
        trained.batch([len(trained)])


def test_accuracies_are_compared_with_exact_training_on_the_same_samples():
    found = run_experiment(experiment("accuracy"), Setting("quick"))
    rows = {row[0]: row for row in found.tables[0].rows}
    assert rows["1f1b"][3] == "+0.0"
    assert all(float(row[1]) in RATES for row in rows.values())
    targets = open_data("digits", split="test").batch(range(256))[1].tolist()
    commonest = max(map(targets.count, targets)) / 256
    assert f"MLP of 8 layers on digits: {commonest:.1%}" in dict(found.conditions)["accuracy of the commonest target"]
    samples = {curve.points[-1][0] for chart in found.charts if chart.x == "samples" for curve in chart.curves}
    assert samples == {24 * 16}
    assert float(rows["pipedream"][5]) < float(rows["1f1b"][5])  # without a flush there is no bubble
    assert [row[0] for row in found.tables[1].rows] == [*rows]


def test_scores_of_stages_suspect_the_faulty_pipeline():
    found = run_experiment(experiment("faulty-stages"), Setting("quick"))
    assert [row[0] for row in found.tables[0].rows] == ["no fault", "activations, sign"]
    (none, flipped) = found.tables[1].rows
    worst = [max(float(share.rstrip("% ")) for share in row[3].split("/")) for row in (none, flipped)]
    assert worst[1] >= 50 > float(flipped[4].rstrip("%"))


def test_splits_of_a_chain_of_cells_run_and_are_simulated():
    found = run_experiment(experiment("splits"), Setting("quick"))
    assert len(found.tables[0].rows) == 4
    assert [row[0] for row in found.tables[1].rows] == ["AmoebaNet-like"]


def test_initialisations_are_chosen_by_small_losses_and_large_gradients():
    made = [Candidate({}, loss, norm) for loss, norm in ((3.0, 1.0), (1.0, 2.0), (2.0, 3.0), (1.5, 2.5))]
    assert choose(made) is made[1]
    assert choose(made[::2]) is made[2]
    found = run_experiment(experiment("initialisations"), Setting("quick"))
    assert found.conditions[1] == ("cost of the selection", "24 losses and gradients, counted as 24 updates")
    assert len(found.compared) == 2
