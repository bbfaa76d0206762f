"""Compare training algorithms by accuracy, real and simulated time: python examples/compare_algorithms.py

Add an algorithm as a line of ALGORITHMS: any plan will do, such as a preset, or a file read by Plan.load.
"""

from statistics import fmean

from pipedejavu.engine import Sgd
from pipedejavu.plan import Plan, Version, preset
from pipedejavu.reproduce.training_study import StudyRun, TrainingStudy
from pipedejavu.zoo import form_of, open_data

WORKERS, SAMPLES, UPDATES, SEEDS = 4, 16, 60, (0, 1)
WIDTHS = (64, 32, 32, 32, 10)


def pipeline(name: str, version: Version | None = None) -> Plan:
    """Returns a pipeline that makes an update of each microbatch."""
    plan = preset(name).at(workers=WORKERS, samples=SAMPLES).replace(steps=20)
    return plan.replace(version=version) if version else plan


ALGORITHMS = {
    "1f1b": preset("1f1b").at(workers=WORKERS, microbatches=4, samples=SAMPLES // 4),
    "pipedream": pipeline("pipedream"),
    "spectrain": pipeline("spectrain"),
    "pipemare": pipeline("pipemare"),
    "rates by delay": pipeline("pipedream", Version(kind="stash", rate_updates=40)),
}

study = TrainingStudy(
    model="mlp",
    data="digits",
    samples=SAMPLES,
    optimizer=Sgd(lr=0.02, momentum=0.9),
    options={"widths": WIDTHS},
    test=open_data("digits", form_of("mlp", widths=WIDTHS), split="test"),
)

print(f"{UPDATES} updates of {SAMPLES} samples, {WORKERS} workers, {len(SEEDS)} seeds")
print(f"{'algorithm':<16} {'accuracy':>9} {'simulated':>10} {'versions':>9}")
for name, plan in ALGORITHMS.items():
    courses = [StudyRun(study, seed).train(plan, UPDATES) for seed in SEEDS]
    accuracy = fmean(course.accuracy for course in courses)
    versions = max(log.peak_versions for log in courses[0].logs)
    print(f"{name:<16} {accuracy:>9.1%} {courses[0].evaluations[-1].simulated_s:>8.3f} s {versions:>9}")
