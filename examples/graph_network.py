"""Trains GraphSAGE on the graph of Python's standard library: a plain loop over sampled neighbourhoods.

    python examples/graph_network.py

The class of a module, class or function is its top-level package. `pipedejavu train zoo:sage --data graph:stdlib` makes
the same updates under any plan that keeps the model whole.
"""

import torch

from pipedejavu.zoo import build, open_data, order

BATCH, EPOCHS, SEED = 512, 3, 0
SIZES = {"fanouts": (10, 5), "hidden": 128}


def main() -> None:
    task = build("sage", data="graph:stdlib", seed=SEED, **SIZES)
    test = open_data("graph:stdlib", task.data.form, split="test")
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=3e-3)
    step = 0
    for epoch in range(EPOCHS):
        nodes = order(SEED, epoch, len(task.data))
        for first in range(0, len(nodes) - BATCH + 1, BATCH):
            inputs, classes = task.data.drawn(nodes[first : first + BATCH], step)
            optimizer.zero_grad()
            loss = task.loss(task.model(inputs), classes) / len(classes)
            loss.backward()
            optimizer.step()
            step += 1
        with torch.no_grad():
            inputs, classes = test.batch(range(len(test)))
            right = (task.model(inputs).argmax(1) == classes).float().mean()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, {right:.1%} of {len(test)} test nodes right")


if __name__ == "__main__":
    main()
