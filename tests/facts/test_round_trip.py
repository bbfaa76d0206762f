"""Every record that has a JSON form comes back from it as it was."""

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from pipedejavu.facts import Device, Edge, Host, Link, Machine, Profile, Record, Tie, Timeline, Unit, WorkerSummary
from pipedejavu.plan import Plan

few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def values(annotation: Any, metadata: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Values of a field, drawn by its annotation, so that a new field is covered without a word here."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [limit for m in args[1:] for limit in (m.metadata if isinstance(m, FieldInfo) else (m,))]
        return values(args[0], (*metadata, *inner))
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (Union, types.UnionType):
        return st.one_of([values(a, metadata) for a in args])
    if origin is tuple:
        least = next((m.min_length for m in metadata if isinstance(m, MinLen)), 0)
        return st.lists(values(args[0]), min_size=least, max_size=least + 2).map(tuple)
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=2)
    if annotation in (int, float):
        return numbers(annotation, metadata)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return records(annotation)
    return {str: st.text(max_size=5), bool: st.booleans(), type(None): st.none()}[annotation]


def numbers(kind: type[int] | type[float], metadata: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    least: Any = next((m.ge for m in metadata if isinstance(m, Ge)), None)
    if any(isinstance(m, BeforeValidator) for m in metadata):
        least = 0
    most: Any = next((m.le for m in metadata if isinstance(m, Le)), None)
    if kind is int:
        return st.integers(least, 2**80 if most is None else most)
    is_open = any(isinstance(m, Gt) for m in metadata)
    least, below = 0 if is_open else least, next((m.lt for m in metadata if isinstance(m, Lt)), None)
    most, is_below = (most, False) if below is None else (below, True)
    return st.floats(least, most, allow_nan=False, allow_infinity=False, exclude_min=is_open, exclude_max=is_below)


def records(record: type[BaseModel], **given_: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    fields = {
        f.alias or name: given_[name] if name in given_ else values(f.annotation, tuple(f.metadata))
        for name, f in record.model_fields.items()
    }
    required = {name: fields.pop(name) for name, f in record.model_fields.items() if f.is_required() or name in given_}
    return st.fixed_dictionaries(required, optional=fields).map(record.model_validate)


names = st.lists(st.text("ab0-é", min_size=1, max_size=3), min_size=1, max_size=4, unique=True)


@st.composite
def machines(draw: st.DrawFn) -> Any:
    hosts, devices = draw(names), draw(names)
    pattern = st.sampled_from([*devices, "*", "?*"])
    wires = st.lists(st.sampled_from(["net", "{source}>{target}", "{source_host}", "{target_host}-{{}}"])).map(tuple)
    return draw(
        records(
            Machine,
            hosts=st.tuples(*(records(Host, name=st.just(h)) for h in hosts)),
            devices=st.tuples(*(records(Device, name=st.just(d), host=st.sampled_from(hosts)) for d in devices)),
            links=st.lists(records(Link, source=pattern, target=pattern, wires=wires), max_size=2).map(tuple),
        )
    )


@st.composite
def profiles(draw: st.DrawFn) -> Any:
    units = draw(names)
    pairs = [(a, b) for i, a in enumerate(units) for b in units[i + 1 :]]
    edge = st.sampled_from(pairs).flatmap(lambda p: records(Edge, source=st.just(p[0]), target=st.just(p[1])))
    tie = records(Tie, units=st.lists(st.sampled_from(units), min_size=2, max_size=3).map(tuple))
    return draw(
        records(
            Profile,
            units=st.tuples(*(records(Unit, name=st.just(u)) for u in units)),
            edges=st.none() | (st.lists(edge, max_size=3).map(tuple) if pairs else st.just(())),
            ties=st.lists(tie, max_size=2).map(tuple),
        )
    )


@st.composite
def timelines(draw: st.DrawFn) -> Any:
    rows, workers = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    starts = draw(st.tuples(*[st.floats(0, 1e6)] * rows))
    columns = {
        "worker": st.tuples(*[st.integers(0, workers - 1)] * rows),
        "lane": st.tuples(*[st.text(max_size=5)] * rows),
        "action": st.tuples(*[st.text(max_size=5)] * rows),
        "start_s": st.just(starts),
        "end_s": st.tuples(*(st.floats(start, 2e6) for start in starts)),
        "workers": st.tuples(*(records(WorkerSummary, worker=st.just(w)) for w in range(workers))),
    }
    return draw(records(Timeline, **columns))


def check_round_trip(record: Record) -> None:
    for indent in (None, 2):
        text = record.to_json(indent)
        again = type(record).from_json(text)
        assert again == record
        assert again.to_json(indent) == text


@few
@given(machines())
def test_machine(record: Machine) -> None:
    check_round_trip(record)


@few
@given(profiles())
def test_profile(record: Profile) -> None:
    check_round_trip(record)


@few
@given(timelines())
def test_timeline(record: Timeline) -> None:
    check_round_trip(record)


@few
@given(records(Plan))
def test_plan(record: Plan) -> None:
    check_round_trip(record)
