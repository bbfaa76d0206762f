from pathlib import Path

import pytest

from pipedejavu.facts import FaultsError
from pipedejavu.plan import AXES, Cut, Decision, Feed, Keep, Order, Place, Plan, Precision, Reduce, presets


@pytest.mark.parametrize("name", presets())
def test_a_preset_comes_back_from_its_json(name: str, tmp_path: Path) -> None:
    plan = presets()[name].plan
    assert Plan.from_json(plan.to_json()) == plan
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(name=""),
        Plan(name="ünï 'quoted'\n", bucket_bytes=0, steps=7, is_compiled=True),
        Plan(decisions=(Decision(axis="cut", choice="chain(4)", reason="five units"),) * 2),
        Plan(cut=Cut(kind="chain", stages=3, bounds=(1, 5)), place=Place(workers=3, devices=("c", "b", "a"))),
        Plan(cut=Cut(kind="chain"), place=Place(stage_replicas=(3, 1)), feed=Feed(microbatches=6, samples=2)),
        Plan(
            cut=Cut(kind="chain"), place=Place(workers=2, stage_shards=(4, 1)), keep=Keep(kind="zero-1", zeros=(0, 1))
        ),
        Plan(feed=Feed(kind="share", shares=(0.1, 0.9)), place=Place(replicas=2)),
        Plan(feed=Feed(kind="mask", budgets=(1.0, 1e-9))),
        Plan(reduce=Reduce(clip="delayed", has_buffer_broadcast=True), keep=Keep(versions=3, persists=True)),
        Plan(order=Order(recompute=1 / 3, recomputes_early=True, prefetch=9)),
    ],
)
def test_an_odd_plan_comes_back_from_its_json(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


def test_json_holds_only_what_was_chosen() -> None:
    plan = Plan(name="mine", cut=Cut(kind="chain"), place=Place(workers=2))
    assert plan.to_json(indent=None) == '{"name":"mine","cut":{"kind":"chain"},"place":{"workers":2}}'


def test_all_faults_of_a_plan_file_stand_in_one_message() -> None:
    with pytest.raises(FaultsError) as caught:
        Plan.from_json(
            '{"cut":{"kind":"chains"},"plase":{},"feed":{"microbatch":8},"bucket_bytes":"5 s","steps":0}', "p.json"
        )
    assert str(caught.value) == (
        "p.json has 5 faults:\n"
        "  - cut.kind: 'chains' is not one of its values; did you mean 'chain'?\n"
        "  - unknown key 'feed.microbatch'; did you mean 'microbatches'?\n"
        "  - steps: Input should be greater than or equal to 1, found 0\n"
        "  - bucket_bytes: '5 s' is in seconds; this needs bytes (B)\n"
        "  - unknown key 'plase'; did you mean 'place'?"
    )


def test_axes_are_short_texts_and_the_default_precision_is_left_out() -> None:
    axes = Plan().axes()
    assert (*axes, "precision") == AXES
    assert Plan(precision=Precision(compute="tf32")).axes() == axes | {"precision": "tf32"}
    assert axes == {
        "cut": "whole",
        "place": "one",
        "feed": "microbatch",
        "order": "step",
        "version": "sync",
        "reduce": "–",
        "keep": "replicated",
    }
    assert Plan(order=Order(recompute=0.5)).axes()["keep"] == "replicated, checkpoint"


@pytest.mark.parametrize(
    ("place", "pipeline_size", "num_workers"),
    [
        (Place(), 1, 1),
        (Place(workers=4), 4, 4),
        (Place(workers=4, replicas=2), 4, 8),
        (Place(workers=2, replicas=3, shards=2), 2, 12),
        (Place(replicas=4, cpu_replicas=2, servers=3), 1, 9),
        (Place(stage_replicas=(3, 1, 2)), 6, 6),
        (Place(stage_replicas=(3, 1), cpu_replicas=1), 4, 5),
        (Place(kind="bidirectional", workers=4), 4, 4),
        (Place(kind="v", workers=4, chunks=2), 4, 4),
    ],
)
def test_workers_are_counted(place: Place, pipeline_size: int, num_workers: int) -> None:
    plan = Plan(cut=Cut(kind="chain"), place=place)
    assert plan.pipeline_size == pipeline_size
    assert plan.num_workers == num_workers


@pytest.mark.parametrize(
    ("place", "degrees"),
    [
        (Place(workers=2, replicas=2), (1, 1, 1, 1)),
        (Place(workers=2, replicas=2, stage_shards=(4, 1)), (4, 1, 4, 1)),
        (Place(stage_replicas=(1, 3), stage_shards=(2, 1)), (2, 1, 1, 1)),
        (Place(workers=2, stage_shards=(2, 2), cpu_replicas=1, servers=1), (2, 2, 1, 1)),
        (Place(kind="loop", workers=2, chunks=2, stage_shards=(2, 4)), (2, 4)),
        (Place(shards=2), (1, 1)),
    ],
)
def test_devices_of_each_worker_are_counted(place: Place, degrees: tuple[int, ...]) -> None:
    plan = Plan(cut=Cut(kind="chain"), place=place)
    assert plan.degrees == degrees
    assert len(degrees) == plan.num_workers


def test_each_stage_has_its_own_zero_or_that_of_all() -> None:
    assert [Plan(keep=Keep(kind="zero-2")).zero_of(stage) for stage in range(2)] == [2, 2]
    assert [Plan(keep=Keep(kind="zero-3", zeros=(1, 3))).zero_of(stage) for stage in range(2)] == [1, 3]
    assert Plan(keep=Keep(kind="split")).zero_of(0) == 0


@pytest.mark.parametrize(
    ("cut", "place", "order", "num_stages"),
    [
        ("whole", Place(replicas=4), "step", 1),
        ("layout", Place(shards=4), "step", 1),
        ("chain", Place(workers=4), "1f1b", 4),
        ("chain", Place(kind="loop", workers=4, chunks=3), "interleaved", 12),
        ("chain", Place(kind="v", workers=4), "zb-v", 8),
        ("chain", Place(kind="v", workers=4, chunks=2), "zb-v", 8),
        ("chain", Place(kind="bidirectional", workers=4), "chimera", 4),
        ("chain", Place(kind="bidirectional", workers=4, chunks=2), "chimera", 4),
        ("chain", Place(stage_replicas=(3, 1)), "1f1b", 2),
        ("chain", Place(), "layer-major", None),
    ],
)
def test_stages_are_counted(cut: str, place: Place, order: str, num_stages: int | None) -> None:
    plan = Plan(cut=Cut.model_validate({"kind": cut}), place=place, order=Order.model_validate({"kind": order}))
    assert plan.num_stages == num_stages


def test_what_an_order_implies() -> None:
    flush_free = {name for name, p in presets().items() if p.plan.is_flush_free}
    assert flush_free == {"pipedream", "pipedream-vertical", "pipedream-2bw", "spectrain", "pipemare", "hetpipe"}
    assert {name for name, p in presets().items() if p.plan.splits_backward} == {"zb-h1", "zb-v", "dualpipe-v"}
    assert {name for name, p in presets().items() if p.plan.prefetches_data} == {"hyscale"}
