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


INTRODUCTION = """# How models are cut

`pipedejavu` takes a model as it is: `zoo:NAME`, `hf:CONFIG`, `FILE.py:FUNCTION`, or a module that is passed to the
`Trainer`.

- A **chain** is read as it is: an `nn.Sequential` without a forward or hooks of its own, or a module whose method
  `units()` lists (name, module) pairs that hold all its parameters under their own names. Its units run unchanged,
  with their hooks and any Python code; a module that is listed twice becomes two units with tied weights.
- Any other model is traced by `torch.export`, on fake tensors, for inputs of one shape. It is cut where its **blocks**
  begin: modules with numbers as names, as in an `nn.ModuleList`. If it has too few blocks, it is cut anywhere in its
  **graph** between two operations that read parameters, except inside residual blocks.
- A unit takes the tensors that are live at its start, as a tuple: skip connections, masks, position embeddings and
  labels pass through the units that do not use them. Its parameters and buffers are the model's own, under the
  model's own names.
- The loss is a function of the model's output and the targets, or the model's own loss, `output.loss`.

**Means and sums.** A loss may be a mean over samples (`nn.CrossEntropyLoss()`), a mean over labels that count, or a
sum over samples, which an update divides by the number of samples. Labels count if they are not −100, or not the
loss's `ignore_index`; for a model's own loss the first label of each row may be left out, as language models shift
labels. Which case applies is determined once, before training: the gradient of five samples is compared with those of
the first two and of the other three, without dropout, with the same random numbers, and with labels that distinguish
the cases. A mean is then multiplied by its count, and an update is divided by the sum of all counts, so that
microbatches of any size give the result of the whole batch. A loss that fits no case (contrastive losses, class
weights under a mean, masks inside the loss) is refused, as are parameters of the loss itself and penalties over the
model's parameters, which would get no gradient: compute them in the model's forward, and use the model's own loss.

**Batches.** Inputs are a tensor, a tuple of arguments or a mapping of keyword arguments; inputs and targets may
contain tuples, lists and dicts of tensors. Targets have one row per sample. In a `Trainer`, inputs with as many rows
as there are samples are divided into microbatches, and all others are passed whole to each microbatch. If an input
has that many rows only by chance, the comparison above detects it; the result for the sample holds for all later
batches. Samples of a dataset are stacked, so there each input has a row per sample.

`hf:CONFIG` is a configuration file or folder of `transformers`, or a name on its hub. The model has random weights
from the run's seed, and is an image classifier, an encoder-decoder, a masked or a causal language model, the first
that the configuration supports. It is trained on images or text of the zoo's data. `FILE.py:FUNCTION` calls a
function without arguments that returns `(model, loss, samples)`: a module; the loss as a function of its output and
the targets, or None for the model's own loss; and a dataset of `(inputs, targets)` as in `torch.utils.data`, such as
`((x, edges), y)`, or of mappings for a model's own loss.

With `--weights` a run starts from existing weights: a safetensors file or a folder of them, such as another run's or
the output of `export`, under the model's own names (all parameters are required, buffers are optional, other tensors
are ignored). For an `hf:` model, `transformers` reads a folder or a name on the hub, including old names and models
without a head, and missing weights are refused; then `--data` is required, as pretrained weights and the default data
do not fit. Pickles are not read. A run that is resumed has its weights in its checkpoints, and does not need the file
again. The results of a run (`model.safetensors`, its checkpoints, the output of `export`) hold the whole state of the
model: trained weights, buffers, and parameters that are frozen or not used.

**Limits.** A traced forward loses custom backwards, so it refuses custom autograd functions, hooks on tensors and
backward hooks. It also refuses Python code that branches on the values of tensors (unless no input determines them,
as for positions) and packed sequences. Layers of an `nn.Sequential` are not traced, and may use all of these. Hooks
on parameters are refused in every model. A region under `torch.autocast` is not cut inside. Complex values may pass
between units; complex parameters, `sparse=True`, `torch.cond`, and dicts between the layers of a chain are refused.
Trained parameters are float32 or float64: in half precision most updates would be lost, and `HybridAdamW` keeps
master weights. Activation checkpointing inside the model is ignored (use a plan that recomputes). A forward does not
change attributes that are not tensors, and a forward hook runs once, while the model is traced: its tensor operations
become part of the model. A frozen parameter has no gradient and no optimizer state; it is saved unchanged, and so is
one that the forward does not use. A model is traced once per microbatch size.

**The model check.** Before the first update, copies of the model and of its units, grouped into the plan's pieces, run
the same microbatches forward and backward: twice, with different samples, seeds and Python state, and eight times if
only the model draws from Python's or numpy's generators. Outputs, loss, gradients, and parameters and buffers
afterwards must be bitwise equal, or differ by at most eight times the effect of changing every weight in its last
place. A model that fails is refused with the unit and the line of the first difference, its size and its likely cause:
numpy masks or Python counters that were traced once, a list of units that is not what the forward runs, running
statistics that two workers share. The check needs about five times the memory of the weights; if that is not free, the
model is trained unchecked, with a message. `--no-check-model`, or `check_model=False` of the `Trainer`, skips it.

Each model below was built small, with random weights, and divided evenly into every number of pieces from one to all
its units, on a CPU. "Equal" means bitwise: outputs, loss and buffers; gradients of all parameters. If a weight is used
three times or more, its gradient may differ by the order of summation.

Attention of `transformers` gets the same mask as in training: none if the kernel applies the causal mask itself. A
padding mask in the inputs is always used, although the whole model drops one that masks nothing; if query heads share
keys and values, their gradients are then summed in another order.

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
