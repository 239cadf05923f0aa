"""Secrets, paths and host names planted at random in a finished run: none may be in what `publish` would send.

    python benchmarks/campaign/plants.py --count 59 --seed 1

A trial draws what is planted, how it is written and where, renews the run's own checksums, packs what would be sent,
and looks for the plant in every file of the packages, each in the forms it may take. Its class:

refused    nothing is sent, and a line says why
held       the plant is nowhere in the packages, nor is its file
taken out  its file goes, without it
published  the plant, or its last and telling part, is sent
ugly       another error than the toolkit's own
"""

import base64
import json
import os
import random
import re
import string
import tempfile
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

from processes import Finding, apart, campaign, exgrpo, fresh_copy, parser_of, trials_of
from results import SMALL

BAD = ("published", "ugly")
VARIABLES = (
    "MY_TOKEN",
    "DB_PASSWORD",
    "SSH_PASS",
    "AWS_SECRET_ACCESS_KEY",
    "WEB_SESSION",
    "SERVICE_CREDENTIALS",
    "API_KEY",
)
HOST = os.environ["HOSTNAME"] = "buildhost77"
LETTERS = string.ascii_letters + string.digits


def _word(rng: random.Random, size: int, signs: str = LETTERS) -> str:
    return "".join(rng.choice(signs) for _ in range(size))


def tokens(rng: random.Random) -> str:
    """A secret by its look."""
    return rng.choice(
        (
            f"hf_{_word(rng, 34)}",
            f"ghp_{_word(rng, 36)}",
            f"github_pat_{_word(rng, 22)}_{_word(rng, 59)}",
            f"glpat-{_word(rng, 20)}",
            f"sk-proj-{_word(rng, 48)}",
            f"AKIA{_word(rng, 16, string.ascii_uppercase + string.digits)}",
            f"AIza{_word(rng, 35)}",
            f"xoxb-{_word(rng, 12, string.digits)}-{_word(rng, 24)}",
            f"npm_{_word(rng, 36)}",
            f"-----BEGIN OPENSSH PRIVATE KEY-----{_word(rng, 40)}",
        )
    )


def paths(rng: random.Random) -> str:
    """A path of somebody's home; its telling part is the user's name."""
    user, inner = f"q{_word(rng, 7, string.ascii_lowercase)}", _word(rng, 6, string.ascii_lowercase)
    return rng.choice(
        (
            f"/home/{user}/{inner}/x",
            f"file:///home/{user}/{inner}",
            f"//home/{user}/{inner}",
            f"/Users/{user}/My {inner}/x",
            f"C:\\Users\\{user}\\{inner}",
            f"\\\\server\\{user}\\{inner}",
            f"./../home/{user}/{inner}",
            f"</home/{user}/{inner}>",
            f"dir/home/{user}/{inner}",
            f"/mnt/{user}/{inner}/y",
        )
    )


def hosts(rng: random.Random) -> str:
    """This machine's name, as it may stand in a text."""
    name = HOST
    return rng.choice(
        (name, name.upper(), f"run-on-{name}", f"{name}.corp.internal", f"me@{name}", f"http://{name}:80/v1")
    )


def written(value: str, rng: random.Random) -> str:
    """A secret in one of the codes that text goes through."""
    match rng.choice(("plain", "plain", "base64", "percent", "escapes")):
        case "base64":
            return base64.b64encode(value.encode()).decode()
        case "percent":
            place = rng.randrange(len(value))
            return f"{value[:place]}%{ord(value[place]):02X}{value[place + 1 :]}"
        case "escapes":
            place = rng.randrange(len(value))
            return f"{value[:place]}\\u{ord(value[place]):04x}{value[place + 1 :]}"
    return value


# Places: each writes the text, and says where.


def _in_json(path: Path, text: str, rng: random.Random) -> None:
    value = json.loads(path.read_text())
    holder = value
    while rng.random() < 0.5 and (inner := [own for own in holder.values() if isinstance(own, dict)]):
        holder = rng.choice(inner)
    holder[rng.choice(("note", "_name_or_path", "comment", "x"))] = text
    path.write_text(json.dumps(value))


def _in_vocabulary(path: Path, text: str, rng: random.Random) -> None:
    """As a token more, so that the tokenizer stays one."""
    value = json.loads(path.read_text())
    vocabulary = value["model"]["vocab"]
    vocabulary[text] = max(vocabulary.values()) + 1
    path.write_text(json.dumps(value))


def _in_lines(path: Path, text: str, rng: random.Random) -> None:
    lines = path.read_text().splitlines()
    at = rng.randrange(len(lines))
    lines[at] = json.dumps({**json.loads(lines[at]), "note": text})
    path.write_text("\n".join(lines) + "\n")


def _in_settings(path: Path, text: str, rng: random.Random) -> None:
    path.write_text(path.read_text().replace('name = "tiny"', f"name = {json.dumps('tiny ' + text)}", 1))


def _in_header(path: Path, text: str, rng: random.Random) -> None:
    from safetensors.numpy import load_file, save_file

    save_file(load_file(path), path, metadata={"format": "pt", "note": text})


def _in_column(path: Path, text: str, rng: random.Random) -> None:
    """In a text of a question, its hash made anew, as a run's own questions would hold it."""
    from dataclasses import replace

    from exgrpo_cli.base.types import Message
    from exgrpo_cli.questions.question_file import read_questions, write_questions

    questions = list(read_questions(path).questions)
    at = rng.randrange(len(questions))
    own, key = questions[at], rng.choice(("prompt", "answer", "source", "level"))
    changed = (Message(role="user", content=f"What is {text}?"),) if key == "prompt" else text
    questions[at] = replace(own, **{key: changed})
    write_questions(path, questions, {})


