"""Module hooks that units would lose: parameter hooks always, backward hooks if the model is traced."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from pipedejavu.facts import InputError
from pipedejavu.profile.sequential import is_own

_BACKWARD = ("_backward_pre_hooks", "_backward_hooks")
_FORWARD = ("_forward_pre_hooks", "_forward_hooks")


def check_parameter_hooks(model: nn.Module) -> None:
    """Raises InputError for hooks on parameters: workers train copies, and sum gradients over microbatches."""
    for name, parameter in model.named_parameters():
        hooks: Mapping[int, Any] = (
            parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        )
        others = [hook for hook in hooks.values() if not is_own(hook)]
        if others and parameter.requires_grad:
            raise InputError(
                f"parameter '{name}' of a {type(model).__name__} has the gradient hook {_written(*others)},"
                " which would not run: workers train copies of the parameter, and sum its gradients over microbatches;"
                " remove the hook, and scale or mask in the forward (or freeze the parameter) instead"
            )


def check_backward_hooks(model: nn.Module) -> None:
    """Raises InputError for backward hooks of a model that is to be traced: a forward graph cannot hold them."""
    for name, hook in _hooks(model, _BACKWARD):
        raise InputError(
            f"module '{name}' of a {type(model).__name__} has the backward hook {_written(hook)}, which a recording"
            " loses; remove the hook, or make the module a unit of an nn.Sequential, whose units run as they are"
        )


def describe_forward_hooks(model: nn.Module) -> str:
    """Returns a warning about forward hooks of a traced model, or an empty string if there are only harmless ones."""
    hooks = [
        (name, hook)
        for name, hook in _hooks(model, _FORWARD)
        if not is_own(hook) and not _module_of(hook).startswith("torch.")
    ]
    if not hooks:
        return ""
    name, hook = hooks[0]
    more = f" (and {len(hooks) - 1} more)" if len(hooks) > 1 else ""
    return (
        f"the forward hook {_written(hook)} of module '{name}'{more} ran once, while the model was recorded: what it"
        " computes on tensors is trained with, anything else that it does does not happen again"
    )


def _hooks(model: nn.Module, kinds: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        for kind in kinds:
            for hook in getattr(module, kind).values():
                yield name or "the model itself", hook


def _module_of(hook: Callable[..., Any]) -> str:
    return str(getattr(hook, "__module__", None) or type(hook).__module__)


def _written(hook: Callable[..., Any], *_: Any) -> str:
    """Returns a hook's name and where it is defined."""
    code = getattr(hook, "__code__", None)
    name = getattr(hook, "__qualname__", type(hook).__name__)
    return f"'{name}' ({code.co_filename}:{code.co_firstlineno})" if code else f"'{name}'"
