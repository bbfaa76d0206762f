import ast
import re
from collections import Counter
from pathlib import Path

import pytest

import pipedejavu
from pipedejavu.facts import InputError
from pipedejavu.plan import Cut, Feed, Place, Plan, Preset, preset, presets, sized


def message_of(preset_: Preset, **sizes: int) -> str:
    with pytest.raises(InputError) as caught:
        preset_.at(**sizes)
    return str(caught.value)


@pytest.mark.parametrize("name", presets())
def test_a_preset_is_found_by_its_name(name: str) -> None:
    entry = preset(name)
    assert entry is presets()[name]
    assert entry.plan.name == name
    assert entry.title
    assert entry.at() == entry.plan


def test_a_preset_is_found_by_its_alias() -> None:
    assert preset("gems") is preset("gems-master")


def test_names_and_aliases_are_unique() -> None:
    names = Counter([*presets(), *(alias for p in presets().values() for alias in p.aliases)])
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ("gpip", "gpipe"),
        ("GPipe", "gpipe"),
        ("DDP", "ddp"),
        ("1F1B", "1f1b"),
        ("pipedream2bw", "pipedream-2bw"),
        ("gem", "gems"),
        ("ZeRO-3", "zero-3"),
        ("strongold", "stronghold"),
    ],
)
def test_an_unknown_preset_comes_with_the_nearest_name(asked: str, nearest: str) -> None:
    with pytest.raises(InputError) as caught:
        preset(asked)
    assert str(caught.value) == f"there is no preset '{asked}'; did you mean '{nearest}'?"


def test_a_preset_far_from_all_lists_them() -> None:
    with pytest.raises(InputError) as caught:
        preset("qqqqqqq")
    assert str(caught.value) == f"there is no preset 'qqqqqqq'; known: {', '.join([*presets(), 'gems'])}"


@pytest.mark.parametrize("size", ["workers", "microbatches", "replicas", "steps", "samples"])
@pytest.mark.parametrize("number", [0, -1])
@pytest.mark.parametrize("name", ["1f1b", "pipedream", "ddp", "l2l", "megatron"])
def test_sizes_are_one_or_more(name: str, size: str, number: int) -> None:
    assert message_of(preset(name), **{size: number}) == f"the number of {size} must be 1 or more, not {number}"


@pytest.mark.parametrize(
    ("name", "field", "num_workers"),
    [("gpipe", "workers", 6), ("ddp", "replicas", 6), ("megatron", "shards", 6), ("hetpipe", "workers", 13)],
)
def test_workers_grow_one_field(name: str, field: str, num_workers: int) -> None:
    before, after = preset(name).plan, preset(name).at(workers=6)
    assert after.place == before.place.replace(**{field: 6})
    assert after.num_workers == num_workers
    assert (after.feed, after.steps) == (before.feed, before.steps)


def test_one_worker_is_one_worker() -> None:
    assert preset("l2l").at(workers=1) == preset("l2l").plan
    assert message_of(preset("l2l"), workers=2).startswith("preset 'l2l' trains on one worker, not 2; ")


def test_replicas_beside_workers() -> None:
    plan = preset("1f1b").at(workers=3, replicas=2)
    assert (plan.place.workers, plan.place.replicas, plan.num_workers) == (3, 2, 6)
    assert preset("ddp").at(replicas=3) == preset("ddp").at(workers=3) == preset("ddp").at(workers=3, replicas=3)
    assert message_of(preset("ddp"), workers=4, replicas=2) == (
        "preset 'ddp' has one worker in each replica; give 4 workers or 2 replicas, not both"
    )


def test_budgets_are_repeated_for_more_replicas() -> None:
    assert preset("distreal").at(workers=2).feed.budgets == (1.0, 0.75)
    assert preset("distreal").at(workers=6).feed.budgets == (1.0, 0.75, 0.5, 0.25, 1.0, 0.75)
    assert preset("distreal").at(replicas=1).feed.budgets == (1.0,)
    plan = preset("distreal").plan
    changing = plan.replace(feed=plan.feed.replace(later_budgets=((0.5, 1.0, 1.0, 0.5),)))
    assert sized(changing).at(replicas=2).feed.later_budgets == ((0.5, 1.0),)


