"""Loss curves by precision: python bench/precision.py --model gpt-125m --steps 300 --device cuda.

Each contender trains the same model from the same weights on the same batches, once per seed: the Trainer in several
precisions, and a loop that a user would write, in float32 and under autocast. The last lines set the differences
between contenders beside the scatter between seeds.
"""

import argparse
import copy
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

ALIASES = {"gpt-125m": "gpt-small"}
CONTENDERS = ("loop fp32", "loop bf16", "engine fp32", "engine bf16", "engine fp16")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-tiny")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS[:4]))
    parser.add_argument("--every", type=int, default=0, help="Print the loss this often; by default ten times.")
    return parser.parse_args()


def main(arguments: argparse.Namespace) -> None:
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU; use --device cpu")
    every = arguments.every or max(1, arguments.steps // 10)
    last: dict[str, list[float]] = {name: [] for name in arguments.contenders}
    for seed in arguments.seeds:
        curves = {name: curve(name, seed, arguments) for name in arguments.contenders}
        print(f"seed {seed}   step  " + "  ".join(f"{name:>12}" for name in curves))
        for step in range(every, arguments.steps + 1, every):
            means = (statistics.fmean(losses[step - every : step]) for losses in curves.values())
            print(f"         {step:6}  " + "  ".join(f"{mean:12.4f}" for mean in means), flush=True)
        for name, losses in curves.items():
            last[name].append(statistics.fmean(losses[-every:]))
    base = last[arguments.contenders[0]]
    scatter = statistics.stdev(base) if len(base) > 1 else float("nan")
    print(f"scatter of '{arguments.contenders[0]}' between seeds: {scatter:.4f}")
    for name, ends in last.items():
        gap = statistics.fmean(end - own for end, own in zip(ends, base, strict=True))
        print(f"{name:>12}: last {every} steps {statistics.fmean(ends):.4f}, beside the first {gap:+.4f}")


def curve(name: str, seed: int, arguments: argparse.Namespace) -> list[float]:
    """Trains once and returns the mean loss of each step."""
    import torch

    from pipedejavu.zoo.zoo_task import build

    torch.manual_seed(seed)
    task = build(ALIASES.get(arguments.model, arguments.model), seed=seed)
    kind, _, precision = name.partition(" ")
    model = copy.deepcopy(task.model)

    def mean_loss(output: Any, targets: Any) -> Any:
        return task.loss(output, targets) / task.count(targets)

    train = (
        loop(model, mean_loss, precision, arguments)
        if kind == "loop"
        else engine(model, mean_loss, precision, arguments)
    )
    return [train(batch) for batch in batches(task, seed, arguments)]


def batches(task: Any, seed: int, arguments: argparse.Namespace) -> Iterator[tuple[Any, Any]]:
    from pipedejavu.source.task import draw

    for step in range(arguments.steps):
        yield draw(task.data, seed, range(step * arguments.batch, (step + 1) * arguments.batch))


def loop(model: Any, loss: Any, precision: str, arguments: argparse.Namespace) -> Callable[[tuple[Any, Any]], float]:
    import torch

    model.to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)

    def step(batch: tuple[Any, Any]) -> float:
        inputs, targets = (value.to(arguments.device) for value in batch)
        with torch.autocast(arguments.device, torch.bfloat16, enabled=precision == "bf16"):
            result = loss(model(inputs), targets)
        optimizer.zero_grad()
        result.backward()
        optimizer.step()
        return result.item()

    return step


def engine(model: Any, loss: Any, precision: str, arguments: argparse.Namespace) -> Callable[[tuple[Any, Any]], float]:
    import torch

    from pipedejavu.session import Trainer

    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    trainer = Trainer(model, optimizer, loss, plan="ddp", workers=1, precision=precision, check_model=False)
    return trainer.step


if __name__ == "__main__":
    main(read_arguments())
