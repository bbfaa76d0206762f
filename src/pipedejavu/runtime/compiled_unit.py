"""Runs units under torch.compile: units that are alike are compiled once, whatever their weights.

A unit is compiled as a function of its tensors: Dynamo makes weights and buffers in a module's dictionaries inputs of
the compiled graph, so that another version of the weights compiles nothing. Each form of unit is a function with a
code object of its own, since Dynamo keeps compiled graphs, and what it knows of varying shapes, per code object.

A unit that cannot be compiled runs eagerly, and one sentence says so. Torch's compiler is imported with the first call.
"""

import threading
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipedejavu.facts.printable import tell
from pipedejavu.facts.start_phase import START
from pipedejavu.runtime.recompute import generators_of

MOST_GRAPHS = 32
"""Graphs that are compiled for one name of a unit that has a graph per shape; further shapes run eagerly."""

_numbers = count()
"""Numbers of the forms of this process: Dynamo keeps what it knows of varying shapes by the name of the function."""

Around = Callable[[], AbstractContextManager[Any]]


class LossCall(NamedTuple):
    """A loss that is computed together with the last unit."""

    loss: Callable[[Any, Any], Tensor]
    """Takes the unit's output and the targets."""
    targets: Any


class LiftedUnit(NamedTuple):
    """A unit as a graph without tensors of its own."""

    key: str
    """Units with equal keys have the same graph."""
    graph: nn.Module
    """Takes the inputs, then the weights and buffers; returns a tuple."""
    tensors: tuple[Tensor, ...]
    """The inputs, then the weights and buffers."""


class GraphUnit(nn.Module):
    """A unit that runs a recorded graph, which differs from those of alike units by names only."""

    def lifted(self, value: Any) -> LiftedUnit:
        """Returns the graph for an input, with its tensors as arguments."""
        raise NotImplementedError


@dataclass
class _Form:
    """Alike units, and the function that runs them."""

    call: Callable[..., Any]
    loss: Callable[..., Any] | None = None
    """The loss that it computes, which its key names by an id that must not be given to another object."""
    graph: nn.Module | None = None
    """The graph of the first of them, if they are recorded graphs."""
    known: set[Hashable] = field(default_factory=set)
    """What inputs it was compiled for."""
    is_eager: bool = False


class UnitCompiler:
    """Runs units compiled. Several threads may use it; one of them compiles at a time."""

    def __init__(self, say: Callable[[str], None] = tell):
        self.say = say
        self.has_parameters = False
        """Whether units run on the Parameters of their modules, as those of one GPU and its host do, and not on plain
        tensors, as the engine's: compiled code is for one of the two."""
        self.compile_s = 0.0
        """Time of the first calls on each kind of input, which compile."""
        self._forms: dict[Hashable, _Form] = {}
        self._structures: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._num_graphs: dict[str, int] = {}
        self._told: set[str] = set()
        self._lock = threading.RLock()

    def run(
        self,
        name: str,
        module: nn.Module,
        value: Any,
        head: LossCall | None = None,
        seed: Callable[[], object] | None = None,
        around: Around = nullcontext,
    ) -> Any:
        """Returns a unit's output, or its loss if there is a `head`.

        `seed` seeds the generators if the unit may draw random numbers: a unit whose compiled form draws others than
        it draws eagerly runs eagerly. Whatever compiles runs within `around`.
        """
        structure = self._structure(module)
        if not structure:
            return _run_eagerly(module, value, head)
        lifted = module.lifted(value) if isinstance(module, GraphUnit) else None
        key = (structure if lifted is None else lifted.key, head and id(head.loss))
        form = self._form(key, name, lifted, head and head.loss)
        if not form.is_eager:
            form.graph = form.graph or (lifted.graph if lifted else None)
            arguments = (module, value) if lifted is None else (form.graph, lifted.tensors)
            call = _Call(name, module, value, head, form, (*arguments, *(head or (None, None))))
            if call.kind() in form.known:
                try:
                    return form.call(*call.arguments)
                except Exception as error:  # guards that this call does not know of
                    if not _is_of_compiler(error):
                        raise
                    self._give_up(call, error)
            else:
                with around(), self._lock, START.phase("compile"):
                    is_done, result = self._run_first(call, seed)
                if is_done:
                    return result
        if head is None:
            return _run_eagerly(module, value, None)
        return head.loss(self.run(name, module, value, None, seed, around), head.targets)

    def _structure(self, module: nn.Module) -> str:
        """Returns a digest of a unit's structure; empty for a unit that the user has compiled."""
        structure = self._structures.get(module)
        if structure is None:
            structure = self._structures[module] = "" if is_compiled(module) else digest(_structure(module))
        return structure

    def _form(self, key: Hashable, name: str, lifted: LiftedUnit | None, loss: Callable[..., Any] | None) -> _Form:
        form = self._forms.get(key)
        if form is None:
            with self._lock:
                form = self._forms.get(key)
                if form is None:
                    form = self._forms[key] = self._make(name, lifted)
                    form.loss = loss
        return form

    def _make(self, name: str, lifted: LiftedUnit | None) -> _Form:
        """Returns a new form, which is eager if a unit has had too many graphs."""
        form = _Form(_distinct(_call_unit if lifted is None else _call_graph, next(_numbers)))
        if lifted is not None:
            self._num_graphs[name] = self._num_graphs.get(name, 0) + 1
            if self._num_graphs[name] > MOST_GRAPHS:
                form.is_eager = True
                self._tell(f"unit '{name}' was compiled for {MOST_GRAPHS} shapes; for further ones it runs eagerly")
        return form

    def _run_first(self, call: "_Call", seed: Callable[[], object] | None) -> tuple[bool, Any]:
        """Runs a unit on inputs that it may not be compiled for; returns whether it could, and the result."""
        if call.form.is_eager:  # meanwhile, in another thread
            return False, None
        start_s, kind = time.perf_counter(), call.kind()
        try:
            with warnings.catch_warnings():  # of the compiler, about settings that are not the user's
                warnings.simplefilter("ignore")
                draws = _Draws(call, seed) if seed else None
                result = call.form.call(*call.arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler may raise anything; if it is the unit, it raises again
            self._give_up(call, error)
            if seed:
                seed()
            return False, None
        if draws and not draws.are_same(result):
            draws.undo()
            self._give_up(call, "compiled, it draws other random numbers")
            return False, None
        if kind not in call.form.known:
            self.compile_s += time.perf_counter() - start_s
            call.form.known.add(kind)
        return True, result

    def _give_up(self, call: "_Call", reason: Exception | str) -> None:
        """Makes a form eager, and says why."""
        call.form.is_eager = True
        what = "the loss after unit" if call.head else "unit"
        self._tell(f"{what} '{call.name}' runs eagerly: {reason if isinstance(reason, str) else _first_line(reason)}")

    def _tell(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            self.say(sentence)


class _Call(NamedTuple):
    """One call of a unit."""

    name: str
    module: nn.Module
    value: Any
    head: LossCall | None
    form: _Form
    arguments: tuple[Any, ...]

    def kind(self) -> Hashable:
        """Returns what the compiled code depends on, as far as it changes from call to call."""
        forms = tuple((t.shape, t.dtype, t.requires_grad, t.device) for t in _tensors_of(self.value))
        leaves = pytree.tree_leaves(self.head.targets) if self.head else ()
        targets = tuple(t.shape for t in leaves if isinstance(t, Tensor))
        kind = forms[0][3].type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        return forms, targets, torch.is_grad_enabled(), autocast, self.module.training


class _Draws:
    """What a unit draws eagerly, and computes with it, to compare with the same unit compiled."""

    def __init__(self, call: _Call, seed: Callable[[], object]):
        self.seed = seed
        self.buffers = [(b, b.clone()) for b in call.module.buffers()]
        self.generators = generators_of(_tensors_of(call.value)[0].device)
        seed()
        before = self._states()
        value = _mapped(call.value, lambda t: t.clone())  # a unit may change its input in place
        self.results = [t.detach() for t in _tensors_of(_run_eagerly(call.module, value, call.head))]
        self.after = self._states()
        self.is_random = not _are_equal(before, self.after)
        self.undo()

    def undo(self) -> None:
        """Restores the buffers and seeds again."""
        with torch.no_grad():
            for buffer, content in self.buffers:
                buffer.copy_(content)
        self.seed()

    def are_same(self, result: Any) -> bool:
        """Whether the compiled unit has drawn the same numbers."""
        if not self.is_random:
            return True
        pairs = zip(_tensors_of(result), self.results, strict=True)
        return _are_equal(self._states(), self.after) and all(_is_close(*pair) for pair in pairs)

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self.generators]


def digest(form: Hashable) -> str:
    """Returns a short key of a form, which is faster to look up."""
    return sha256(repr(form).encode()).hexdigest()


def is_compiled(module: nn.Module) -> bool:
    """Whether the user has compiled a module, or a part of it."""
    return any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in module.modules())


