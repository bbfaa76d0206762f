"""Compare published schedules on a machine that you do not own: python examples/compare_presets.py"""

from pathlib import Path

from pipedejavu.analysis import verify
from pipedejavu.facts import InputError, Machine, format_bytes, format_seconds
from pipedejavu.plan import preset
from pipedejavu.program import compile
from pipedejavu.simulate import simulate
from pipedejavu.zoo import estimate_profile

machine = Machine.load(Path(__file__).with_name("four-gpus.json"))
profile = estimate_profile("gpt-6.7b", machine)

print(f"{profile.name} on {machine.name}, 16 microbatches of 4 samples")
print(f"{'preset':<16} {'time':>9} {'bubble':>7} {'highest peak':>13}")
for name in ("gpipe", "gpipe-recompute", "1f1b", "interleaved", "zb-h1", "zb-v", "chimera", "fine", "ddp", "zero-3"):
    try:
        plan = preset(name).at(workers=4, microbatches=16, samples=4)
        program = compile(plan, profile, machine)
        prediction = simulate(program, verify(program))
    except InputError as error:
        print(f"{name:<16} {str(error).partition(';')[0]}")
        continue
    peak = max(worker.peak_bytes for worker in prediction.workers)
    time = format_seconds(prediction.makespan_s)
    print(f"{name:<16} {time:>9} {prediction.bubble_fraction:>7.1%} {format_bytes(peak):>13}")
