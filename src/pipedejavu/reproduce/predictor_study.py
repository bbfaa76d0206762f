"""Predictors of time for devices and operators that they have not seen, and of memory without running a model.

Times: rows of measured operators, each group predicted from all others. Memory: what a model's units save for the
backward, counted on tensors without memory, against what they save when they run.
"""

import math
from collections.abc import Callable, Sequence
from statistics import mean, median

from pipedejavu.planner.profiling import estimate_model, measure_model
from pipedejavu.profile.operator import OperatorRow, known_rows
from pipedejavu.profile.predictor import PREDICTORS, Predict, leave_one_out
from pipedejavu.profile.time_budget import TimeBudget
from pipedejavu.report import Compared, ExperimentFindings, FindingsTable
from pipedejavu.reproduce.experiment import Setting
from pipedejavu.reproduce.training_study import hosts_with_cpus

STATED = 0.4
"""Share of a device's stated rate that the simplest prediction assumes."""
_MODELS = ("mlp", "vgg-small", "gpt-tiny", "bert-tiny", "seq2seq-tiny", "resnet18")
_SAMPLES = 8
_HEADS = ("Model", "Predicted", "Measured", "Ratio")
_BUDGET_S = 2.0
"""Seconds that measuring one model may take: bytes need one pass."""


def run(setting: Setting) -> ExperimentFindings:
    """Fits every predictor without each device and each class of operators, and counts the bytes of models."""
    rows = list(known_rows())
    names = setting.pick(("roofline", "linear"), tuple(PREDICTORS), tuple(PREDICTORS))
    fits: dict[str, Callable[[Sequence[OperatorRow]], Predict]] = {
        "stated rates": fit_stated,
        **{name: PREDICTORS[name] for name in names},
    }
    keys: dict[str, Callable[[OperatorRow], str]] = {
        "device": lambda row: row.device,
        "operator": lambda row: row.class_,
    }
    tables, errors = [], dict[tuple[str, str], list[float]]()
    for what, key in keys.items():
        setting.report(f"predicting each {what} from the others")
        ratios = {name: leave_one_out(rows, key, fit) for name, fit in fits.items()}
        groups = sorted({key(row) for row in rows})
        lines = [(group, *(describe_error(ratios[name][group]) for name in fits)) for group in groups]
        together = {name: [r for group in groups for r in ratios[name][group]] for name in fits}
        errors |= {(what, name): found for name, found in together.items()}
        lines.append(("all", *(describe_error(found) for found in together.values())))
        title = f"Time of an operator without its {what}: factor off, median / mean"
        tables.append(FindingsTable(title, (what, *fits), lines))
    memory, worst = _memory(setting)
    return ExperimentFindings(
        "", "", "How far off are predictions for devices, operators and models that were not measured?",
        [("rows", f"{len(rows)} measured operators on {len({row.device for row in rows})} devices"),
         ("models", f"{len(memory)}, {_SAMPLES} samples")],
        _compared(errors, list(fits), worst),
        (), [*tables, FindingsTable("Bytes saved for the backward", _HEADS, memory)],
        ["A roofline with fitted efficiencies is compared with learned predictors on equal terms: all see two rates of"
         " a device and the operator's work, and no measurement of what they predict."],
        ["The published errors are of GPU kernels whose counters were measured beforehand, so they bound from below."],
    )  # fmt: skip


def fit_stated(rows: Sequence[OperatorRow]) -> Predict:
    """Returns no fit: the bound of the device's stated rates, with arithmetic at a fixed share."""
    del rows
    return lambda asked: [max(row.flop / row.flop_per_s / STATED, row.size_bytes / row.bytes_per_s) for row in asked]


def describe_error(ratios: Sequence[float]) -> str:
    """Returns the factor by which predictions are off: in the middle, and on average of logarithms."""
    logs = [abs(math.log(ratio)) for ratio in ratios]
    return f"{math.exp(median(logs)):.2f} / {math.exp(mean(logs)):.2f}"


def _compared(errors: dict[tuple[str, str], list[float]], fits: Sequence[str], worst: float) -> list[Compared]:
    published = {"device": "1.5 % (unseen GPUs)", "operator": "2.7 % (unseen kernels)"}
    rows = []
    for what, known in published.items():
        logs = {name: median(abs(math.log(ratio)) for ratio in errors[what, name]) for name in fits}
        best = min(logs, key=lambda name: logs[name])
        meaning = f"the best here is '{best}'; published with measured features of each kernel"
        rows.append(Compared(f"median error of time, unseen {what}", f"{math.expm1(logs[best]):.0%}", known, meaning))
    return [*rows, Compared("largest error of saved bytes", f"{worst:.1%}", "–")]


def _memory(setting: Setting) -> tuple[list[tuple[str, ...]], float]:
    """Returns rows of predicted and measured bytes, and the largest relative error."""
    models, machine = setting.pick(_MODELS[:1], _MODELS[:5], _MODELS), hosts_with_cpus()
    lines, worst = list[tuple[str, ...]](), 0.0
    for model in models:
        setting.report(f"counting and measuring the bytes of {model}")
        predicted = estimate_model(model, _SAMPLES, machine, lambda _: None).profile
        measured = measure_model(model, _SAMPLES, lambda _: None, budget=TimeBudget(_BUDGET_S)).profile
        one, two = (sum(unit.activation_bytes for unit in p.units) * _SAMPLES for p in (predicted, measured))
        worst = max(worst, abs(one / two - 1))
        lines.append((model, f"{one / 2**20:.2f} MiB", f"{two / 2**20:.2f} MiB", f"{one / two:.3f}"))
    return lines, worst
