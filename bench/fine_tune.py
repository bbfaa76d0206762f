"""Fine-tunes on one's own data, offline and end to end, and checks each result; prints what each run says.

A tokenizer is trained on the spot; a small Qwen2 is saved with `save_pretrained`; the chats are made of the standard
library's docstrings (question: a signature; answer: its docstring). Every run is the command that a user would type.

    python bench/fine_tune.py [FOLDER]
"""

import ast
import csv
import json
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

NUM_CHATS = 2000
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ONE = ("--plan", "preset:ddp", "--workers", "1", "--samples", "8")
PLAN = ("--plan", "preset:gpipe", "--workers", "2", "--microbatches", "2", "--samples", "4")
BEGIN = "This is the "
"""What the answers begin with that the adapters learn."""
MODEL = ("--context", "96", "--lr", "2e-3", "--seed", "1")


def docstrings(count: int) -> Iterator[tuple[str, str]]:
    """Yields signatures and first lines of docstrings of functions of the standard library, in the order of files."""
    found = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(errors="replace"))):
            if found < count and isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                found += 1
                yield f"{node.name}({ast.unparse(node.args)})", text.partition("\n")[0]


def write_chats(path: Path, count: int = NUM_CHATS, begin: str = "") -> None:
    """Writes chats whose answers begin with a text and go on with a docstring."""
    with path.open("w") as file:
        for question, text in docstrings(count):
            answer = begin + text
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")


def write_model(folder: Path, texts: list[str], hidden: int = 64, vocabulary: int = 2048) -> None:
    """Saves a small Qwen2 with a tokenizer that is trained on some texts."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(fast), hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
        eos_token_id=fast.eos_token_id,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)


def train(*options: str) -> dict[str, object]:
    """Runs the command line, and returns its summary."""
    command = [sys.executable, "-m", "pipedejavu", "train", *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exited {done.returncode}: {done.stderr}")
    summary: dict[str, object] = json.loads(done.stdout)
    return summary


def killed(folder: Path, step: int, *options: str) -> None:
    """Starts a run and kills it once a step after `step` is in its metrics."""
    command = [sys.executable, "-m", "pipedejavu", "train", *options, "--run-dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoints = folder / "checkpoints"
    while process.poll() is None and not (checkpoints.exists() and any(checkpoints.glob(f"*{step}"))):
        time.sleep(0.05)
    process.kill()
    process.wait()


STARTED = time.perf_counter()
FIGURES = ("first_loss", "last_loss", "eval_loss", "perplexity", "accuracy")


def report(name: str, summary: dict[str, object]) -> None:
    figures = [f"{key} {value:.4g}" for key in FIGURES if isinstance(value := summary.get(key), float)]
    print(f"{time.perf_counter() - STARTED:5.0f} s", name, *figures, flush=True)
    assert summary["last_loss"] < summary["first_loss"], "the loss fell"  # type: ignore[operator]


def equal_weights(first: Path, second: Path) -> bool:
    from safetensors.torch import load_file

    one, other = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def opens(folder: Path, question: str) -> str:
    """Opens the result as its users would, and returns its answer to a question."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    tokens = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    out = model.generate(tokens, max_new_tokens=48, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return str(tokenizer.decode(out[0, tokens.shape[1] :]))


def main(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    pairs, base, chats, others = [*docstrings(NUM_CHATS)], root / "base", root / "chats.jsonl", root / "others.jsonl"
    write_model(base, [f"{question}\n{answer}" for question, answer in pairs])
    write_chats(chats)
    write_others(root, pairs)
    for name in ("text.txt", "texts.jsonl", "table.csv", "table.parquet"):
        data = ("--data", str(root / name), "--eval", "0.05", "--steps", "80", "--run-dir", str(root / f"run-{name}"))
        report(name, train(*start(base, ONE), *data))
    write_chats(others, begin=BEGIN)
    # Adapters change neither the embeddings nor the head, so their base has to know the template's tokens: it is the
    # model that the first run leaves, and they teach it another form of answers.
    learned = root / "full" / "pretrained"
    runs = (("full", base, chats, ("--epochs", "2")), ("lora", learned, others, ("--epochs", "2", "--lora", "16")))
    for name, begin, data, extra in runs:
        chosen = ("--data", str(data), "--eval", "0.02", "--checkpoint-every", "40")
        options = (*start(begin), *extra, *chosen)
        report(name, train(*options, "--run-dir", str(root / name)))
        answer = opens(root / name / "pretrained", pairs[0][0])
        print(f"  {pairs[0][0]} -> {answer!r}", flush=True)
        assert answer.endswith("<|im_end|>"), "the answer ends as the answers of the data do"
        assert answer.startswith(BEGIN) == (name == "lora"), "the answer begins as the answers of the data do"
        killed(root / f"{name}-resumed", 80, *options)
        train(*options, "--run-dir", str(root / f"{name}-resumed"), "--resume")
        assert equal_weights(root / name, root / f"{name}-resumed"), "a resumed run has the same weights"
        print("  killed and resumed: the same weights", flush=True)
    mlp = ("zoo:mlp", "--plan", "preset:ddp", "--workers", "2", "--samples", "16", "--epochs", "2", "--eval", "0.1")
    report("images", train(*mlp, "--data", str(root / "images"), "--run-dir", str(root / "run-images")))


def start(base: Path, plan: tuple[str, ...] = PLAN) -> tuple[str, ...]:
    return (f"hf:{base}", "--weights", str(base), *plan, *MODEL)


def write_others(root: Path, pairs: list[tuple[str, str]]) -> None:
    """Writes the same records as text, CSV and parquet, and the digits as a folder of images."""
    import pyarrow
    import pyarrow.parquet
    from PIL import Image
    from sklearn.datasets import load_digits

    (root / "text.txt").write_text("\n".join(f"{question}: {answer}" for question, answer in pairs))
    with (root / "texts.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": f"{question}: {answer}"}) + "\n" for question, answer in pairs)
    with (root / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([("prompt", "completion"), *pairs])
    columns = {"prompt": [question for question, _ in pairs], "completion": [answer for _, answer in pairs]}
    pyarrow.parquet.write_table(pyarrow.table(columns), root / "table.parquet")
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        folder = root / "images" / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15).astype("uint8")).save(folder / f"{number:04}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/fine_tune"))
