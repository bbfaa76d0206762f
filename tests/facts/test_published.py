"""Profiles of others: graphs of PipeDream and tables of units, whole or broken."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedejavu.facts import InputError, Profile
from pipedejavu.facts.published import parse_graph, parse_table, read_profile


def node(
    name: str, what: str = "ReLU(inplace)", forward: str = "1.500", size: str = "4.000", weights: str = "0.000"
) -> str:
    figures = f"forward_compute_time={forward}, backward_compute_time=3.000, activation_size={size}"
    return f"{name} -- {what} -- {figures}, parameter_size={weights}\n"


# Six rows of the profile of VGG-16 that PipeDream published, with the edges between them and its branch.
VGG = (
    node("node34", "View(-1)", "0.000", "12845056.000")
    + node("node35", "Linear(in_features=25088, out_features=4096, bias=True)", "2.475", "2097152.000", "411058176.000")
    + node("node33", "Size(0)", "0.000", "4.000")
    + node("node1", "Input", "17.972", "77070336.000")
    + node("node32", "MaxPool2d(kernel_size=2, stride=2, padding=0)", "0.553", "12845056.000")
    + node("node9", "Conv2d(128, 128, kernel_size=(3, 3))", "22.062", "[411041792.0; 411041792.0]", "590336.000")
    + "\tnode34 -- node35\n\tnode32 -- node33\n\tnode33 -- node34\n\tnode32 -- node34\n"
    + "\tnode1 -- node9\n\tnode9 -- node32\n"
)


def test_a_graph_becomes_units_in_order_with_its_branches() -> None:
    profile = parse_graph(VGG, ["v100"], "vgg16-graph.txt")
    assert profile.name == "vgg16-graph"
    assert [unit.name for unit in profile.units] == ["node9", "node32", "node33", "node34", "node35"]
    conv, *_, linear = profile.units
    assert conv.boundary_bytes == conv.activation_bytes == 822083584.0
    assert linear.parameter_bytes == linear.gradient_bytes == linear.optimizer_bytes == 411058176
    assert linear.num_parameters == 411058176 // 4
    time = linear.times["v100"]
    assert time.forward.at(2) == pytest.approx(2 * 2.475e-3)
    assert time.backward.at(1) == pytest.approx(3e-3)
    assert time.weight_backward.at(1) == pytest.approx(1.5e-3)
    assert profile.units[1].times["v100"].weight_backward.at(1) == 0
    assert {(e.source, e.target) for e in profile.edges or ()} == {
        ("node9", "node32"), ("node32", "node33"), ("node33", "node34"), ("node32", "node34"), ("node34", "node35")
    }  # fmt: skip
    assert (1, 3, 12845056.0) in profile.links


def test_a_graph_without_branches_is_a_chain() -> None:
    text = node("node10") + node("node2") + "\tnode2 -- node10\n\n"
    profile = parse_graph(text, ["a", "b"])
    assert [unit.name for unit in profile.units] == ["node2", "node10"]
    assert profile.edges is None
    assert list(profile.units[0].times) == ["a", "b"]


def test_nodes_that_a_partition_marked_are_read() -> None:
    assert parse_graph(node("node2").rstrip() + " -- stage_id=3\n", ["a"]).units[0].name == "node2"


BROKEN_GRAPHS = [
    ("", "graph has no node of a model; a graph.txt has a line"),
    (node("n1", "Input"), "graph has no node of a model"),
    ("hello", "line 1: 'hello' is neither 'node1 -- ReLU() -- forward_compute_time=1.5, …' nor an edge '<tab>node1 --"),
    (node("n1") * 2, "line 2: node 'n1' is given twice"),
    (node("n1") + "\tn1 -- n3\n", "an edge names node 'n3', which is missing; did you mean 'n1'?"),
    (node("n1") + node("n2") + "\tn1 -- n2\n\tn2 -- n1\n", "edges go around in a circle through node 'n1'; a model's"),
    (node("n1") + "\tn1 -- n1\n", "edges go around in a circle through node 'n1'"),
    (
        node("n1", forward="-1.0"),
        "line 1, forward_compute_time: '-1.0' is not a number that is zero or more, and finite",
    ),
    (node("n1", forward="soon"), "line 1, forward_compute_time: 'soon' is not a number"),
    (node("n1", size="[1.0; nan]"), "line 1, activation_size: 'nan' is not a number"),
    (node("n1", size="[1e308; 1e308]"), "line 1, activation_size: the sum of '[1e308; 1e308]' is not finite"),
    (node("n1", forward="1e999"), "line 1, forward_compute_time: '1e999' is not a number"),
    (
        node("n1").replace("forward_c", "fwd_c"),
        "line 1: 'fwd_compute_time' is no figure of a node; did you mean 'forward",
    ),
    (node("n1").replace("backward", "forward"), "line 1: forward_compute_time is given twice"),
    (node("n1").replace(", parameter_size=0.000", ""), "line 1: parameter_size is missing"),
]


@pytest.mark.parametrize(("text", "fault"), BROKEN_GRAPHS)
def test_a_broken_graph_is_refused_in_a_sentence(text: str, fault: str) -> None:
    with pytest.raises(InputError, match=re.escape(fault)):
        parse_graph(text, ["v100"])


TABLE = """unit, device, forward_s, backward_s, update_s, parameter_bytes, boundary_bytes, flop

