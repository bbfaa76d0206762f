import pytest

from pipedejavu.facts import Cost, Edge, FaultsError, InputError, Profile, Tie, Unit, UnitTime


def profile(**changes: object) -> Profile:
    units = tuple(Unit(name=n, boundary_bytes=float(10 + i)) for i, n in enumerate(["embed", "block", "head"]))
    return Profile(name="p", units=units).replace(**changes)


def faults_of(text: str) -> tuple[str, ...]:
    with pytest.raises(FaultsError) as caught:
        Profile.from_json(f'{{"name":"p","units":[{{"name":"embed"}},{{"name":"block"}},{{"name":"head"}}],{text}}}')
    return caught.value.faults


def test_edges_and_ties_name_units_that_exist() -> None:
    assert faults_of(
        '"edges":[{"source":"embd","target":"block"},{"source":"embed","target":"heads"}],'
        '"ties":[{"units":["embed","hed"],"size_bytes":1}]'
    ) == (
        "edges[0] names unit 'embd', which is missing; did you mean 'embed'?",
        "edges[1] names unit 'heads', which is missing; did you mean 'head'?",
        "ties[0] names unit 'hed', which is missing; did you mean 'head'?",
    )


@pytest.mark.parametrize(("source", "target"), [("head", "embed"), ("block", "block")])
def test_edges_go_forward(source: str, target: str) -> None:
    assert faults_of(f'"edges":[{{"source":"{source}","target":"{target}"}}]') == (
        f"edges[0] goes from '{source}' back to '{target}'; list units in an order where edges go forward",
    )


def test_a_tie_is_between_two_units_or_more() -> None:
    (fault,) = faults_of('"ties":[{"units":["embed"],"size_bytes":1}]')
    assert fault.startswith("ties[0].units: ")
    assert fault.endswith("at least 2 items after validation, not 1, found ['embed']")


def test_faults_of_units_and_edges_come_together() -> None:
    with pytest.raises(FaultsError) as caught:
        Profile.from_json(
            '{"name":"p","units":[{"name":"a","parameter_bytes":"-1 B"},{"name":"a","times":{"h":{"updates":1}}}],'
            '"edges":[{"source":"a","target":"b","bytes":"1 s"}]}'
        )
    assert caught.value.faults == (
        "units[0].parameter_bytes: '-1 B' is not possible; it must be zero or more, and finite",
        "unknown key 'units[1].times.h.updates'; did you mean 'update_s'?",
        "edges[0].bytes: '1 s' is in seconds; this needs bytes (B)",
        "two units are called 'a'",
        "edges[0] names unit 'b', which is missing; known: a",
    )


def test_a_profile_has_a_unit() -> None:
    with pytest.raises(FaultsError, match=r"^profile: units: .*at least 1 item"):
        Profile.from_json('{"name":"p","units":[]}')


def test_without_edges_each_unit_reads_the_one_before() -> None:
    assert profile().links == ((0, 1, 10.0), (1, 2, 11.0))
    assert profile(edges=()).links == ()


def test_an_edge_carries_its_own_bytes_or_the_boundary() -> None:
    edges = (Edge(source="embed", target="head", bytes=3.0), Edge(source="block", target="head"))
    found = profile(edges=edges)
    assert found.links == ((0, 2, 3.0), (1, 2, 11.0))
    assert Profile.from_json(found.to_json()) == found


def test_an_edge_of_no_bytes_keeps_them() -> None:
    found = profile(edges=(Edge(source="embed", target="head", bytes=0.0),))
    assert Profile.from_json(found.to_json()).links == ((0, 2, 0.0),)


def test_position() -> None:
    assert profile().position == {"embed": 0, "block": 1, "head": 2}


def test_ties_may_cross_any_units() -> None:
    tie = Tie(units=("head", "embed"), size_bytes=7)
    assert profile(ties=(tie,)).ties == (tie,)


def test_times_are_by_the_kind_of_device() -> None:
    time = UnitTime(forward=Cost(fixed_s=1.0, per_sample_s=0.5), update_s=2.0)
    unit = Unit(name="u", times={"h200": time, "epyc": UnitTime()})
    found = Profile(name="p", units=(unit,))
    assert found.time(unit, "h200") is time
    with pytest.raises(InputError) as caught:
        found.time(unit, "h100")
    assert str(caught.value) == "profile 'p' has no times of unit 'u' on device kind 'h100'; did you mean 'h200'?"
    with pytest.raises(InputError, match=r"on device kind 'h100'$"):
        found.time(Unit(name="bare"), "h100")


def test_a_cost_grows_with_the_samples() -> None:
    cost = Cost(fixed_s=1.0, per_sample_s=0.25)
    assert [cost.at(n) for n in (0, 1, 4, 0.5)] == [1.0, 1.25, 2.0, 1.125]


def test_a_cost_that_was_measured_is_what_was_measured_and_straight_between() -> None:
    cost = Cost(fixed_s=1.0, per_sample_s=0.5, measured_s={8: 9.0, 1: 1.25, 2: 3.0})
    assert [cost.at(n) for n in (0, 0.5, 1, 1.5, 2, 5, 8, 10)] == [1.0, 1.125, 1.25, 2.125, 3.0, 6.0, 9.0, 10.0]
    assert Cost.from_json(cost.to_json()) == cost
    assert [cost.times(2).at(n) for n in (0, 1, 5, 10)] == [2.0, 2.5, 12.0, 20.0]


def test_work_takes_no_less_than_the_host_takes_to_issue_it() -> None:
    cost = Cost(fixed_s=1.0, per_sample_s=0.5, issue_s=2.0)
    assert [cost.at(samples) for samples in (1, 2, 4)] == [2.0, 2.0, 3.0]
    assert cost.work_s(1) == 1.5
    assert cost.times(2).at(1) == 3.0
    assert cost.times(0.1).at(1) == 2.0
    assert cost.plus(Cost(fixed_s=10.0, issue_s=1.0)) == Cost(fixed_s=11.0, per_sample_s=0.5, issue_s=3.0)


def test_costs_add_up_at_every_size() -> None:
    bent = Cost(fixed_s=1.0, per_sample_s=0.5, measured_s={1: 1.25, 2: 3.0, 8: 9.0}, spread=0.25)
    others = Cost(fixed_s=2.0, per_sample_s=1.0, measured_s={4: 5.0}), Cost(fixed_s=0.5, per_sample_s=0.25)
    total = bent.plus(*others)
    assert total.spread == 0.25
    for n in range(80):
        assert total.at(n / 4) == pytest.approx(sum(cost.at(n / 4) for cost in (bent, *others)))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"measured_s": {"0": 1}}', "should be greater than or equal to 1, found '0'"),
        ('{"measured_s": {"2": -1}}', "measured_s.2: -1 s is not possible; it must be zero or more"),
    ],
)
def test_measured_times_are_of_samples_and_not_negative(text: str, fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        Cost.from_json(text)


def test_a_model_of_many_units_is_checked_quickly() -> None:
    many = Profile(name="p", units=tuple(Unit(name=str(i)) for i in range(20_000)))
    assert len(many.links) == 19_999
