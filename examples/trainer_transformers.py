"""A model of transformers as it comes: its own loss, labels that do not count, perplexity, and save_pretrained."""

import copy

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import pipedejavu as pdv

torch.manual_seed(0)
shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=64, **shape))
plain = copy.deepcopy(model)
tokens = (torch.randint(0, 50, (80, 1)) + torch.arange(24)) % 50  # sequences that count
labels = tokens.masked_fill(torch.arange(24) < torch.randint(1, 12, (80, 1)), -100)  # loss on the answers only
batches = [{"input_ids": x, "labels": y} for x, y in zip(tokens.split(16), labels.split(16), strict=True)]


def train_plainly(model: LlamaForCausalLM) -> None:
    """The loop that the Trainer replaces."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in batches:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()


def distance(one: LlamaForCausalLM, other: LlamaForCausalLM) -> float:
    """Returns the largest difference of two models' weights."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


train_plainly(plain)
parts = copy.deepcopy(model)
optimizer = torch.optim.AdamW(parts.parameters(), lr=3e-3)
for batch in batches:  # the plain loop once more, in other parts, to see how far float32 rounds
    optimizer.zero_grad()
    counted = (batch["labels"][:, 1:] != -100).sum()
    for rows in (slice(n, n + 4) for n in range(0, 16, 4)):
        part = {name: value[rows] for name, value in batch.items()}
        (parts(**part).loss * (part["labels"][:, 1:] != -100).sum() / counted).backward()
    optimizer.step()

trainer = pdv.Trainer(model, torch.optim.AdamW(model.parameters(), lr=3e-3), workers=2)
for batch in batches:
    trainer.step(batch)
metrics = trainer.evaluate(batches)
print({name: round(value, 4) for name, value in metrics.items()})
model.state_dict()  # brings the trained weights back
assert distance(model, plain) <= 10 * distance(parts, plain), (distance(model, plain), distance(parts, plain))
trainer.save("out/trainer_transformers")  # one folder for all ranks, if torchrun started several
trainer.wait()
assert distance(AutoModelForCausalLM.from_pretrained("out/trainer_transformers"), model) == 0
