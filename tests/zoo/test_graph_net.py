"""Graph networks: the layers of torch_geometric on the same weights and blocks, and on the whole graph."""

import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pipedejavu.facts import InputError
from pipedejavu.graph_data import CsrGraph, open_power_law
from pipedejavu.zoo import build
from pipedejavu.zoo.graph_net import SIZES, GatLayer, GcnLayer, GraphNet, SageLayer
from pipedejavu.zoo.graph_sample import GraphSamples

KINDS = ("sage", "gcn", "gat")
NODES, FEATURES, CLASSES = 60, 6, 3


@pytest.fixture(autouse=True)
def double(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def graph(degree: int = 5) -> CsrGraph:
    """A graph whose nodes have 0 to 2·degree different neighbours."""
    random = np.random.default_rng(0)
    rows = [np.sort(random.permutation(NODES - 1)[: random.integers(0, 2 * degree)]) for _ in range(NODES)]
    rows = [row + (row >= n) for n, row in enumerate(rows)]  # not itself
    return CsrGraph(
        name="small",
        indptr=np.cumsum([0, *map(len, rows)]),
        indices=np.concatenate(rows).astype(np.int32),
        features=random.normal(size=(NODES, FEATURES)).astype(np.float32),
        labels=random.integers(0, CLASSES, NODES),
        train=np.arange(0, 40),
        test=np.arange(40, 60),
        num_classes=CLASSES,
    )


def make(kind: str, fanouts: tuple[int, ...], on_host: bool = True) -> tuple[GraphNet, GraphSamples]:
    sizes = {"fanouts": fanouts, "features": FEATURES, "classes": CLASSES, "hidden": 8}
    size = SIZES[kind].replace(**sizes, aggregates_on_host=on_host)
    net = GraphNet(size, seed=1)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return net, GraphSamples(graph(), graph().train, size.form(), seed=3)


def twin(layer: torch.nn.Module) -> torch.nn.Module:
    """The layer of torch_geometric with the same weights."""
    nn = pytest.importorskip("torch_geometric.nn")
    if isinstance(layer, SageLayer):
        conv = nn.SAGEConv(layer.own.in_features, layer.own.out_features)
        state = {
            "lin_l.weight": layer.neighbours.weight,
            "lin_l.bias": layer.neighbours.bias,
            "lin_r.weight": layer.own.weight,
        }
    elif isinstance(layer, GcnLayer):
        conv = nn.GCNConv(layer.linear.in_features, layer.linear.out_features)
        state = {"lin.weight": layer.linear.weight, "bias": layer.linear.bias}
    else:
        assert isinstance(layer, GatLayer)
        conv = nn.GATConv(layer.linear.in_features, layer.source.shape[1], heads=layer.heads)
        state = {
            "lin.weight": layer.linear.weight,
            "bias": layer.bias,
            "att_src": layer.source[None],
            "att_dst": layer.target[None],
        }
    conv.load_state_dict(state)
    return conv.double()


def run_twin(net: GraphNet, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """Runs torch_geometric's layers on a whole graph."""
    for _, layer in net.units():
        x = twin(layer)(x, edges)
        if not layer.is_last:
            x = torch.nn.functional.elu(x) if isinstance(layer, GatLayer) else torch.relu(x)
    return x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("on_host", [True, False])
def test_with_all_neighbours_a_network_equals_torch_geometrics_on_the_whole_graph(kind, layers, on_host) -> None:
    net, data = make(kind, (-1,) * layers, on_host)
    whole = data.graph
    rows = np.repeat(np.arange(NODES), np.diff(whole.indptr))
    edges = torch.from_numpy(np.stack([whole.indices.astype(np.int64), rows]))
    expected = run_twin(net, torch.from_numpy(whole.features).double(), edges)[torch.from_numpy(data.graph.train)]
    inputs, _ = data.batch(range(len(data)))
    torch.testing.assert_close(net(inputs), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_equals_torch_geometrics_on_a_sampled_block(kind) -> None:
    net, data = make(kind, (3, 2))
    layer = dict(net.units())["layer1"]
    _, *flow = data.drawn(range(20), step=4)[0] if kind != "sage" else data.drawn(range(20), step=4)[0][1:]
    indptr, indices, *weights = flow[-3:] if kind == "gcn" else flow[-2:]
    rows = torch.repeat_interleave(torch.arange(20), indptr.diff())
    x = torch.randn(int(indices.max()) + 25, 8 if kind != "gat" else layer.linear.in_features, requires_grad=True)
    conv, edges, sizes = twin(layer), torch.stack([indices, rows]), (x, x[:20])
    if kind == "gcn":
        conv.normalize, conv.add_self_loops = False, False
        expected = conv(x, edges, weights[0].double())[:20]
    else:
        expected = conv(sizes, edges)
    found = layer((x, indptr, indices, *weights))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_divided_batch_has_the_gradients_of_the_whole_one(kind) -> None:
    net, data = make(kind, (3, 2))
    sums = []
    for parts in ([range(30)], [range(7), range(7, 30)]):
        net.zero_grad()
        for part in parts:
            inputs, targets = data.drawn(part, step=5)
            torch.nn.functional.cross_entropy(net(inputs), targets, reduction="sum").backward()
        sums.append([parameter.grad.clone() for parameter in net.parameters()])
    for whole, divided in zip(*sums, strict=True):
        torch.testing.assert_close(whole, divided, rtol=1e-12, atol=1e-12)


def test_neighbourhoods_depend_on_the_seed_and_the_step_alone() -> None:
    _, data = make("sage", (3, 2))
    inputs = [data.drawn(range(20), step)[0] for step in (4, 4, 5)]
    assert all(torch.equal(a, b) for a, b in zip(inputs[0], inputs[1], strict=True))
    assert not torch.equal(inputs[0][0][:20], inputs[2][0][:20])
    other = GraphSamples(data.graph, data.graph.train, data.form, seed=4)
    assert not torch.equal(inputs[0][0][:20], other.drawn(range(20), 4)[0][0][:20])


def test_a_network_learns_from_neighbours_what_features_do_not_tell(tmp_path) -> None:
    whole, shares = open_power_law(100_000, tmp_path, num_features=64), []
    for fanouts in ((10, 5), (1, 1)):
        size = SIZES["sage"].replace(fanouts=fanouts, features=64, classes=16, hidden=32)
        net, train = GraphNet(size), GraphSamples(whole, whole.train, size.form(), 0)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        for step in range(30):
            inputs, targets = train.drawn(range(len(train)), step)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(inputs), targets).backward()
            optimizer.step()
        test = GraphSamples(whole, whole.test, size.form(), 0)
        inputs, targets = test.batch(range(len(test)))
        shares.append(float((net(inputs).argmax(1) == targets).double().mean()))
    assert shares[0] > 3 / 16
    assert shares[0] > shares[1] + 0.05


def test_graph_samples_survive_pickling() -> None:
    _, data = make("sage", (3, 2))
    expected = data.batch([3, 4])[0]
    again = pickle.loads(pickle.dumps(data)).batch([3, 4])[0]
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


def test_a_model_for_other_features_is_refused() -> None:
    with pytest.raises(InputError, match="the model reads 7 features and the graph power-20000-256-16-0-v1 has 256"):
        build("sage", data="graph:power:20000", features=7)


def test_a_fan_out_of_zero_is_refused() -> None:
    with pytest.raises(InputError, match="fanouts has 0; give at least 1 neighbour for each layer"):
        build("sage", data="graph:power:20000", fanouts=(10, 0))
