"""Writes docs/presets.md: every preset with its axes, its figures and its picture at unit costs.

python docs/presets.py > docs/presets.md
"""

from pipedejavu.analysis import verify
from pipedejavu.plan import Preset, presets
from pipedejavu.program import compile
from pipedejavu.report import render_grid
from pipedejavu.simulate import simulate, unit_costs

HEAD = """# Presets

Made by `python docs/presets.py`. Each picture is the preset's program at unit costs: a worker's forward of a
microbatch takes 1, its backward 2 (input and weight half 1 each), communication nothing. There are 8 microbatches and
4 workers; the chunks of a worker divide its cost. A letter after the number names the chunk. Presets that reduce or
update piece by piece have four pieces per stage here. Lanes other than compute are not drawn.
"""


def main() -> None:
    """Prints the page."""
    print(HEAD)
    for name, entry in presets().items():
        print(describe(name, entry))


def describe(name: str, entry: Preset) -> str:
    """Returns one preset's section."""
    plan = entry.at()
    program = compile(*unit_costs(plan, {}))
    prediction = simulate(program, verify(program))
    live = [w.peak_live_microbatches for w in prediction.workers]
    versions = [w.weight_versions for w in prediction.workers]
    axes = " · ".join(f"{axis} **{text}**" for axis, text in plan.axes().items())
    copies = f", {program.copies} copies of the workers drawn" if program.copies > 1 else ""
    return "\n".join(
        [
            f"## {name}\n",
            f"{entry.title}.\n",
            f"{axes}\n",
            f"Makespan {prediction.makespan_s:g}, bubble {prediction.bubble_fraction:.1%}, live microbatches"
            f" {', '.join(map(str, live))}, weight versions {', '.join(map(str, versions))}{copies}.\n",
            "```",
            render_grid(prediction.timeline(), 33).rstrip(),
            "```\n",
        ]
    )


if __name__ == "__main__":
    main()
