"""HybridAdamW in a Hugging Face Trainer: a small Llama with random weights learns to count."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, get_cosine_schedule_with_warmup

from pipedejavu import HybridAdamW

STEPS = 30


class Counting(Dataset):
    """Sequences that count from a random token."""

    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = torch.randint(0, 50, (1,), generator=torch.Generator().manual_seed(index))
        tokens = (start + torch.arange(24)) % 50
        return {"input_ids": tokens, "labels": tokens}


torch.manual_seed(0)
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=64, **shape)).to(torch.bfloat16)
if torch.cuda.is_available():
    model.cuda()  # before the optimizer is made

optimizer = HybridAdamW(model, lr=3e-3, weight_decay=0.01, clip_norm=1.0, gpu_units=3)
schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=STEPS)

with tempfile.TemporaryDirectory() as folder:
    options = TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=8,
        max_grad_norm=0,  # the optimizer clips
        logging_steps=10,
        save_steps=20,
        report_to=[],
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
    )
    trainer = Trainer(model, options, train_dataset=Counting(), optimizers=(optimizer, schedule))
    trainer.train()

assert optimizer.plan is not None
print(*optimizer.plan.reasons, sep="\n")
optimizer.close()
