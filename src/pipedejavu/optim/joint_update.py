"""The update of many parameters in one pass per device: the native code of the host, and the kernel of a GPU."""

from collections.abc import Sequence

from pipedejavu.optim.gpu_update import has_kernel, update_on_gpu
from pipedejavu.optim.native import NativeTask, update_on_host


def update_all(tasks: Sequence[NativeTask]) -> None:
    """Updates parameters with the same factor of the gradients; their tensors may have any strides.

    A new weight may be written to the memory of its gradient. All other tensors of different tasks must not overlap.
    On a GPU, updates run on the current stream of the device.
    """
    by_kernel = [task for task in tasks if has_kernel(task.gradient.device)]
    if by_kernel:
        update_on_gpu(by_kernel)
    if rest := [task for task in tasks if not has_kernel(task.gradient.device)]:
        update_on_host(rest)
