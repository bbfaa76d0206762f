"""Draws docs/img/graph-curves.svg: accuracy on the graph of Python's standard library, epoch by epoch.

python docs/graph_curves.py

GraphSAGE, GCN and GAT with fan-outs of 10 and 5 are compared with a perceptron that reads a node's own features alone.
"""

from pathlib import Path

import torch
from torch import nn

from pipedejavu.zoo import build, open_data, order

PICTURE = Path(__file__).parent / "img" / "graph-curves.svg"
EPOCHS, BATCH, LR, SEED = 8, 512, 3e-3, 0
MODELS = {"GraphSAGE": "sage", "GCN": "gcn", "GAT": "gat", "own features alone": ""}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 360, 60, 160, 48, 316
STYLE = """
  :root { --card: #ffffff; --ink: #1b222b; --soft: #5c6773; --line: #dfe3e8; --c0: #2a6fc9; --c1: #c8741c;
    --c2: #2c8a57; --c3: #7d8791; }
  @media (prefers-color-scheme: dark) { :root { --card: #191e25; --ink: #e4e8ed; --soft: #98a3b0; --line: #2d343d;
    --c0: #78aef5; --c1: #f2b774; --c2: #6fd19c; --c3: #98a3b0; } }
  text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--soft); }
  .title { font-size: 15px; font-weight: 600; fill: var(--ink); } .grid { stroke: var(--line); }
  .curve { fill: none; stroke-width: 2.4; stroke-linejoin: round; }
"""


def accuracies(name: str) -> list[float]:
    """Trains a model and returns its accuracy on the test nodes after each epoch."""
    task = build(name or "sage", data="graph:stdlib", seed=SEED, fanouts=(10, 5), hidden=128)
    data, test = task.data, open_data("graph:stdlib", task.data.form, split="test")
    torch.manual_seed(SEED)
    alone = nn.Sequential(nn.Linear(data.features, 128), nn.ReLU(), nn.Linear(128, data.classes))
    model = task.model if name else alone
    optimizer, found, step = torch.optim.AdamW(model.parameters(), lr=LR), [], 0
    for epoch in range(EPOCHS):
        nodes = order(SEED, epoch, len(data))
        for first in range(0, len(nodes) - BATCH + 1, BATCH):
            inputs, classes = data.drawn(nodes[first : first + BATCH], step)
            optimizer.zero_grad()
            task.loss(model(inputs if name else inputs[1][: len(classes)]), classes).div(len(classes)).backward()
            optimizer.step()
            step += 1
        with torch.no_grad():
            inputs, classes = test.batch(range(len(test)))
            output = model(inputs if name else inputs[1][: len(classes)])
        found.append(float((output.argmax(1) == classes).float().mean()))
    return found


def place(epoch: int, accuracy: float) -> tuple[float, float]:
    """Returns the point of an accuracy in the picture."""
    x = LEFT + (WIDTH - LEFT - RIGHT) * epoch / (EPOCHS - 1)
    return round(x, 1), round(BOTTOM - (BOTTOM - TOP) * accuracy, 1)


def draw(curves: dict[str, list[float]]) -> str:
    """Returns the picture; names stand at the ends of their curves, apart from each other."""
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="var(--card)"/>']
    parts.append(f'<text class="title" x="{LEFT}" y="26">Test nodes whose package is right, by epoch</text>')
    for tenth in range(0, 11, 2):
        y = place(0, tenth / 10)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{10 * tenth} %</text>')
    for epoch in range(EPOCHS):
        parts.append(f'<text x="{place(epoch, 0)[0]}" y="{BOTTOM + 20}" text-anchor="middle">{epoch + 1}</text>')
    ends = sorted((place(EPOCHS - 1, curve[-1])[1], name) for name, curve in curves.items())
    lowest = 0.0
    for end, name in ends:
        lowest = max(end, lowest + 16)
        number = list(curves).index(name)
        points = " ".join(f"{x},{y}" for x, y in (place(n, value) for n, value in enumerate(curves[name])))
        parts.append(f'<polyline class="curve" style="stroke: var(--c{number})" points="{points}"/>')
        text = f"{name} {curves[name][-1]:.0%}"
        parts.append(f'<text x="{WIDTH - RIGHT + 10}" y="{lowest + 4}" style="fill: var(--c{number})">{text}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    return f'{head} aria-label="Accuracy by epoch"><style>{STYLE}</style>{"".join(parts)}</svg>\n'


def main() -> None:
    """Trains all models and writes the picture."""
    curves = {title: accuracies(name) for title, name in MODELS.items()}
    for title, curve in curves.items():
        print(title, " ".join(f"{accuracy:.1%}" for accuracy in curve))
    PICTURE.write_text(draw(curves), encoding="utf-8")


if __name__ == "__main__":
    main()