def test_microbatches_of_an_update_or_updates() -> None:
    assert (preset("gpipe").plan.feed.microbatches, preset("gpipe").plan.steps) == (8, 1)
    assert (preset("pipedream").plan.feed.microbatches, preset("pipedream").plan.steps) == (1, 8)
    assert (preset("gems-mast").plan.feed.microbatches, preset("gems-mast").plan.steps) == (2, 4)
    assert (preset("pipedream-2bw").plan.feed.microbatches, preset("pipedream-2bw").plan.steps) == (8, 3)


@pytest.mark.parametrize(
    ("name", "sizes", "microbatches", "steps"),
    [
        ("gpipe", {"microbatches": 5}, 5, 1),
        ("gpipe", {"microbatches": 5, "steps": 3}, 5, 3),
        ("gpipe", {"steps": 3}, 8, 3),
        ("pipedream-2bw", {"microbatches": 4}, 4, 3),
        ("pipedream", {"microbatches": 5}, 1, 5),
        ("pipedream", {"microbatches": 5, "steps": 3}, 1, 15),
        ("pipedream", {"steps": 3}, 1, 3),
        ("gems-mast", {"microbatches": 6}, 2, 3),
    ],
)
def test_microbatches_and_steps(name: str, sizes: dict[str, int], microbatches: int, steps: int) -> None:
    plan = preset(name).at(**sizes)
    assert (plan.feed.microbatches, plan.steps) == (microbatches, steps)


def test_microbatches_make_whole_updates() -> None:
    assert message_of(preset("gems-mast"), microbatches=5) == (
        "preset 'gems-mast' updates every 2 microbatches; 5 is not a multiple of 2"
    )


@pytest.mark.parametrize("name", presets())
def test_samples_change_nothing_else(name: str) -> None:
    before, after = preset(name).plan, preset(name).at(samples=16)
    assert after == before.replace(feed=before.feed.replace(samples=16))


@pytest.mark.parametrize(
    ("plan", "grows"),
    [
        (Plan(name="mine"), "replicas"),
        (Plan(name="mine", cut=Cut(kind="chain")), "workers"),
        (Plan(name="mine", cut=Cut(kind="layout", layouts=("col",))), "shards"),
    ],
)
def test_an_own_plan_grows_by_its_cut(plan: Plan, grows: str) -> None:
    scaled = sized(plan)
    assert (scaled.title, scaled.grows, scaled.at()) == ("mine", grows, plan)
    assert scaled.at(workers=3).place == Place.model_validate({grows: 3})
    assert scaled.at(microbatches=5, steps=2, samples=4) == plan.replace(feed=Feed(microbatches=5, samples=4), steps=2)


def test_an_own_plan_with_workers_for_each_stage_keeps_them() -> None:
    plan = Plan(name="mine", cut=Cut(kind="chain"), place=Place(stage_replicas=(3, 1)))
    assert message_of(sized(plan), workers=8) == (
        "plan 'mine' sets the workers of each stage; change place.stage_replicas, not their number"
    )
    assert sized(plan).at(microbatches=6).place == plan.place


ALGORITHMS = (
    "gpipe", "pipedream", "2bw", "hippie", "gems", "chimera", "zerobubble", "zbh1", "zbv", "dualpipe", "l2l", "ddp",
    "zero1", "zero2", "zero3", "megatron", "dryden", "hogwild", "easgd", "zeno", "hetpipe", "hyscale", "distreal",
    "byteps", "axonn", "cotrain", "stronghold", "1f1b", "onefoneb",
)  # fmt: skip


def _named_after_an_algorithm(package: Path) -> list[str]:
    lines = []
    for path in sorted(package.rglob("*.py")):
        classes = [n.name for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.ClassDef)]
        modules = [path.stem, path.parent.name]
        for name in [*modules, *classes]:
            plain = re.sub(r"[^a-z0-9]", "", name.lower())
            lines += [f"{path.relative_to(package)}: {name}" for a in ALGORITHMS if a in plain]
    return lines


def test_a_preset_is_data_and_not_code() -> None:
    assert _named_after_an_algorithm(Path(pipedejavu.__file__).parent) == []


def test_code_named_after_an_algorithm_is_found(tmp_path: Path) -> None:
    room = tmp_path / "program"
    room.mkdir()
    (room / "pipe_dream.py").write_text("class Schedule: ...\n")
    (room / "schedule.py").write_text("def f():\n    class ZeRO3Keeper: ...\n")
    assert _named_after_an_algorithm(tmp_path) == [
        "program/pipe_dream.py: pipe_dream",
        "program/schedule.py: ZeRO3Keeper",
    ]