def _in_text(path: Path, text: str, rng: random.Random) -> None:
    path.write_text(path.read_text() + f"{{# {text} #}}")


def _beside(path: Path, text: str, rng: random.Random) -> None:
    path.write_text(json.dumps({"note": text}))


def _linked(path: Path, text: str, rng: random.Random) -> None:
    target = path.parents[2] / "outside.txt"
    target.write_text(json.dumps({"note": text}))
    path.unlink(missing_ok=True)
    path.symlink_to(target)


Plant = Callable[[Path, str, random.Random], None]
PLACES: tuple[tuple[str, Plant], ...] = (
    ("environment.json", _in_json),
    ("summary.json", _in_json),
    ("metrics.jsonl", _in_lines),
    ("config.toml", _in_settings),
    ("model/config.json", _in_json),
    ("model/generation_config.json", _in_json),
    ("model/tokenizer_config.json", _in_json),
    ("model/tokenizer.json", _in_vocabulary),
    ("model/chat_template.jinja", _in_text),
    ("model/model.safetensors", _in_header),
    ("data/train.parquet", _in_column),
    ("replay/ledger.json", _in_json),
    ("model/x.json", _beside),
    ("model/notes.txt", _beside),
    ("model/vocab.json", _beside),
    ("model/merges.txt", _linked),
    ("model/special_tokens_map.json", _linked),
    ("model/optimizer.safetensors", _beside),
    ("samples/step-000001.jsonl", _in_lines),
)


def texts_sent(run: Path) -> Iterator[tuple[str, str]]:
    """Name and text of every file that would be sent; of Parquet the values, schema and metadata."""
    import pyarrow.parquet as pq

    from exgrpo_cli.publishing.contents import packed

    with packed(run, "a/b") as packages:
        for package in packages:
            for name, path in package.files.items():
                text = path.read_bytes().decode("utf-8", "replace")
                if name.endswith(".parquet"):
                    table = pq.read_table(path)
                    text += str(table.to_pylist()) + str(table.schema.metadata)
                yield f"{package.repo_type}/{name}", text


def found_in(run: Path, telling: list[str]) -> list[str]:
    """Files of the packages with one of the texts, or the line that refuses them."""
    from exgrpo_cli.base.errors import ExgrpoError

    try:
        sent = [*texts_sent(run)]
    except ExgrpoError as error:
        return ["refused", str(error)]
    found = [name for name, text in sent if any(own.lower() in text.lower() for own in telling)]
    return ["sent", *found, "|", *(name for name, _ in sent)]


def trial(whole: Path, work: Path, number: int, seed: int) -> Finding:
    """Plant one thing in a fresh copy, and class what is packed."""
    rng = random.Random(f"{seed} {number}")
    fresh_copy(whole, work)
    kind = rng.choice(("token", "token", "variable", "path", "path", "host"))
    for name in VARIABLES:
        os.environ.pop(name, None)
    if kind == "token":
        secret = tokens(rng)
        text = written(secret, rng)
    elif kind == "variable":
        secret = _word(rng, 18)
        text = written(secret, rng)
        os.environ[rng.choice(VARIABLES)] = secret
    elif kind == "path":
        text = paths(rng)
        secret = re.search(r"\bq[a-z]{7}\b", text)[0]
    else:
        text, secret = hosts(rng), HOST
    place, plant = rng.choice(PLACES)
    run = work / "run"
    before = (run / place).read_bytes() if (run / place).is_file() else b""
    made = apart(_plant, str(run), place, plant.__name__, text, rng.random())
    what = f"{kind} {text[:60]!r} in {place} ({plant.__name__[1:]})"
    if made is not None:
        return Finding(number, what, "ugly", 0, f"cannot be planted: {made}")
    answer = apart(
        found_in, run, [secret, text, urllib.parse.quote(secret), base64.b64encode(secret.encode()).decode()]
    )
    if isinstance(answer, str):
        return Finding(number, what, "ugly", 1, answer)
    if answer[0] == "refused":
        return Finding(number, what, "refused", 2, answer[1][:200])
    found, sent = answer[1 : answer.index("|")], answer[answer.index("|") + 1 :]
    if found:
        return Finding(number, what, "published", 0, ", ".join(found))
    goes = any(
        name.partition("/")[2] == place.removeprefix("model/") or name.partition("/")[2] == place for name in sent
    )
    changed = (run / place).read_bytes() != before if (run / place).is_file() else True
    return Finding(number, what, "taken out" if goes and changed else "held", 0, "")


def _plant(run: str, place: str, plant: str, text: str, seed: float) -> None:
    from exgrpo_cli.runs.folder import note_checksums

    known = {own.__name__: own for _, own in PLACES}
    known[plant](Path(run, place), text, random.Random(seed))
    if place == "data/train.parquet":
        from exgrpo_cli.base.files import write_manifest

        write_manifest(Path(run, "data"))
    # What is written once keeps its old note, which would refuse the plant by its size alone.
    Path(run, "checksums.json").unlink()
    note_checksums(Path(run), at_the_end=True)


def main() -> None:
    options = parser_of(__doc__, 59, "plants").parse_args()
    with tempfile.TemporaryDirectory(prefix="exgrpo-secrets-") as name:
        whole, work = options.folder or Path(name, "whole"), Path(name, "work")
        if not whole.is_dir():
            whole.mkdir()
            (whole / "small.toml").write_text(SMALL)
            arguments = ["train", "--config", "small.toml", "--output", "run"]
            built = exgrpo(arguments, whole, seconds=900, EXGRPO_CACHE=str(whole / "cache"))
            assert built.code == 0, built.err
        defects = campaign(
            "secrets", options, trials_of(options), lambda number: trial(whole, work, number, options.seed), BAD
        )
    raise SystemExit(bool(defects))


if __name__ == "__main__":
    main()