def _call_unit(module: Any, value: Any, loss: Any, targets: Any) -> Any:
    output = module(value)
    return output if loss is None else loss(output, targets)


def _call_graph(graph: Any, tensors: Any, loss: Any, targets: Any) -> Any:
    results = graph(*tensors)
    output = results if len(results) > 1 else results[0]
    return output if loss is None else loss(output, targets)


def _distinct(function: Any, number: int) -> Callable[..., Any]:
    """Returns the compiled form of a copy of a function, with a code object and a name of its own."""
    name = f"unit_form_{number}"
    code = function.__code__.replace(co_name=name)
    # Random numbers are those of the eager operations, so that another forward draws the same ones.
    options: dict[str, Any] = {"fallback_random": True}
    return torch.compile(FunctionType(code, function.__globals__, name), fullgraph=True, options=options)


def _run_eagerly(module: nn.Module, value: Any, head: LossCall | None) -> Any:
    output = module(value)
    return output if head is None else head.loss(output, head.targets)


def _structure(module: nn.Module) -> Hashable:
    """Returns the types of a unit's modules and the shapes of its tensors; Dynamo's guards compare everything else."""
    rows = []
    for path, part in module.named_modules():
        tensors = (*part._parameters.items(), *part._buffers.items())
        rows.append((path, type(part).__qualname__, id(type(part)), tuple(_form(*item) for item in tensors)))
    return tuple(rows)


def _form(key: str, tensor: Tensor | None) -> Hashable:
    return (key, None) if tensor is None else (key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _tensors_of(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return tuple(map(change, value)) if isinstance(value, tuple) else change(value)


def _are_equal(states: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, states, others))


def _is_close(result: Tensor, expected: Tensor) -> bool:
    """Whether two results differ by rounding: by less than the square root of their resolution."""
    if not expected.is_floating_point() or not expected.numel():
        return torch.equal(result, expected)
    most = float(expected.abs().max()) * torch.finfo(expected.dtype).eps ** 0.5
    return not float((result.detach() - expected).abs().max()) > most


def _is_of_compiler(error: BaseException) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "torch._functorch"))


def _first_line(error: BaseException) -> str:
    """Returns the first line of the innermost error of a compiler, which wraps what its backend raises."""
    while (inner := getattr(error, "inner_exception", None)) is not None:
        error = inner
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
