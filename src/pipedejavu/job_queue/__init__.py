"""Jobs on this host or on Ray's nodes: a queue that runs as `train` processes, with its state on disk.

The policies of `cluster` decide. It does not know how a model is planned or trained.
"""

from pipedejavu.job_queue.job_process import JobProcesses, config_of
from pipedejavu.job_queue.local_devices import LocalDevice, as_server, local_devices
from pipedejavu.job_queue.queue_page import render_queue
from pipedejavu.job_queue.queue_runner import QueueRunner
from pipedejavu.job_queue.queue_state import JobEntry, QueueState, lock_queue
from pipedejavu.job_queue.ray_process import RayLostError, RayProcesses, connect

__all__ = [
    "JobEntry",
    "JobProcesses",
    "LocalDevice",
    "QueueRunner",
    "QueueState",
    "RayLostError",
    "RayProcesses",
    "as_server",
    "config_of",
    "connect",
    "local_devices",
    "lock_queue",
    "render_queue",
]
