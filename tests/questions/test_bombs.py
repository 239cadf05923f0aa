"""Small files that would unpack to gigabytes, and tokenizers that would: one line, and the memory stays free."""

import gzip
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from processes import python
from question_sources import tokenizer
from tokenizers import Regex, decoders, normalizers, processors

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.commands import run
from exgrpo_cli.models.tiny import make_tokenizer
from exgrpo_cli.questions.prompts import choose_template, require_bounded

PART = b"a" * (1 << 25)
"""A frame or member of it stands for 32 MiB; put together they are one line."""


def one_line(path: Path) -> None:
    frame = pa.compress(PART, "zstd", asbytes=True)
    path.write_bytes(pa.compress(b'{"question": "', "zstd", asbytes=True) + frame * 32)


def one_field(path: Path) -> None:
    path.write_bytes(gzip.compress(b"question,answer\nwhy,1\n") + gzip.compress(PART, 1) * 16)


def one_row_of_many_lines(path: Path) -> None:
    path.write_bytes(gzip.compress(b'question,answer\n"') + gzip.compress(b"ab\n" * (1 << 23), 1) * 20)


def one_value(path: Path) -> None:
    path.write_bytes(gzip.compress(b'[{"question": "') + gzip.compress(PART, 1) * 16)


def empty_lines(path: Path) -> None:
    path.write_bytes(pa.compress(b"\n" * len(PART), "zstd", asbytes=True) * 32)


def one_text_in_a_dictionary(path: Path) -> None:
    """12 MB written once, 20,000 rows that name it."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), pa.array(["a" * 12_000_000]))
    table = pa.table({"question": texts, "answer": pa.array(["1"] * 20_000)})
    pq.write_table(table, path, compression="zstd", dictionary_pagesize_limit=1 << 30)


def one_long_text(path: Path) -> None:
    table = pa.table({"question": ["why", "a" * 40_000_000], "answer": ["1", "2"]})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)


def many_rows(path: Path) -> None:
    nulls = pa.nulls(7_000_000, pa.string())
    pq.write_table(pa.table({"question": nulls, "answer": nulls}), path, compression="zstd")


BOMBS = {
    "a.jsonl.zst": (one_line, "line 1 is over the bound of 16 MB: .*EXGRPO_MAX_MB"),
    "b.csv.gz": (one_field, "line 3 is over the bound of 16 MB"),
    "c.csv.gz": (one_row_of_many_lines, "row 1 is (over the bound of 16 MB|not CSV: field larger than)"),
    "d.json.gz": (one_value, "its one JSON value is over the bound of 16 MB"),
    "e.jsonl.zst": (empty_lines, " is over the bound of 6,000,000 rows: .*EXGRPO_MAX_ROWS"),
    "f.parquet": (one_text_in_a_dictionary, "what is packed in it is over the bound of 1,000 times its size"),
    "g.parquet": (one_long_text, "row 2 is over the bound of 16 MB"),
    "h.parquet": (many_rows, " is over the bound of 6,000,000 rows"),
}
PROGRAM = """
import json, re, resource, sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from exgrpo_cli.commands import run

resource.setrlimit(resource.RLIMIT_AS, 2 * (6 << 30,))
for path in sys.argv[1:]:
    with redirect_stderr(StringIO()) as said:
        code = run(["prepare", path, "--quiet", "--output", path + "-out.parquet"])
    # Of this program: what getrusage counts begins with the peak of the process that started it.
    peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())
    print(json.dumps([code, said.getvalue(), int(peak[1]) >> 10]))
"""


def test_a_small_file_of_gigabytes_is_one_line(tmp_path) -> None:
    """Eight of them, unpacked some 0.5 to 200 GiB, in one process."""
    for name, (make, _) in BOMBS.items():
        make(tmp_path / name)
    paths = [str(tmp_path / name) for name in BOMBS]
    bounds = {"EXGRPO_MAX_MB": "16", "EXGRPO_MAX_ROWS": "6e6"}
    ended = python("-c", PROGRAM, *paths, variables=bounds, timeout=500)
    assert ended.returncode == 0, ended.stderr
    told = [json.loads(line) for line in ended.stdout.splitlines()]
    for path, (code, said, peak_mb), (_, message) in zip(paths, told, BOMBS.values(), strict=True):
        assert (code, said.count("\n")) == (2, 1), said
        assert peak_mb < 1800, (path, peak_mb)
        assert re.search(re.escape(path) + f"(: )?{message}", said), said
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(BOMBS)


FAST = "PreTrainedTokenizerFast"
MANY = normalizers.Sequence([normalizers.Replace(Regex("."), "x" * 8)] * 6)
DOUBLED = processors.TemplateProcessing(single=" ".join(["<s>"] * 100) + " $A", special_tokens=[("<s>", 0)])


@pytest.mark.parametrize(
    ("part", "value", "growth"),
    [
        ("normalizer", normalizers.Replace("a", "b" * 10_000_000), "1e\\+07"),
        ("normalizer", MANY, "3e\\+05"),
        ("normalizer", normalizers.Sequence([normalizers.NFKC(), MANY]), "3e\\+05"),
        ("normalizer", normalizers.Prepend("x" * 1000), "1e\\+03"),
        ("decoder", decoders.Sequence([decoders.Replace("a", "b" * 1000), decoders.Fuse()]), "1e\\+03"),
        ("post_processor", DOUBLED, "1e\\+02"),
    ],
)
def test_a_tokenizer_that_makes_much_of_little_is_refused(part, value, growth) -> None:
    hostile = tokenizer()
    setattr(hostile.backend_tokenizer, part, value)
    with pytest.raises(InputError, match=rf"model: the {part} of tokenizer.json may make {growth} of one character"):
        require_bounded(hostile, "model")


def test_tokenizers_as_models_have_them_pass() -> None:
    usual = tokenizer()
    require_bounded(usual, "model")
    # Llama's, Gemma's and T5's.
    for replaced in (normalizers.Replace(" ", "\u2581"), normalizers.Replace(Regex(" {2,}"), " "), normalizers.NFC()):
        usual.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replaced])
        require_bounded(usual, "model")


def test_a_prompt_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(
        InputError, match="chat template makes a prompt that is not valid Unicode: use another template"
    ):
        choose_template("chat", tokenizer("{{ '\\ud800' }}"))


def test_a_model_folder_with_such_a_tokenizer_is_one_line(workdir, capsys) -> None:
    """The pattern of the second passes on what a folder is tried with, and fails at a question."""
    make_tokenizer(max_tokens=512).save_pretrained("model")
    Path("model", "config.json").write_text('{"model_type": "llama"}')
    Path("set.jsonl").write_text(json.dumps({"question": "a" * 200 + "!", "answer": "1"}))
    parts, named = (json.loads(Path("model", f"tokenizer{end}.json").read_text()) for end in ("", "_config"))
    for pattern, content, message in (
        ({"String": "a"}, "b" * 10_000_000, "model: the normalizer of tokenizer.json may make 1e+07 of one character"),
        ({"Regex": "(a+)+$"}, "b", "The backbone's tokenizer fails at a prompt (Onig: "),
    ):
        # Its own class would bring a normalizer of its own.
        Path("model", "tokenizer_config.json").write_text(json.dumps(named | {"tokenizer_class": FAST}))
        parts["normalizer"] = {"type": "Replace", "pattern": pattern, "content": content}
        Path("model", "tokenizer.json").write_text(json.dumps(parts))
        assert run(["prepare", "set.jsonl", "--backbone", "model", "--quiet"]) == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert message in said[-1] and len(said) == 1, said