embed, h200, 1 us, 2e-6, 5e-6, 4 MiB, 128 KiB, 0
block, h200, 10 us, 20 us, , 12 MiB, 128 KiB, 5e9
embed, cpu, 1 ms, 2 ms, , 4 MiB, 128 KiB, 0
block, cpu, 10 ms, 20 ms, , 12 MiB, 128 KiB, 5e9
"""


def test_a_table_becomes_units_with_times_for_each_device() -> None:
    profile = parse_table(TABLE, ["other"], "two.csv")
    assert profile.name == "two"
    assert [unit.name for unit in profile.units] == ["embed", "block"]
    embed, block = profile.units
    assert list(block.times) == ["h200", "cpu"]
    assert block.times["cpu"].backward.at(3) == pytest.approx(60e-3)
    assert embed.times["h200"].update_s == 5e-6
    assert (embed.parameter_bytes, embed.num_parameters) == (4 << 20, 1 << 20)
    assert embed.activation_bytes == embed.boundary_bytes == 128 << 10
    assert block.flop == 5e9
    assert profile.edges is None


def test_a_table_without_devices_counts_for_all() -> None:
    profile = parse_table("unit,forward_s,backward_s\nu,1,2\n", ["a", "b"])
    assert list(profile.units[0].times) == ["a", "b"]


HEAD = "unit,device,forward_s,backward_s,parameter_bytes\n"
BROKEN_TABLES = [
    ("", "column 'unit' is missing"),
    ("unit,forward_s\n", "column 'backward_s' is missing"),
    ("unit,forward_s,forward_s,backward_s\n", "column 'forward_s' is given twice"),
    ("unit,forwards,backward_s\n", "column 'forwards' is not known; did you mean 'forward_s'?"),
    (HEAD, "has no unit; give a header unit,forward_s,backward_s and a line for each unit"),
    (HEAD + "u,,1,2\n", "line 2 has 4 cells, but the header has 5"),
    (HEAD + ",,1,2,3\n", "line 2: unit is empty; give each a name"),
    (HEAD + "u,,,2,3\n", "line 2: forward_s is empty; give seconds for each sample, such as '0.5 ms'"),
    (HEAD + "u,,1,-2,3\n", "line 2, backward_s: '-2' is not a number that is zero or more, and finite"),
    (HEAD + "u,,1,2 GB,3\n", "line 2, backward_s: '2 GB' is in bytes; this needs seconds (s)"),
    (HEAD + "u,,1,1_0,3\n", "line 2, backward_s: unit '_0' is not known; this needs seconds, such as '1 s'"),
    (HEAD + "u,a,1,2,3\nu,a,1,2,3\n", "line 3: unit 'u' is given twice for device 'a'"),
    (HEAD + "u,a,1,2,3\nu,b,1,2,4\n", "line 3: unit 'u' has other sizes than on its first line; they are the model's"),
    (HEAD + '"u,a,1,2,3\n', "is no CSV: "),
]


@pytest.mark.parametrize(("text", "fault"), BROKEN_TABLES)
def test_a_broken_table_is_refused_in_a_sentence(text: str, fault: str) -> None:
    with pytest.raises(InputError, match=re.escape(fault)):
        parse_table(text, ["v100"])


def test_a_file_is_read_by_its_ending(tmp_path: Path) -> None:
    graph, table, own = (tmp_path / f"x.{end}" for end in ("txt", "csv", "json"))
    graph.write_text(VGG)
    table.write_text(TABLE)
    parse_graph(VGG, ["a"]).save(own)
    assert read_profile(str(graph), ["a"]).units == read_profile(str(own), ["b"]).units
    assert len(read_profile(str(table), ["a", "a"]).units) == 2
    graph.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="is not a text in UTF-8; a profile is JSON, CSV or a graph"):
        read_profile(str(graph), ["a"])
    with pytest.raises(InputError, match="cannot read"):
        read_profile(str(tmp_path / "none.csv"), ["a"])


SCRAPS = st.sampled_from(
    ["\t", " -- ", ", ", "=", "[", "]", ";", "\n", ",", '"', "1e999", "-", "node32", "é", "\0", "0x1"]
)


@st.composite
def mutilated(draw: st.DrawFn, text: str) -> str:
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        end = min(len(text), at + draw(st.integers(0, 12)))
        text = text[:at] + draw(SCRAPS | st.text(max_size=3)) + text[end:]
    return text


@given(mutilated(VGG))
@settings(max_examples=400, deadline=None)
def test_whatever_a_graph_holds_it_is_read_or_refused(text: str) -> None:
    try:
        profile = parse_graph(text, ["v100"])
    except InputError:
        return
    assert Profile.from_json(profile.to_json()) == profile


@given(mutilated(TABLE))
@settings(max_examples=400, deadline=None)
def test_whatever_a_table_holds_it_is_read_or_refused(text: str) -> None:
    try:
        profile = parse_table(text, ["v100"])
    except InputError:
        return
    assert Profile.from_json(profile.to_json()) == profile


@given(
    st.integers(1, 9).flatmap(
        lambda n: st.tuples(st.permutations(range(n)), st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))))
    )
)
@settings(max_examples=100, deadline=None)
def test_any_graph_keeps_its_nodes_and_edges(made: tuple[list[int], set[tuple[int, int]]]) -> None:
    shuffled, pairs = made
    edges = {(f"n{a}", f"n{b}") for a, b in pairs if a < b}
    text = "".join(node(f"n{n}", size=f"{n}.5") for n in shuffled) + "".join(f"\t{a} -- {b}\n" for a, b in edges)
    profile = parse_graph(text, ["v100"])
    assert {u.name: u.boundary_bytes for u in profile.units} == {f"n{n}": n + 0.5 for n in shuffled}
    found = {(profile.units[s].name, profile.units[t].name) for s, t, _ in profile.links}
    assert found == edges


def test_speeds_divide_the_times_of_their_kinds_alone(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(TABLE)
    plain = read_profile(str(tmp_path / "table.csv"), ["v100"])
    slow = read_profile(str(tmp_path / "table.csv"), ["v100"], {"cpu": 0.04})
    kinds = {kind for unit in plain.units for kind in unit.times}
    for one, two in zip(plain.units, slow.units, strict=True):
        for kind in kinds:
            factor = 25 if kind == "cpu" else 1
            for name in ("forward", "backward", "weight_backward", "recompute"):
                before, after = getattr(one.times[kind], name), getattr(two.times[kind], name)
                assert after.at(3) == pytest.approx(factor * before.at(3))
            assert two.times[kind].update_s == pytest.approx(factor * one.times[kind].update_s)
    slow.save(tmp_path / "profile.json")
    assert read_profile(str(tmp_path / "profile.json"), []) == slow


def test_a_speed_for_a_kind_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vgg-graph.txt"
    path.write_text(node("n1"))
    text = "a speed is given for 'v10', and profile 'vgg-graph' has times on v100; did you mean 'v100'?"
    with pytest.raises(InputError, match=re.escape(text)):
        read_profile(str(path), ["v100"], {"v10": 2.0})
