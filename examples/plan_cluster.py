"""Plan for a cluster that you do not own: which of three offers trains a GPT of 6.7 billion fastest, and how."""

from pipedejavu.facts import format_seconds, read_machine
from pipedejavu.search import SearchOptions, search
from pipedejavu.zoo import estimate_profile

OFFERS = {
    "one host of eight A100": "8xa100-80gb + 2xepyc-7763",
    "two such hosts": "2x(8xa100-80gb + 2xepyc-7763), 100Gb/s",
    "two such hosts, slow network": "2x(8xa100-80gb + 2xepyc-7763), 10Gb/s",
}
BATCH = 64

for name, text in OFFERS.items():
    machine = read_machine(text)
    found = search(estimate_profile("gpt-6.7b", machine), machine, SearchOptions(batch=BATCH, time_budget_s=5.0))
    best = found.best
    if best is None:
        print(f"{name}: nothing fits")
        continue
    axes = best.plan.axes()
    print(f"{name}: {format_seconds(best.time_s)} an update of {BATCH} samples")
    print(f"  place {axes['place']}, order {axes['order']}, keep {axes['keep']}; {best.bound}")
