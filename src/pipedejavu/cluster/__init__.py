"""Several jobs on one cluster: tables of throughput from plans, policies, and a simulator of the schedule.

It knows jobs, servers and prices. It does not know how a model is measured or a plan is run, and writes no files.
"""

from pipedejavu.cluster.cluster_clock import ClusterCourse, simulate_cluster
from pipedejavu.cluster.cluster_job import ClusterJob, RateRow
from pipedejavu.cluster.decision import QueueDecision, QueuedJob, check_queue, decide
from pipedejavu.cluster.policy import POLICIES
from pipedejavu.cluster.schedule_options import ScheduleOptions
from pipedejavu.cluster.schedule_summary import JobOutcome, ScheduleSummary, outcomes, summarise
from pipedejavu.cluster.server import Server, servers_of

__all__ = [
    "POLICIES",
    "ClusterCourse",
    "ClusterJob",
    "JobOutcome",
    "QueueDecision",
    "QueuedJob",
    "RateRow",
    "ScheduleOptions",
    "ScheduleSummary",
    "Server",
    "check_queue",
    "decide",
    "outcomes",
    "servers_of",
    "simulate_cluster",
    "summarise",
]
