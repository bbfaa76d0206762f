"""Compares predictors of operators' times on devices, and for operators, that they have not seen.

    python bench/predictors.py [ROWS.csv …]       # by default the rows that come with the project

Rows come from `bench/operators.py`. Each predictor is fitted to all rows but those of one device, or of one class of
operators, and predicts these; the table shows by which factor its predictions are off, in the middle of the rows and on
average (of logarithms, so that twice and half count alike). 'stated' is no predictor: the bound of the device's rates,
with arithmetic at 40 %. Those that need scikit-learn are left out where it is missing.
"""

import sys
from collections.abc import Callable, Sequence

from pipedejavu.facts import InputError
from pipedejavu.profile.operator import OperatorRow, known_rows, read_rows
from pipedejavu.profile.predictor import PREDICTORS, Predict, fit_efficiency, leave_one_out
from pipedejavu.reproduce.predictor_study import describe_error, fit_stated


def print_table(title: str, names: Sequence[str], lines: Sequence[tuple[str, Sequence[str]]]) -> None:
    print(f"\n| {title} | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
    for name, cells in lines:
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    paths = sys.argv[1:]
    rows = [row for path in paths for row in read_rows(path)] if paths else list(known_rows())
    devices = sorted({row.device for row in rows})
    print(f"{len(rows)} rows of {', '.join(devices)}")
    fits: dict[str, Callable[[Sequence[OperatorRow]], Predict]] = {"stated": fit_stated}
    for name, fit in PREDICTORS.items():
        try:
            fit(rows)
            fits[name] = fit
        except InputError as fault:
            print(f"{name}: {fault}")
    keys: dict[str, Callable[[OperatorRow], str]] = {
        "device": lambda row: row.device,
        "operator": lambda row: row.class_,
    }
    for what, key in keys.items():
        found = {name: leave_one_out(rows, key, fit) for name, fit in fits.items()}
        groups = sorted({key(row) for row in rows})
        lines = [(group, [describe_error(found[name][group]) for name in fits]) for group in groups]
        together = [[ratio for group in groups for ratio in found[name][group]] for name in fits]
        lines.append(("all", [describe_error(ratios) for ratios in together]))
        print_table(f"without the {what}", list(fits), lines)
    inside = [[t / row.time_s for t, row in zip(fit(rows)(rows), rows, strict=True)] for fit in fits.values()]
    print_table("fitted to all", list(fits), [("all", [describe_error(ratios) for ratios in inside])])
    print("\nefficiencies")
    for type_ in sorted({row.type for row in rows}):
        own = fit_efficiency([row for row in rows if row.type == type_])
        shares = ", ".join(f"{name} {share:.2f}" for name, share in own.shares.items())
        launches = ", ".join(f"{name} {time_s * 1e6:.1f} us" for name, time_s in own.launch_s.items())
        print(f"  {type_}: {shares}; launch {launches}")


if __name__ == "__main__":
    try:
        main()
    except InputError as fault:
        sys.exit(f"predictors: {fault}")
