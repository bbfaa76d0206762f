"""The engine: runs programs with torch on workers with lanes and wires, and audits what they computed."""

from pipedejavu.engine.audit import audit
from pipedejavu.engine.byzantine import Byzantine
from pipedejavu.engine.job import Applied, Batches, Event, Job, Log, Read, Scored
from pipedejavu.engine.optimizer import AdamW, Optimizer, Sgd
from pipedejavu.engine.threads import Outcome, Threads, check_runnable, run_threads
from pipedejavu.engine.uncut_replay import UncutModel
from pipedejavu.engine.verdict import Verdict, judge

__all__ = [
    "AdamW",
    "Applied",
    "Batches",
    "Byzantine",
    "Event",
    "Job",
    "Log",
    "Optimizer",
    "Outcome",
    "Read",
    "Scored",
    "Sgd",
    "Threads",
    "UncutModel",
    "Verdict",
    "audit",
    "check_runnable",
    "judge",
    "run_threads",
]
