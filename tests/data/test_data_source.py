"""Files as samples: what windows and chats hold, and what is said of files that cannot be used."""

import json
from itertools import pairwise

import numpy
import pytest

torch = pytest.importorskip("torch")

from pipedejavu.data import token_cache
from pipedejavu.data.chat_template import ChatTemplate
from pipedejavu.data.data_choice import DataChoice, check_choice
from pipedejavu.data.data_files import find_files
from pipedejavu.data.data_source import open_choice, open_held_out, open_tokens
from pipedejavu.data.text_tokenizer import ByteTokenizer, check_vocabulary, find_tokenizer
from pipedejavu.data.token_data import pack
from pipedejavu.facts import InputError
from pipedejavu.zoo.form import ImageForm, TokenForm

FORM = TokenForm(context=8, vocabulary=256)


def opened(path, form=FORM, **choice):
    return open_choice(DataChoice(name=str(path), **choice), form, default="stdlib")


def write(path, *records) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_folder_is_its_texts_one_after_another_with_an_end_token_between(tmp_path) -> None:
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("Grüße aus Köln, heute")
    (folder / "sub" / "b.md").write_text("second text")
    (folder / ".hidden").write_text("never read")
    (folder / "c.txt").write_text("")
    data = opened(folder, packing="stream")
    stream = list("Grüße aus Köln, heute".encode() + b"\0second text\0")
    assert len(data) == (len(stream) - 1) // 8
    inputs, targets = data.batch(range(len(data)))
    for n in range(len(data)):
        assert inputs[n].tolist() == stream[8 * n : 8 * n + 8]
        assert targets[n].tolist() == stream[8 * n + 1 : 8 * n + 9]


def test_text_is_tokenised_once_and_again_when_it_changes(tmp_path, monkeypatch) -> None:
    calls = []
    encode = ByteTokenizer.ids
    monkeypatch.setattr(ByteTokenizer, "ids", lambda self, text: calls.append(text) or encode(self, text))
    file = tmp_path / "a.txt"
    file.write_text("x" * 100)
    for _ in range(2):
        assert opened(file).batch([0])[0].tolist() == [[ord("x")] * 8]
    assert len(calls) == 1
    file.write_text("y" * 100)
    assert opened(file).batch([0])[0].tolist() == [[ord("y")] * 8]
    assert len(calls) == 2
    folders = [*token_cache.cache_folder().iterdir()]
    assert len(folders) == 2
    (folders[0] / "tokens.bin").write_bytes(b"damaged")  # a file that is not complete is made again
    (folders[1] / "tokens.bin").write_bytes(b"damaged")
    assert opened(file).batch([0])[0].tolist() == [[ord("y")] * 8]
    assert not [*token_cache.cache_folder().glob("*.tmp")]


def test_a_long_file_in_pieces_has_the_same_tokens(tmp_path, monkeypatch) -> None:
    file = tmp_path / "a.txt"
    file.write_text("Zeile ö\n" * 50)
    whole = opened(file).batch(range(5))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setattr("pipedejavu.data.document.PIECE_BYTES", 7)
    pieces = opened(file)
    assert all(map(torch.equal, whole, pieces.batch(range(5))))


def test_only_the_answer_of_a_prompt_counts(tmp_path) -> None:
    file = tmp_path / "a.jsonl"
    write(file, {"prompt": "2+2=", "completion": "4"}, {"prompt": "ab", "completion": "cdefghijkl"})
    data = opened(file)
    inputs, targets = data.batch([0, 1])
    assert inputs[0].tolist() == [*b"2+2=4", 0, 0, 0]
    assert targets[0].tolist() == [-100, -100, -100, ord("4"), 0, -100, -100, -100]
    assert inputs[1].tolist() == [*b"abcdefgh"]  # cut at the context
    assert targets[1].tolist() == [-100, *b"cdefghi"]


def test_a_row_is_no_longer_than_the_longest_record_needs(tmp_path) -> None:
    write(tmp_path / "a.jsonl", {"prompt": "2+2=", "completion": "4"})
    inputs, _ = opened(tmp_path / "a.jsonl", TokenForm(context=1024)).batch([0])
    assert inputs.shape == (1, 64)


