"""Opens the data that a user chose, in the form that a model reads."""

from collections.abc import Callable
from pathlib import Path

from pipedejavu.data.data_choice import DataChoice
from pipedejavu.data.data_files import DataFiles, find_files
from pipedejavu.data.document import read_documents
from pipedejavu.data.held_out import split_samples
from pipedejavu.data.image_folder import ImageFolder, class_names
from pipedejavu.data.text_tokenizer import TextTokenizer, check_vocabulary, find_tokenizer
from pipedejavu.data.token_cache import TokenTable, cache_path, open_table, write_table
from pipedejavu.data.token_data import PackedDocuments, PackedRecords, PackedWindows, PaddedDocuments
from pipedejavu.facts import InputError
from pipedejavu.facts.printable import tell
from pipedejavu.zoo.data import open_data
from pipedejavu.zoo.dataset import Dataset
from pipedejavu.zoo.form import Form, GraphForm, ImageForm, TokenForm
from pipedejavu.zoo.sequence import Sequences

Separates = Callable[[], bool]
"""Whether a model takes several documents in a row and attends within each of them; asked only if it matters."""


def _never() -> bool:
    return False


def open_choice(
    choice: DataChoice,
    form: Form,
    *,
    default: str,
    seed: int = 0,
    model_folder: str | None = None,
    is_zoo: bool = True,
    separates: Separates = _never,
) -> Dataset:
    """Opens chosen data; `model_folder` has the model's tokenizer, and only zoo models read bytes without one.

    `separates` says whether the model takes several documents in a row and attends within each of them.
    """
    if choice.path is None:
        data = open_data(choice.name or default, form, seed=seed)
    elif isinstance(form, ImageForm):
        data = _open_images(choice, form)
    elif isinstance(form, GraphForm):
        raise InputError(
            f"the model reads a graph, and {choice.name} is read as text or images; write graph:{choice.name}"
        )
    else:
        tokenizer = find_tokenizer(choice.tokenizer, model_folder, is_zoo=is_zoo)
        check_vocabulary(tokenizer, form.num_plain, form.num_plain < form.vocabulary)
        data = open_tokens(choice, find_files(choice.path), form, tokenizer, seed, separates)
    return take_part(data, choice, seed)


def open_held_out(
    choice: DataChoice,
    form: Form,
    *,
    default: str,
    seed: int = 0,
    model_folder: str | None = None,
    is_zoo: bool = True,
    separates: Separates = _never,
) -> Dataset | None:
    """Opens the data to evaluate on, in the form that the model reads; None if the choice has none."""
    held_out = choice.for_evaluation()
    if held_out is None:
        return None
    if held_out.path is None and held_out.part == "all":
        return open_data(held_out.name or default, form, seed=seed, split="test")
    if isinstance(form, ImageForm) and held_out.part == "all" and choice.path is not None:
        return _open_images(held_out, form, class_names(find_files(choice.path)))
    return open_choice(
        held_out, form, default=default, seed=seed, model_folder=model_folder, is_zoo=is_zoo, separates=separates
    )


def _open_images(choice: DataChoice, form: ImageForm, classes: tuple[str, ...] | None = None) -> Dataset:
    assert choice.path is not None
    files = find_files(choice.path)
    if files.kind != "images":
        raise InputError(
            f"{choice.name} has {files.kind}, but the model reads images; give a folder that has a folder of images for"
            " each class, or digits, mnist or cifar10"
        )
    return ImageFolder(files, form, classes)


def take_part(data: Dataset, choice: DataChoice, seed: int) -> Dataset:
    """Returns the part of the samples that the choice asks for."""
    if choice.part == "all" or not choice.held_out:
        return data
    train, held_out = split_samples(data, choice.held_out, seed)
    return train if choice.part == "train" else held_out


