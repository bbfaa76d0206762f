"""Tries the cutter on many architectures and writes the table of docs/models.md; needs transformers.

PYTHONPATH=src python -m docs.models > docs/models.md
"""

import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import nn

from pipedejavu.facts import InputError
from pipedejavu.zoo import build
from tests.profile.case import PLAIN, Difference, compare, own_loss, run

Case = tuple[nn.Module, Any]

VOCABULARY, LENGTH = 64, 12
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 1}
CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
GPT = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32}
PAIR = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    **SPECIAL,
}
T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, **SPECIAL}
PICTURE = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
PICTURE |= {"image_size": 32, "patch_size": 8, **CALM}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

TRANSFORMERS: dict[str, tuple[str, Mapping[str, Any], str]] = {
    # class of the model, its configuration, and what it reads
    "GPT-2": ("GPT2LMHeadModel", {**GPT, **NO_DROPOUT}, "text"),
    "Llama": ("LlamaForCausalLM", GROUPED, "text"),
    "BERT": ("BertForMaskedLM", {**SIZES, **CALM}, "text"),
    "T5": ("T5ForConditionalGeneration", {**T5, "dropout_rate": 0.0}, "text"),
    "ViT": ("ViTForImageClassification", PICTURE, "image"),
    "Mistral": ("MistralForCausalLM", GROUPED, "text"),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED, "text"),
    "Qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}, "text"),
    "Gemma": ("GemmaForCausalLM", {**GROUPED, "head_dim": 8}, "text"),
    "Gemma 2": ("Gemma2ForCausalLM", {**GROUPED, "head_dim": 8}, "text"),
    "Phi": ("PhiForCausalLM", {**SIZES, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, "text"),
    "Phi-3": ("Phi3ForCausalLM", {**GROUPED, **NO_DROPOUT}, "text"),
    "StableLM": ("StableLmForCausalLM", GROUPED, "text"),
    "OLMo 2": ("Olmo2ForCausalLM", GROUPED, "text"),
    "Granite": ("GraniteForCausalLM", GROUPED, "text"),
    "SmolLM3": ("SmolLM3ForCausalLM", GROUPED, "text"),
    "Cohere": ("CohereForCausalLM", GROUPED, "text"),
    "GPT-NeoX": ("GPTNeoXForCausalLM", {**SIZES, "hidden_dropout": 0.0, "attention_dropout": 0.0}, "text"),
    "GPT-J": ("GPTJForCausalLM", {**GPT, **NO_DROPOUT, "rotary_dim": 4}, "text"),
    "GPT-Neo": (
        "GPTNeoForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 32,
        },
        "text",
    ),
    "OPT": (
        "OPTForCausalLM",
        {**SIZES, "ffn_dim": 32, "word_embed_proj_dim": 16, "max_position_embeddings": 32, "dropout": 0.0},
        "text",
    ),
    "BLOOM": ("BloomForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 3, "n_head": 2}, "text"),
    "Falcon": ("FalconForCausalLM", {**SIZES, "attention_dropout": 0.0, "hidden_dropout": 0.0}, "text"),
    "MPT": ("MptForCausalLM", {"vocab_size": VOCABULARY, "d_model": 16, "n_layers": 3, "n_heads": 2}, "text"),
    "CodeGen": ("CodeGenForCausalLM", {**GPT, **NO_DROPOUT, "rotary_dim": 4, "n_head": 4}, "text"),
    "Mamba": ("MambaForCausalLM", {**SIZES, "state_size": 4}, "text"),
    "RWKV": ("RwkvForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 3}, "text"),
    "Mixtral (experts)": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}, "text"),
    "RoBERTa": ("RobertaForMaskedLM", {**SIZES, **CALM}, "text"),
    "DistilBERT": (
        "DistilBertForMaskedLM",
        {"vocab_size": VOCABULARY, "dim": 16, "hidden_dim": 32, "n_layers": 3, "n_heads": 2, "dropout": 0.0}
        | {"attention_dropout": 0.0},
        "text",
    ),
    "ALBERT (one layer, called again)": ("AlbertForMaskedLM", {**SIZES, **CALM, "embedding_size": 8}, "text"),
    "ELECTRA": ("ElectraForMaskedLM", {**SIZES, **CALM, "embedding_size": 16}, "text"),
    "DeBERTa-v2": ("DebertaV2ForMaskedLM", {**SIZES, **CALM}, "text"),
    "MPNet": ("MPNetForMaskedLM", {**SIZES, **CALM}, "text"),
    "ModernBERT": ("ModernBertForMaskedLM", {**SIZES, "cls_token_id": 1, "sep_token_id": 2}, "text"),
    "BART": ("BartForConditionalGeneration", PAIR, "text"),
    "Pegasus": ("PegasusForConditionalGeneration", PAIR, "text"),
    "M2M-100": ("M2M100ForConditionalGeneration", PAIR, "text"),
    "mT5": ("MT5ForConditionalGeneration", {**T5, "dropout_rate": 0.0}, "text"),
    "Whisper": ("WhisperForConditionalGeneration", {**PAIR, "num_mel_bins": 8, "max_source_positions": 16}, "sound"),
    "DeiT": ("DeiTForImageClassification", PICTURE, "image"),
    "BEiT": ("BeitForImageClassification", {**PICTURE, "drop_path_rate": 0.0}, "image"),
    "DINOv2": ("Dinov2ForImageClassification", PICTURE, "image"),
    "Swin": (
        "SwinForImageClassification",
        {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
        | {"drop_path_rate": 0.0},
        "image",
    ),
    "ConvNeXt": ("ConvNextForImageClassification", {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}, "image"),
    "ResNet": (
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "bottleneck"},
        "image",
    ),
    "MobileNetV2": ("MobileNetV2ForImageClassification", {"classifier_dropout_prob": 0.0}, "image"),
    "SegFormer": (
        "SegformerForImageClassification",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 1, 2, 2], **CALM}
        | {"drop_path_rate": 0.0, "classifier_dropout_prob": 0.0},
        "image",
    ),
}