def test_records_without_an_answer_in_the_context_are_left_out(tmp_path, capsys) -> None:
    file = tmp_path / "a.jsonl"
    write(file, {"prompt": "far too long a prompt", "completion": "4"}, {"prompt": "a", "completion": "b"})
    data = opened(file)
    assert len(data) == 1
    assert "1 of 2 records" in capsys.readouterr().err
    write(file, {"prompt": "far too long a prompt", "completion": "4"})
    with pytest.raises(InputError, match="has 1 records, and none has an answer within 8 tokens; give a larger"):
        opened(file)


def test_a_csv_has_its_text_in_a_column_by_name(tmp_path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('id,body\n1,"one, two"\n2,three\n')
    inputs, _ = opened(file, columns="text=body").batch([0])
    assert bytes(inputs[0].tolist()) == b"one, two"
    with pytest.raises(InputError, match=r"a.csv, line 2 has 'id', 'body', and training needs 'text'"):
        opened(file)
    file.write_text("text,b\nx,1\ny\n")
    with pytest.raises(InputError, match=r"a.csv, line 3 has 1 columns, and the header has 2; give every row as many"):
        opened(file)


def test_a_parquet_file_has_its_text_in_a_column(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["one two", "three"]}), file)
    inputs, _ = opened(file).batch([0])
    assert bytes(inputs[0].tolist()) == b"one two\0"
    file.write_bytes(b"PAR1 but not more")
    with pytest.raises(InputError, match="cannot be read as parquet"):
        opened(file)


def test_parquet_without_pyarrow_names_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"needs the package pyarrow; pip install 'pipedejavu\[parquet\]'"):
        opened(tmp_path / "a.parquet")


class Templated(ByteTokenizer):
    digest = "templated"
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}",
        {},
    )


def test_of_a_chat_all_answers_count_and_nothing_else(tmp_path) -> None:
    file = tmp_path / "a.jsonl"
    roles = [("user", "hi"), ("assistant", "yo"), ("user", "ok"), ("assistant", "bye")]
    write(file, {"messages": [{"role": role, "content": text} for role, text in roles]})
    choice, form = DataChoice(name=str(file)), TokenForm(context=64)
    inputs, targets = open_tokens(choice, find_files(file), form, Templated(), 0).batch([0])
    text = b"u:hi|a:yo|u:ok|a:bye|"
    assert bytes(inputs[0, :20].tolist()) == text[:-1]
    counted = [chr(t) if t != -100 else "." for t in targets[0, :20].tolist()]
    assert "".join(counted) == "......yo|.......bye|"  # each token is the target of the one before it
    with pytest.raises(InputError, match="is a chat, and the tokenizer bytes has no chat template; give one that has"):
        opened(file)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"messages": "hi"}, "has 'hi' as messages; give a list of objects with role and content"),
        ({"messages": [{"role": "user", "content": "x"}]}, "has no message of the role assistant, so nothing to learn"),
        ({"prompt": 3, "completion": "x"}, "line 1 has 3 as 'prompt'; give a text"),
        ({"other": 3}, "line 1 has 'other', and training needs 'text'"),
    ],
)
def test_a_record_that_cannot_be_used_is_named_by_its_line(tmp_path, record, text) -> None:
    file = tmp_path / "a.jsonl"
    write(file, record)
    with pytest.raises(InputError, match=text):
        open_tokens(DataChoice(name=str(file)), find_files(file), FORM, Templated(), 0)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "a.jsonl is empty; give a file with text"),
        (b'{"text": ""}\n', "has no text in any of its records"),
        (b'{"text": "x"}\n[1]\n', r"a.jsonl, line 2 is no JSON object but \[1\]; write one object per line"),
        (b'{"text": "x"}\n{oh\n', "a.jsonl, line 2 is not JSON"),
        (b'{"text": "x"}\n{"prompt": "x"}\n', "line 2 has no 'text', which the records before it have; add it"),
        (b'{"text": "x"}\n', "has 2 tokens, and a sample takes 9: 8 and the one after them"),
    ],
)
def test_a_file_of_records_that_cannot_be_used_is_told(tmp_path, body, text) -> None:
    (tmp_path / "a.jsonl").write_bytes(body)
    with pytest.raises(InputError, match=text):
        opened(tmp_path / "a.jsonl")


