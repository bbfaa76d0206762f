"""The part of a model that is trained: low-rank adapters of peft, its last blocks, or parameters by pattern.

Everything else is frozen: it has no gradient and no optimizer state.
"""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from pipedejavu.facts import InputError, Record, nearest
from pipedejavu.run.options import TrainOptions

ADAPTER = "default"
"""Name of the adapter in peft."""
FOLDER = "adapter"
"""Name of the adapter's folder inside a run folder."""


class TrainedPart(Record):
    """What of a model is trained; everything if no field is set."""

    lora: int | None = Field(default=None, ge=1)
    """The rank of adapters beside all linear layers but the head."""
    patterns: str | None = None
    """'last:N' for the last N blocks and what follows them, or patterns of parameter names, separated by commas."""

    @property
    def is_all(self) -> bool:
        """Whether everything is trained."""
        return self.lora is None and self.patterns is None


def trained_part(options: TrainOptions) -> TrainedPart:
    """Returns the part of the model that a run trains."""
    return TrainedPart(lora=options.lora, patterns=options.train)


def freeze_rest(model: nn.Module, part: TrainedPart, seed: int = 0) -> None:
    """Adds adapters or freezes parameters in place; raises InputError if nothing or everything would be trained."""
    if part.lora is not None and part.patterns is not None:
        raise InputError("--lora trains adapters only, and --train names parameters of the model; give one of them")
    if part.lora is not None:
        _add_adapters(model, part.lora, seed)
    elif part.patterns is not None:
        names = {*_matching(model, part.patterns)}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in names)


def describe_part(model: nn.Module, part: TrainedPart) -> str:
    """Returns a sentence on what is trained."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    count = sum(p.numel() for p in model.parameters())
    if part.is_all:
        return f"full fine-tuning of {count:,} parameters"
    how = f"LoRA of rank {part.lora}" if part.lora is not None else f"training of {part.patterns}"
    return f"{how}: {trained:,} of {count:,} parameters are trained ({trained / count:.2%}); the rest is frozen"


def _matching(model: nn.Module, text: str) -> list[str]:
    names = [name for name, _ in model.named_parameters()]
    if last := re.fullmatch(r"last:(\d+)", text):
        return [*_last_blocks(model, int(last[1]))]
    matching: list[str] = []
    for pattern in (part.strip() for part in text.split(",")):
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            raise InputError(f"--train has '{pattern}', which no parameter matches{nearest(pattern, names)}")
        matching += hits
    return matching


def _last_blocks(model: nn.Module, count: int) -> Iterator[str]:
    """Yields the parameters of the last blocks and of all modules that are registered after them."""
    lists = {
        name: [*module.named_children()]
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
    }
    if not lists:
        raise InputError("--train last:N needs a model with a list of blocks; name parameters by pattern instead")
    path, blocks = max(lists.items(), key=lambda item: len(item[1]))
    if not 1 <= count <= len(blocks):
        raise InputError(f"--train last:{count} asks for {count} blocks, and '{path}' has {len(blocks)}; give as many")
    first = ".".join(filter(None, (path, blocks[-count][0])))
    names = [name for name, _ in model.named_parameters()]
    start = next(n for n, name in enumerate(names) if name.startswith(f"{first}."))
    yield from names[start:]


def _add_adapters(model: nn.Module, rank: int, seed: int) -> None:
    """Puts adapters of peft beside all linear layers but the head, whose second matrix begins with zeros."""
    peft = _peft()
    find_head: Any = getattr(model, "get_output_embeddings", None)
    head = find_head() if find_head else None
    targets = sorted(name for name, module in model.named_modules() if type(module) is nn.Linear and module is not head)
    if not targets:
        raise InputError(f"--lora adapts linear layers, and a {type(model).__name__} has none; leave --lora out")
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=targets)
    torch.manual_seed(seed)
    peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER)


def _peft() -> Any:
    try:
        return import_module("peft")
    except ImportError:
        raise InputError("--lora needs the package peft; pip install 'pipedejavu[lora]'") from None


def merge_adapters(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a state dict with adapters as one without: each weight plus the product of its adapter's matrices."""
    merged = {}
    for name, tensor in state.items():
        if ".lora_A." in name or ".lora_B." in name:
            continue
        base, is_adapted, end = name.rpartition(".base_layer.")
        if not is_adapted:
            merged[name] = tensor
            continue
        merged[f"{base}.{end}"] = tensor
        if end == "weight":
            down, up = state[f"{base}.lora_A.{ADAPTER}.weight"], state[f"{base}.lora_B.{ADAPTER}.weight"]
            # lora_alpha is twice the rank, so the scale is 2
            merged[f"{base}.{end}"] = tensor + 2.0 * (up @ down)
    return merged


def write_adapter(state: dict[str, Tensor], rank: int, base: str, target: Path) -> None:
    """Writes the adapters of a state dict to a folder as peft does; `base` names the model that they are for."""
    from safetensors.torch import save_file

    peft = _peft()
    target.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": tensor.contiguous()
        for name, tensor in state.items()
        if ".lora_A." in name or ".lora_B." in name
    }
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    modules = sorted({name.partition(".lora_")[0] for name in state if ".lora_A." in name})
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=modules, base_model_name_or_path=base,
        inference_mode=True,
    )  # fmt: skip
    config.save_pretrained(str(target))
