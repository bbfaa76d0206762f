"""Parts on top of torch that the engine and the hybrid optimizer share: lanes and their events, pinned host memory,
offload of saved tensors, recomputation.

Knows nothing of programs, plans and optimizers.
"""