def test_paths_that_cannot_be_used_are_told(tmp_path) -> None:
    with pytest.raises(InputError, match=r"missing.txt: there is no such file or folder"):
        check_choice(DataChoice(name=str(tmp_path / "missing.txt")))
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe is not UTF-8")
    with pytest.raises(InputError, match=r"a.txt is not UTF-8 text"):
        opened(tmp_path / "a.txt")
    (tmp_path / "a.csv").write_text("text\nx")
    with pytest.raises(InputError, match=r"has files of 2 kinds: csv \(a.csv\) and text \(a.txt\)"):
        opened(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty has no files"):
        opened(tmp_path / "empty")
    with pytest.raises(InputError, match="--columns is FIELD=COLUMN, separated by commas, found 'body'"):
        check_choice(DataChoice(columns="body"))
    with pytest.raises(InputError, match=r"--columns has no field 'txt'; did you mean 'text'\?"):
        check_choice(DataChoice(columns="txt=body"))
    with pytest.raises(InputError, match="--tokenizer says how to read files, but --data names none"):
        check_choice(DataChoice(tokenizer=str(tmp_path)))


def test_text_for_images_and_images_for_text_are_refused(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("x" * 50)
    with pytest.raises(InputError, match=r"a.txt has text, but the model reads images"):
        opened(tmp_path / "a.txt", ImageForm())


def test_a_share_is_held_out_and_never_trained_on(tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 128)) * 2)
    train, held_out = (opened(tmp_path / "a.txt", held_out=0.2, part=part) for part in ("train", "eval"))
    whole = opened(tmp_path / "a.txt")
    assert (len(train), len(held_out)) == (25, 6)

    def rows(data):
        return [*map(tuple, data.batch(range(len(data)))[1].tolist())]

    assert sorted(rows(train) + rows(held_out)) == sorted(rows(whole))
    again = opened(tmp_path / "a.txt", held_out=0.2, part="eval")
    assert rows(again) == rows(held_out)
    with pytest.raises(InputError, match=r"the data has 31 samples, and --eval 0.99 would hold out 31"):
        opened(tmp_path / "a.txt", held_out=0.99, part="train")


def test_a_tokenizer_with_more_ids_than_the_model_is_refused() -> None:
    with pytest.raises(InputError, match="bytes has 256 token ids, and the model's embedding has 100"):
        check_vocabulary(ByteTokenizer(), 100)


@pytest.fixture
def tokenizer_folder(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "one": 1, "two": 2, "user": 3, "bot": 4, "<end>": 7}, "[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": template}))
    return folder


def test_a_tokenizer_file_gives_its_ids_end_and_template(tokenizer_folder, tmp_path) -> None:
    tokenizer = find_tokenizer(None, str(tokenizer_folder), is_zoo=False)
    assert (tokenizer.vocabulary, tokenizer.end) == (8, 7)
    assert tokenizer.encode("one two").spans == [(0, 3), (4, 7)]
    (tmp_path / "a.txt").write_text("one two " * 10)
    inputs, _ = opened(tmp_path / "a.txt", TokenForm(context=20, vocabulary=8), tokenizer=str(tokenizer_folder)).batch(
        [0]
    )
    assert inputs[0].tolist() == [1, 2] * 10
    with pytest.raises(InputError, match="has 8 token ids, and the model's embedding has 5; give the tokenizer that"):
        opened(tmp_path / "a.txt", TokenForm(vocabulary=5), tokenizer=str(tokenizer_folder))
    with pytest.raises(InputError, match=r"which has no tokenizer.json; give that file or its folder"):
        find_tokenizer(str(tmp_path), None, is_zoo=True)
    with pytest.raises(InputError, match=r"has no tokenizer.json; give one with --tokenizer"):
        find_tokenizer(None, str(tmp_path), is_zoo=False)
    settings = tokenizer_folder / "tokenizer_config.json"
    settings.write_text("{}")
    with pytest.raises(InputError, match="has no end token to put between documents"):
        find_tokenizer(None, str(tokenizer_folder), is_zoo=False)


def make_image_folder(root, count=12):
    image_package = pytest.importorskip("PIL.Image")
    from sklearn.datasets import load_digits

    digits = load_digits()
    for n in range(count):
        folder = root / f"digit{digits.target[n]}"
        folder.mkdir(parents=True, exist_ok=True)
        image_package.fromarray((digits.images[n] * 15).astype("uint8")).save(folder / f"{n:03}.png")
    return digits