def open_tokens(
    choice: DataChoice,
    files: DataFiles,
    form: TokenForm,
    tokenizer: TextTokenizer,
    seed: int,
    separates: Separates = _never,
) -> Dataset:
    """Opens text or records as tokens; tokenises them if the cache does not have them."""
    if files.kind == "images":
        raise InputError(f"{files.root} has images, but the model reads tokens; give text, .jsonl, .csv or .parquet")
    key = {"files": files.digest(), "kind": files.kind, "tokenizer": tokenizer.digest, "columns": choice.columns}
    path = cache_path(key)
    table = open_table(path)
    if is_new := table is None:
        table = _tokenize(path, choice, files, tokenizer)
    assert table is not None
    if table.answers is None:
        return _open_texts(choice, table, form, tokenizer, seed, separates, is_new=is_new)
    return _open_records(choice, table, form, tokenizer, separates, is_new=is_new)


def _open_records(
    choice: DataChoice, table: TokenTable, form: TokenForm, tokenizer: TextTokenizer, separates: Separates, *,
    is_new: bool,
) -> Dataset:  # fmt: skip
    """Returns prompts and chats as samples; a model that cannot separate them reads one per row."""
    name = str(choice.name)
    if form.objective != "next":
        raise InputError(
            f"{name} has prompts and answers, which are for models that predict the next token; this one predicts"
            f" {form.objective} tokens: give it 'text'"
        )
    if choice.packing == "stream":
        raise InputError(
            f"--packing stream is for texts, and {name} has prompts and answers, which would read each other; give"
            " documents, or rows"
        )
    records = PaddedDocuments(table, form.context, tokenizer.end, name)
    if is_new and records.num_cut:
        tell(
            f"{records.num_cut} of {len(table.starts) - 1} records of {name} have more than {form.context} tokens and"
            f" are cut there; {records.num_dropped} without an answer before that are left out"
        )
    if choice.packing == "documents" and separates():
        packed = PackedRecords(records, form.context)
        if is_new:
            tell(
                f"the {len(records):,} records of {name} share {len(packed):,} rows of {packed.context} tokens, which"
                " are the samples; --packing rows gives each a row of its own"
            )
        return packed
    if choice.packing == "documents" and is_new:
        tell(f"the model does not take several records in a row, so each of {name} is a row of its own")
    return records


def _open_texts(
    choice: DataChoice,
    table: TokenTable,
    form: TokenForm,
    tokenizer: TextTokenizer,
    seed: int,
    separates: Separates,
    *,
    is_new: bool,
) -> Dataset:
    """Returns texts as samples; a model that cannot separate documents reads one per row, if it is causal."""
    name, packing, is_causal = str(choice.name), choice.packing, form.objective == "next"
    if packing == "rows" and not is_causal:
        raise InputError(
            f"--packing rows is for models that predict the next token, and this one predicts {form.objective} tokens:"
            " it would see the padding; leave --packing out"
        )
    is_one = len(table.starts) <= 2
    if packing == "documents" and not is_one and not separates():
        packing = "rows" if is_causal else "stream"
        how = "each is a row of its own" if is_causal else "attention crosses from one to the next"
        if is_new:
            tell(f"the model does not take several documents in a row, so of {name} {how}")
    if packing == "rows":
        return PaddedDocuments(table, form.context, tokenizer.end, name)
    windows = PackedWindows(table, form.context, name)
    sequences = Sequences(windows, form, seed)
    return sequences if is_one or packing == "stream" else PackedDocuments(sequences, windows, table.starts)


def _tokenize(path: Path, choice: DataChoice, files: DataFiles, tokenizer: TextTokenizer) -> TokenTable:
    if not files.size_bytes:
        raise InputError(f"{files.root} is empty; give a file with text")
    write_table(path, read_documents(files, choice.column_names, tokenizer), tokenizer.vocabulary)
    table = open_table(path)
    if table is None:
        raise InputError(f"{files.root} has no text in any of its records; give some that have")
    return table
