"""Compiled units: one compilation for alike ones, the eager results, and a sentence for what cannot be compiled."""

import logging
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipedejavu.profile.segment import Body, Segment, SegmentEntry
from pipedejavu.runtime import compiled_unit
from pipedejavu.runtime.compiled_unit import LossCall, UnitCompiler

SAID: list[str] = []


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles in this process, as a pool of compilers takes longer to start than it saves."""
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)  # pytest would keep every record


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces inductor by the eager graph, which Dynamo guards in the same way; returns the graphs so far."""
    graphs: list[str] = []
    real = torch.compile

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda function, *, fullgraph, **_: real(function, fullgraph=fullgraph, backend=backend)
    )
    return graphs


class Block(nn.Module):
    """A residual block with a norm."""

    def __init__(self, width: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 8), nn.Linear(8, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Printing(nn.Module):
    """Leaves Python, which a whole graph cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) > 1e9:
            return x
        return self.linear(x)


def put_versions(module: nn.Module) -> None:
    """Replaces the weights by a new version, as a piece does."""
    for part in module.modules():
        for key, weight in part._parameters.items():
            part._parameters[key] = (weight.detach() + 0.01).requires_grad_()  # type: ignore[assignment, union-attr]


def loss_of_classes(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, targets, reduction="sum")


def input_of(samples: int = 3, width: int = 4) -> Tensor:
    return torch.randn(samples, width, generator=torch.Generator().manual_seed(samples)).requires_grad_()


def test_new_weights_and_alike_blocks_compile_nothing(counting: list[str]) -> None:
    """10 updates, 4 microbatches, 6 blocks: one graph; a last microbatch that is shorter takes one more."""
    compiler, blocks = UnitCompiler(SAID.append), [Block() for _ in range(6)]
    for _ in range(10):
        for block in blocks:
            put_versions(block)
        for _ in range(4):
            for n, block in enumerate(blocks):
                x = input_of()
                assert torch.equal(compiler.run(f"block{n}", block, x), block(x))
    assert len(counting) == 1
    for samples in (2, 5, 7, 2):
        compiler.run("block0", blocks[0], input_of(samples))
    assert len(counting) == 2


def test_threads_share_what_one_of_them_compiles(counting: list[str]) -> None:
    compiler, errors = UnitCompiler(SAID.append), list[BaseException]()

    def work() -> None:
        try:
            for _ in range(5):
                block, x = Block(), input_of()
                compiler.run("block", block, x).sum().backward()
                assert block.up.weight.grad is not None
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(counting) == 1


def test_units_of_one_class_and_other_shapes_are_forms_of_their_own(counting: list[str]) -> None:
    """Dynamo would take the width to vary, and compile one graph of unknown sizes for both."""
    compiler = UnitCompiler(SAID.append)
    for width in (4, 6):
        compiler.run("block", Block(width), input_of(width=width))
    assert len(counting) == 2
    assert not any("Sym" in code for code in counting)


def test_what_cannot_be_compiled_runs_eagerly_and_is_told_once(counting: list[str]) -> None:
    said: list[str] = []
    compiler, unit, x = UnitCompiler(said.append), Printing(), input_of()
    for _ in range(3):
        assert torch.equal(compiler.run("odd", unit, x), unit(x))
    (sentence,) = said
    assert sentence.startswith("unit 'odd' runs eagerly: ")
    assert "\n" not in sentence
    assert not counting


def test_a_compiler_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    real = torch.compile

    def broken(*_: Any) -> Any:
        raise RuntimeError("no C++ compiler\nat some place")

    monkeypatch.setattr(
        torch, "compile", lambda function, *, fullgraph, **_: real(function, fullgraph=fullgraph, backend=broken)
    )
    block, x = Block(), input_of()
    assert torch.equal(UnitCompiler(said.append).run("u", block, x), block(x))
    assert said == ["unit 'u' runs eagerly: no C++ compiler"]


def test_a_loss_that_cannot_be_compiled_leaves_its_unit_compiled(counting: list[str]) -> None:
    said: list[str] = []
    compiler, block, x = UnitCompiler(said.append), Block(), input_of()

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).sum() * (1 if float(output.detach().sum()) < 1e9 else 2)

    head = LossCall(loss, torch.ones(3, 4))
    for _ in range(2):
        assert torch.equal(compiler.run("last", block, x, head), loss(block(x), head.targets))
    assert len(counting) == 1
    assert len(said) == 1
    assert said[0].startswith("the loss after unit 'last' runs eagerly: ")


def test_a_unit_whose_error_is_its_own_raises_it(counting: list[str]) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        UnitCompiler(SAID.append).run("u", nn.Linear(4, 4), input_of(width=5))
    assert not counting


def test_a_module_that_the_user_compiled_runs_as_it_is() -> None:
    calls: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        calls.append(1)
        return graph.forward

    block, x, compiler = Block(), input_of(), UnitCompiler(SAID.append)
    block.compile(backend=backend)
    compiler.run("u", block, x)
    assert calls == [1]
    assert not compiler.compile_s


def test_a_unit_that_draws_other_numbers_compiled_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here compiled code draws one number more."""
    said: list[str] = []
    real = compiled_unit._distinct

    def drawing(function: Any, number: int) -> Any:
        del number

        def call(*arguments: Any) -> Any:
            torch.rand(1)
            return function(*arguments)

        return call

    monkeypatch.setattr(compiled_unit, "_distinct", drawing)
    assert real is not drawing
    block, x = Block(dropout=0.5), input_of()
    output = UnitCompiler(said.append).run("u", block, x, seed=lambda: torch.manual_seed(3))
    torch.manual_seed(3)
    assert torch.equal(output, block(x))
    assert said == ["unit 'u' runs eagerly: compiled, it draws other random numbers"]


def segment(seed: int) -> Segment:
    """A recorded unit whose names depend on its number."""
    torch.manual_seed(seed)
    root = nn.Module()
    root.add_module(f"layer{seed}", nn.Linear(4, 4))
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    weight, bias = (graph.get_attr(f"layer{seed}.{key}") for key in ("weight", "bias"))
    linear = graph.call_function(torch.ops.aten.linear.default, (x, weight, bias))
    graph.output((graph.call_function(torch.ops.aten.tanh.default, (linear,)),))
    held = {f"layer{seed}.{key}": getattr(root.get_submodule(f"layer{seed}"), key) for key in ("weight", "bias")}
    entry = SegmentEntry(shape=(3, 4), has_gradient=True, is_overwritten=False)
    return Segment(f"s{seed}", Body(torch.fx.GraphModule(held, graph), [entry], torch.device("cpu")))


def test_recorded_units_that_differ_by_names_share_a_graph_and_not_their_weights(counting: list[str]) -> None:
    compiler, x = UnitCompiler(SAID.append), input_of()
    for unit in (segment(1), segment(2)):
        for _ in range(2):
            put_versions(unit.bodies[0].graph)  # type: ignore[arg-type]
            weights = [*unit.parameters()]
            compiled = torch.autograd.grad(compiler.run(unit.name, unit, x).sum(), [x, *weights])
            eager = torch.autograd.grad(unit(x).sum(), [x, *weights])
            assert all(map(torch.equal, compiled, eager))
    assert len(counting) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_inductor_draws_the_masks_of_eager_units_and_rounds_as_bf16_does() -> None:
    """The same unit twice: with dropout in float32, and under bf16 autocast, together with its loss."""
    said: list[str] = []
    compiler, block, x = UnitCompiler(said.append), Block(dropout=0.5), input_of()
    head = LossCall(loss_of_classes, torch.ones(3, dtype=torch.long))

    def seed() -> None:
        torch.manual_seed(5)

    for dtype in (torch.float32, torch.bfloat16):
        losses = []
        for run in (lambda: compiler.run("u", block, x, head, seed), lambda: head.loss(block(x), head.targets)):
            seed()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = run()
            losses.append([loss.detach(), *torch.autograd.grad(loss, [x, *block.parameters()])])
        for compiled, eager in zip(*losses, strict=True):  # a few roundings of numbers below 16
            assert float((compiled - eager).abs().max()) <= 16 * torch.finfo(dtype).eps * max(
                1.0, float(eager.abs().max())
            )
    assert compiler.compile_s > 0
    assert not said