def test_a_folder_of_images_by_class_is_resized_and_labelled(tmp_path):
    digits = make_image_folder(tmp_path / "images")
    choice = DataChoice(name=str(tmp_path / "images"))
    data = open_choice(choice, ImageForm(shape=(1, 8, 8)), default="random")
    inputs, targets = data.batch(range(12))
    assert targets.tolist() == sorted(digits.target[:12].tolist())
    n = next(n for n in range(12) if digits.target[n] == 0)
    expected = torch.tensor(digits.images[n] * 15).float() / 127.5 - 1
    assert torch.equal(inputs[0, 0], expected)
    assert open_choice(choice, ImageForm(), default="random").batch([3])[0].shape == (1, 784)
    with pytest.raises(InputError, match="has 10 classes, 'digit0' to 'digit9', and the model has 4"):
        open_choice(choice, ImageForm(shape=(1, 8, 8), classes=4), default="random")
    (tmp_path / "images" / "loose.png").write_bytes(b"")
    with pytest.raises(InputError, match=r"images that are in no folder of a class, such as loose\.png"):
        open_choice(choice, ImageForm(shape=(1, 8, 8)), default="random")


def test_an_image_that_cannot_be_read_is_named(tmp_path):
    make_image_folder(tmp_path / "images", 3)
    (tmp_path / "images" / "digit0" / "broken.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"broken\.png cannot be read as an image"):
        open_choice(DataChoice(name=str(tmp_path / "images")), ImageForm(shape=(3, 8, 8)), default="random")


def test_classes_of_images_to_evaluate_on_are_those_of_training(tmp_path):
    make_image_folder(tmp_path / "train", 30)
    make_image_folder(tmp_path / "eval", 2)
    form = ImageForm(shape=(1, 8, 8))
    choice = DataChoice(name=str(tmp_path / "train"), evaluation=str(tmp_path / "eval"))
    assert open_held_out(choice, form, default="random").batch([0, 1])[1].tolist() == [0, 1]
    (tmp_path / "eval" / "digit1").rename(tmp_path / "eval" / "digit11")
    with pytest.raises(InputError, match="has the class 'digit11', and --data has not; did you mean 'digit1'"):
        open_held_out(choice, form, default="random")


def test_what_is_held_out_is_a_share_or_a_number(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("0123456789" * 30)
    form = TokenForm(context=10)
    sizes = {}
    for held_out in (0.25, 3):
        choice = DataChoice(name=str(file), held_out=held_out)
        train = open_choice(choice.replace(part="train"), form, default="stdlib")
        sizes[held_out] = len(train), len(open_held_out(choice, form, default="stdlib"))
    assert sizes == {0.25: (22, 8), 3: (27, 3)}
    with pytest.raises(InputError, match=r"a share below 1 or a whole number of samples, not 2\.5"):
        check_choice(DataChoice(name=str(file), held_out=2.5))
    with pytest.raises(InputError, match="--eval holds out a part of --data, and --eval-data names other data"):
        check_choice(DataChoice(name=str(file), held_out=2, evaluation=str(file)))


def test_a_folder_that_datasets_has_saved_is_read_without_datasets(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    folder = tmp_path / "saved"
    folder.mkdir()
    table = pyarrow.table({"text": ["ab", "cde"], "other": [1, 2]})
    with pyarrow.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as file:
        file.write_table(table)
    (folder / "state.json").write_text("{}")
    (folder / "dataset_info.json").write_text("{}")
    inputs, targets = opened(folder, TokenForm(context=6), packing="stream").batch([0])
    assert bytes([*inputs[0].tolist(), int(targets[0, -1])]) == b"ab\0cde\0"
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(InputError, match="is a folder of `datasets` with splits: saved; give the folder of one"):
        opened(tmp_path)


def test_a_column_that_is_not_there_is_told_with_the_nearest(tmp_path):
    file = tmp_path / "table.csv"
    file.write_text("body,title\nsome text,a title\n")
    with pytest.raises(InputError, match="line 2 has no 'boddy', which --columns names as text; did you mean 'body'"):
        opened(file, columns="text=boddy")


@pytest.fixture
def texts(tmp_path):
    write(tmp_path / "texts.jsonl", *({"text": text} for text in ("abcdefghij", "kl", "", "mnopq", "r" * 20)))
    return tmp_path / "texts.jsonl"


def test_documents_in_a_row_have_positions_of_their_own_and_do_not_predict_each_other(texts) -> None:
    data = open_choice(DataChoice(name=str(texts)), FORM, default="stdlib", separates=lambda: True)
    (tokens, positions), targets = data.batch([0, 1, 2])
    assert bytes(tokens[0].tolist()) == b"abcdefgh"
    assert positions[0].tolist() == [*range(8)]
    assert bytes(tokens[1].tolist()) == b"ij\0kl\0mn"
    assert positions[1].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert targets[1].tolist() == [ord("j"), 0, -100, ord("l"), 0, -100, ord("n"), ord("o")]
    assert targets[2].tolist() == [*b"pq\0", -100, *b"rrrr"]


def test_texts_are_rows_of_their_own_for_a_model_that_does_not_separate_them(texts, capsys) -> None:
    for packing in ("documents", "rows"):
        data = opened(texts, packing=packing)
        inputs, targets = data.batch(range(len(data)))
        rows = [bytes(t for t in row if t != -100) for row in targets.tolist()]
        assert rows == [b"bcdefghi", b"j\0", b"l\0", b"nopq\0", b"rrrrrrrr", b"rrrrrrrr", b"rrr\0"]
        assert bytes(inputs[1, :2].tolist()) == b"ij"
    assert "the model does not take several documents in a row, so of" in capsys.readouterr().err
    masked = TokenForm(context=8, vocabulary=257, objective="masked")
    assert opened(texts, masked).batch([0])[0].shape == (1, 8)  # one stream: it would see padding
    with pytest.raises(InputError, match="--packing rows is for models that predict the next token, and this one"):
        opened(texts, masked, packing="rows")


def test_one_text_is_a_stream_without_positions(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("x" * 30)
    data = open_choice(DataChoice(name=str(tmp_path / "a.txt")), FORM, default="stdlib", separates=lambda: True)
    assert isinstance(data.batch([0])[0], torch.Tensor)


def test_records_share_rows_whole_each_with_positions_and_answers_of_its_own(tmp_path, capsys) -> None:
    file = tmp_path / "a.jsonl"
    write(file, *({"prompt": p, "completion": c} for p, c in (("ab", "c"), ("2+2=", "4"), ("x", "y"), ("long", "est"))))
    packed = open_choice(DataChoice(name=str(file)), FORM, default="stdlib", separates=lambda: True)
    assert len(packed) == 3
    assert "the 4 records of" in (said := capsys.readouterr().err)
    assert "share 3 rows of 8 tokens, which are the samples; --packing rows gives each a row of its own" in said
    (tokens, positions), targets = packed.batch([2, 0, 1])
    # inputs of 3, 5, 2 and 7 tokens, the end token being a target alone: the longest has a row, 5 + 3 share one
    assert bytes(tokens[1].tolist()) == b"longest\0"
    assert bytes(tokens[2].tolist()) == b"abc2+2=4"
    assert positions[2].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert targets[2].tolist() == [-100, ord("c"), 0, -100, -100, -100, ord("4"), 0]
    assert bytes(tokens[0].tolist()) == b"xy" + bytes(6)
    assert positions[0].tolist() == [0, 1, *range(6)]  # the padding is a record of its own
    assert targets[0].tolist() == [ord("y"), 0, *[-100] * 6]
    rows = opened(file)
    assert "the model does not take several records in a row" not in capsys.readouterr().err  # the tokens are cached
    assert len(rows) == 4
    counted = [
        sorted(t for t in data.batch(range(len(data)))[1].flatten().tolist() if t >= 0) for data in (packed, rows)
    ]
    assert counted[0] == counted[1]
    with pytest.raises(InputError, match=r"--packing stream is for texts, and .* has prompts and answers, which would"):
        opened(file, packing="stream")


def test_a_model_that_does_not_separate_records_reads_one_per_row_and_the_run_says_so(tmp_path, capsys) -> None:
    write(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"})
    assert len(opened(tmp_path / "a.jsonl")) == 2
    assert "the model does not take several records in a row, so each of" in capsys.readouterr().err


def test_packed_rows_hold_each_record_once_and_are_as_full_as_the_lengths_allow() -> None:
    draws = numpy.random.default_rng(0)
    for context in (8, 64, 1000):
        lengths = numpy.minimum(draws.geometric(4 / context, 3000), context)
        numbers, begins = pack(lengths, context)
        rows = [numbers[a:b] for a, b in pairwise(begins)]
        assert sorted(numbers.tolist()) == [*range(3000)]
        assert all(0 < lengths[row].sum() <= context and (numpy.diff(row) > 0).all() for row in rows)
        # best fit, the longest first, needs at most 11/9 of the fewest rows and one more
        assert len(rows) <= 11 / 9 * -(-lengths.sum() // context) + 1