def build_transformer(name: str) -> Case:
    """Builds a model from its configuration, and inputs with labels."""
    model, settings, reads = TRANSFORMERS[name]
    made = getattr(transformers, model)
    config = made.config_class(**settings)
    config.use_cache = False
    labels = torch.randint(3, VOCABULARY, (2, LENGTH))
    if reads == "image":
        return made(config), {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    if reads == "sound":
        return made(config), {"input_features": torch.randn(2, 8, 32), "labels": labels}
    return made(config), {"input_ids": torch.randint(3, VOCABULARY, (2, LENGTH)), "labels": labels}


def build_zoo(name: str) -> Case:
    """Builds a model of the zoo, with samples of its data."""
    task = build(name, data="random")
    return task.model, task.data.batch(range(2))[0]


class Recurrent(nn.Module):
    """nn.Transformer that has to find out whether its mask is causal."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.transformer(source, target, tgt_mask=mask)


def others() -> dict[str, Callable[[], Case]]:
    found: dict[str, Callable[[], Case]] = {**PLAIN}
    found["nn.Transformer that detects causality"] = lambda: (Recurrent(), (torch.randn(2, 5, 8), torch.randn(2, 4, 8)))
    found["nn.Sequential"] = lambda: (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4))
    for name in ("vgg19", "gpt-tiny"):
        found[f"zoo:{name}"] = lambda name=name: build_zoo(name)
    return found


def describe(differences: list[Difference], model: nn.Module, inputs: Any, cut: Any) -> tuple[str, str, str]:
    """Returns cells: whether outputs and loss, and gradients, are equal for every number of pieces, and what is not."""
    outputs = [d.pieces for d in differences if d.outputs or d.loss or d.buffers]
    names = sorted({name for d in differences for name in d.gradients})
    note = ""
    if names:
        whole = dict(model.named_parameters())
        own_loss(_called(model, inputs)).backward()
        furthest = 0.0
        for d in differences:
            gradients = run(cut, inputs, own_loss, d.pieces)[2]
            furthest = max(furthest, *(float((gradients[n] - whole[n].grad).abs().max()) for n in names))
        shown = ", ".join(f"`{name}`" for name in names[:2]) + (f" and {len(names) - 2} more" if names[2:] else "")
        note = f"{shown}: up to {furthest:.1g} apart in some of the divisions"
    return ("no" if outputs else "yes"), ("no" if names else "yes"), note


def _called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def row(name: str, make: Callable[[], Case]) -> str:
    torch.manual_seed(0)
    try:
        model, inputs = make()
        cut, differences = compare(model, inputs)
    except InputError as error:
        return f"| {name} | refused | | | | {_short(str(error))} |"
    except Exception as error:
        traceback.print_exc()
        return f"| {name} | failed | | | | {type(error).__name__}: {_short(str(error))} |"
    cells = describe(differences, model, inputs, cut)
    return f"| {name} | {cut.way} | {len(cut.units)} | {cells[0]} | {cells[1]} | {cells[2]} |"


def _short(text: str) -> str:
    """Returns the first sentence, with paths as a reader of the package has them."""
    line = text.strip().splitlines()[0].replace("|", "\\|")
    for folder in ("site-packages/", "/docs/", "/tests/"):
        before, found, after = line.partition(folder)
        if found:
            line = (
                before.rpartition(" ")[0]
                + " "
                + found.strip("/").removeprefix("site-packages")
                + "/" * (folder != "site-packages/")
                + after
            )
    return line[:300]


INTRODUCTION = """# Models that were cut

`pipedejavu` takes a model as it is: `zoo:NAME`, `hf:CONFIG`, `FILE.py:FUNCTION`, or a live module that the `Trainer`
is given.

- A **chain** is read as it is: an `nn.Sequential` without a forward or hooks of its own, or a module whose method
  `units()` lists (name, module) pairs that hold all its parameters under their own names. Its units run as they are,
  with their hooks and whatever Python they run; a module that is listed twice is two units with tied weights.
- Any other model is recorded by `torch.export`, on tensors without memory, for inputs of one shape. It is cut
  where its **blocks** begin: modules with numbers for names, as in an `nn.ModuleList`. Where it has too few of them,
  it is cut anywhere in its **graph** between two uses of parameters. Positions inside of a residual are left out.
- A unit takes the tensors that are live where it begins, as a tuple: skips, masks, position embeddings and labels
  pass through the units that do not need them. Its parameters and buffers are the model's own, under the model's own
  names.
- The loss is a function of the model's output and the targets, or the model's own: `output.loss`.

**Means and sums.** A loss may be a mean over samples (`nn.CrossEntropyLoss()`), a mean over labels that count (those
that are not −100, or not the loss's `ignore_index`, for a model's own loss also without the first of each row, as
language models shift them), or a sum over samples, which an update divides by the number of samples. Which of them it
is is found out once, before training: the gradient of five samples is compared with those of the first two and of the
other three, without dropout, with the same random numbers everywhere, and with labels that tell the cases apart. A
mean is then multiplied by what it is over, and an update is divided by all of that together, so that microbatches of
any size give what the whole batch gives. A loss that is neither (contrastive losses, class weights under a mean,
masks of its own) is refused, as are parameters of the loss itself and penalties over the model's parameters, which no
gradient would reach: compute them in the model's forward and leave the loss to it.

**Batches.** Inputs are a tensor, a tuple of arguments or a mapping of keyword arguments, and both they and the
targets may hold tuples, lists and dicts of tensors. Targets have one row for each sample. In a `Trainer`, inputs of
as many rows as there are samples are divided into microbatches, and all others are given to each microbatch whole; if
an input has as many rows only by chance, the comparison above tells, and what was found for the sample holds for all
batches after it. Samples of a dataset are stacked, so there each input has a row for each sample.

`hf:CONFIG` is the file or folder of a configuration of `transformers`, or a name on its hub, built with random
weights by the run's seed: as a classifier of images, an encoder-decoder, a masked or a causal language model,
whichever it can be. It gets images or text of the zoo's data. `FILE.py:FUNCTION` calls a function without arguments
that returns `(model, loss, samples)`: a module; the loss as a function of its output and the targets, or None for the
model's own loss; and a dataset of `(inputs, targets)` as `torch.utils.data` has them, such as `((x, edges), y)`, or of
mappings for a model's own loss.

With `--weights` a run begins with weights that are there: a file of safetensors or a folder of them, such as another
run's or what `export` writes, under the model's own names (all parameters; buffers may be missing, and what the model
does not have is left). For an `hf:` model a folder, or a name on the hub, is read by `transformers`, old names and
bodies without a head included, and refused where weights would be missing; then the data needs a name (`--data`), as
pretrained weights and the default data do not fit. Pickles are not read. A run that goes on has its weights in its
checkpoints, and needs the file no more. What a run leaves (`model.safetensors`, its checkpoints, what `export`
writes) is the whole state of the model: trained weights, buffers, and parameters that are frozen or not used.

What does not come along: autograd functions of one's own are refused, since a recorded forward has lost their
backward, and so are hooks on tensors and backward hooks, hooks on parameters (of chains too), Python that decides by
the values of tensors (values that no input decides, as positions are, are known) and packed sequences; layers of an
`nn.Sequential` are not recorded, and may have all of these inside but hooks on parameters. A region under
`torch.autocast` is not cut inside. Complex values pass between units; complex parameters, `sparse=True`,
`torch.cond`, and dicts between the layers of a chain are refused. Trained parameters are float32 or float64: in half
precision most updates would be lost, and `HybridAdamW` keeps masters. Activation checkpointing inside of the model is
left out (use a plan that recomputes). Attributes that are no tensors are not changed by a forward, and a forward hook
runs once, while the model is recorded: what it computes on tensors is part of the model. A parameter that is frozen
has no gradient and no optimizer state; it is written as it was, and so is one that the forward does not use. A model
is recorded once more for each size that its microbatches have.

**The model check.** Before the first update, copies of the model itself and of its units, divided into the plan's
pieces, run the same microbatches forward and backward: twice, with other samples, seeds and Python state, and eight
times if only the model draws from Python's or numpy's generators. Outputs, loss, gradients, and parameters and
buffers afterwards must have the same bits, or differ by no more than eight times what a change of every weight in its
last place does to the model. A model that fails is refused with the unit and the line where both first part, the size
of the difference and its likely cause: numpy masks or Python counters that were recorded once, a list of units that
is not what the forward runs, running statistics that two workers share. The check needs about five times the memory
of the weights; a model for which that is not free is trained unchecked, which is said. `--no-check-model`, or
`check_model=False` of the `Trainer`, leaves it out.

Each model below was built small, with random weights, and divided evenly into every number of pieces from one to all
its units, on a CPU. "Equal" means bit for bit: outputs, loss and buffers; gradients of all parameters. A weight that
is used three times or more gets the same gradient but for the order in which its parts are added.

Attention of `transformers` gets the mask that it has in training: none where the kernel knows the causal one. A padding
mask that is given is always used, though the whole model leaves out one that masks nothing; where query heads share
keys and values, the gradients of those are then added in another order.

| model | cut by | units | outputs equal | gradients equal | what was found |
|---|---|---|---|---|---|
"""


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    wanted = sys.argv[1:]
    cases = {name: lambda name=name: build_transformer(name) for name in TRANSFORMERS} | others()
    print(INTRODUCTION, end="")
    for name, make in cases.items():
        if not wanted or name in wanted:
            print(row(name, make), flush=True)
    print(
        f"\nMade by [models.py](models.py) with torch {torch.__version__.partition('+')[0]} and transformers"
        f" {transformers.__version__}."
    )


if __name__ == "__main__":
    main()
