"""Which files of a set are one configuration and split, by their names or by the set's card."""

import pytest

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.questions.sources import select_files


def chosen(paths, *selectors, card=None):
    split, files = select_files("set", paths, card or {}, selectors)
    return *split.split("/"), files


def test_configurations_and_splits_without_a_card():
    paths = ["main/train.parquet", "main/test.parquet", "socratic/train.parquet", "README.md", ".cache/train.parquet"]
    assert chosen(paths, "main") == ("main", "train", ("main/train.parquet",))
    assert chosen(paths, "main", "test") == ("main", "test", ("main/test.parquet",))
    with pytest.raises(InputError, match="the configurations main, socratic: say which, for example set:main"):
        chosen(paths)
    assert chosen(["questions.csv"]) == ("default", "train", ("questions.csv",))
    assert chosen(["test.csv"]) == ("default", "test", ("test.csv",))
    assert chosen(["OE_maths_en/validation-0.csv", "OE_maths_en/dev.csv"])[1:] == (
        "validation",
        ("OE_maths_en/dev.csv", "OE_maths_en/validation-0.csv"),
    )
    with pytest.raises(InputError, match="has the splits validation, test: say which, for example set:validation"):
        chosen(["dev.csv", "test.csv"])
    with pytest.raises(InputError, match=r"mixes .csv and .parquet files"):
        chosen(["train.csv", "train.parquet"])


def test_a_card_decides():
    card = {
        "configs": [
            {"config_name": "default", "data_files": [{"split": "train", "path": ["part/*.jsonl"]}]},
            {"config_name": "other", "data_dir": "other"},
        ]
    }
    paths = ["part/test-a.jsonl", "part/b.jsonl", "other/test.jsonl", "unused.csv"]
    assert chosen(paths, card=card) == ("default", "train", ("part/b.jsonl", "part/test-a.jsonl"))
    assert chosen(paths, "other", card=card) == ("other", "test", ("other/test.jsonl",))


@pytest.mark.parametrize(
    "configs",
    ["hello", ["main"], [{"config_name": "main", "data_files": [{"path": "a.csv"}]}], [{"data_files": {"train": "a"}}]],
)
def test_a_card_of_another_form_is_named_with_what_to_do(configs):
    with pytest.raises(InputError, match=r"set: `configs` in .* README.md is not a list .* for example set:a.csv"):
        chosen(["a.csv", "b.csv"], card={"configs": configs})
    # A file named outright needs no card.
    assert chosen(["a.csv", "b.csv"], "a.csv", card={"configs": configs})[2] == ("a.csv",)
