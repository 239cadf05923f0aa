"""`exgrpo publish` against a hub on this machine, and `hf://` back: real requests, real Parquet, real signals."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from local_hub import READER, TOKEN, LocalHub, Repository, local_hub, talk_to
from made_results import result_of
from safetensors.numpy import save_file
from synthetic_run import VOCABULARY, SyntheticRun, write_config, write_run
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from exgrpo_cli.commands import run as exgrpo
from exgrpo_cli.commands.cli import with_run
from exgrpo_cli.config.requests import RunRequest
from exgrpo_cli.evaluation.results import ResultsFolder
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.ledger.schemas import SCHEMAS, TABLES
from exgrpo_cli.publishing.contents import MEANINGS, ROW_SCHEMA
from exgrpo_cli.publishing.hub import ROWS, local_run
from exgrpo_cli.publishing.private import Private
from exgrpo_cli.runs.folder import note_checksums
from exgrpo_cli.runs.result import write_result

HOST = "login3-private"
SECRET = "correct-horse-battery"
ODD_SECRET = 'pass<"word">&more'
"""Written otherwise in JSON and on a page."""
LICENCE = "---\nlicense: other\nlicense_name: base-licence\nlicense_link: https://example.org/licence\n---\n# Base\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with private things planted: folders in settings and journal, this host, a server's name."""
    root = tmp_path_factory.mktemp("private-root")
    base = root / "bases" / "base-model"
    base.mkdir(parents=True)
    (base / "README.md").write_text(LICENCE)
    run = root / "my-run"
    write_run(run, SyntheticRun(steps=8, num_questions=40, questions_per_step=8, mixed_from=3))
    with (run / "config.toml").open("a") as file:
        file.write(f'[data]\ntrain = "{root}/questions/algebra.jsonl"\n[backbone]\nname = "base"\nsource = "{base}"\n')
    model = run / "model"
    model.mkdir()
    for number in range(3):
        weights = {f"layer-{number}": np.full(1000 + number, number, dtype=np.float32)}
        save_file(weights, model / f"model-{number + 1:05d}.safetensors", metadata={"format": "pt"})
    Tokenizer(WordLevel({f"word{n}": n for n in range(VOCABULARY)}, unk_token="word0")).save(
        str(model / "tokenizer.json")
    )
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2", "_name_or_path": "/srv/models/base-model"}))
    (model / "README.md").write_text("the run's own card")
    environment = {"exgrpo": "0.1.0", "node": HOST, "train_questions_sha256": "q", "packages": {}}
    (run / "environment.json").write_text(json.dumps(environment))
    with (run / "metrics.jsonl").open("a") as file:
        reason = f"lost {HOST}: http://gpu17.cluster.internal:8000/v1"
        file.write(json.dumps({"step": 9, "optim/skip_reason": reason}) + "\n")
    # What the page of the run shows.
    (run / "samples").mkdir()
    asked = {"prompt": f"{HOST} asks", "answer": "7", "reward": 1.0, "verdict": "correct", "num_tokens": 9}
    sample = asked | {"text": f"see {root}/notes.txt & {HOST}", "experiential": False}
    (run / "samples/step-000008.jsonl").write_text(json.dumps(sample) + "\n")
    heldout = json.loads((run / "summary.json").read_text())["heldout"]
    change(run / "summary.json", backbone="base", heldout=heldout | {"set": "algebra-heldout"})
    return run


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A hub that this process's client talks to, with a token that may write, and caches of its own."""
    with local_hub() as hub:
        talk_to(hub.endpoint, tmp_path / "hub", monkeypatch)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HOSTNAME", HOST)
        monkeypatch.setenv("EXGRPO_CACHE", str(tmp_path / "cache"))
        yield hub


@pytest.fixture(scope="module")
def quick_page() -> Iterator[None]:
    """Pages without figures: what is on them is tested elsewhere, and drawing takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("exgrpo_cli.show.figures.run.training_figures", lambda *given: iter(()))
        patch.setattr("exgrpo_cli.show.statistics.replay_figures", lambda *given: iter(()))
        patch.setattr("exgrpo_cli.studies.output.study_figures", lambda study, report: {})
        yield


pytestmark = [
    pytest.mark.usefixtures("quick_page"),
    # The hub's client hands large files to its transport in a way that the transport's next version will not take.
    pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning"),
]


def change(path: Path, **values: object) -> None:
    """Set members of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an error, without the line about what is uploaded."""
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_a_published_run_is_a_model_with_its_card_and_a_ledger_that_is_a_run_again(run, hub, capsys):
    assert exgrpo(["publish", str(run), "--to", "me/algebra", "--private", "--json"]) == 0
    addresses = json.loads(capsys.readouterr().out)["published"]
    assert addresses == [f"{hub.endpoint}/datasets/me/algebra", f"{hub.endpoint}/me/algebra"]
    model, ledger = hub.repositories["model", "me/algebra"], hub.repositories["dataset", "me/algebra"]
    assert model.private and ledger.private
    card = model.files["README.md"].decode()
    assert "license: other\nlicense_name: base-licence\nlicense_link: https://example.org/licence\n" in card
    assert "Base model: base-model" in card and "exgrpo (seed 0) on algebra.jsonl" in card
    assert "| algebra-heldout | after training | 0.8" in card and "| 600 | 4 |" in card
    assert model.files["model-00003.safetensors"] == (run / "model/model-00003.safetensors").read_bytes()
    assert hub.uploaded and json.loads(model.files["config.json"])["_name_or_path"] == "base-model"

    for content in (*model.files.values(), *ledger.files.values()):
        text = content.decode(errors="replace")
        for private in (HOST, str(run.parent), "/srv/models", "gpu17", str(Path.home()) + "/", TOKEN):
            assert private not in text
    assert b'train = "algebra.jsonl"' in ledger.files["config.toml"]
    assert b"lost host: http://host/v1" in ledger.files["metrics.jsonl"]
    # The page tells of responses, and nothing of this machine; what the run folder checks itself by stays here.
    assert b"host asks" in ledger.files["report.html"] and b"see notes.txt &amp; host" in ledger.files["report.html"]
    assert not {"checksums.json", ".lock"} & {*ledger.files, *model.files}
    assert not any(name.startswith(("samples/", "checkpoints/", "stacks/")) for name in ledger.files)

    fetched = local_run("hf://me/algebra")
    ours, theirs = LedgerReader(run / "replay"), LedgerReader(fetched / "replay")
    assert theirs.dropped == "" and theirs.last_step == ours.last_step
    assert all(theirs.table(table).equals(ours.table(table)) for table in TABLES if table != "bodies")
    ids = ours.trajectories().column("trajectory_id").to_pylist()
    assert len(ids) > 100
    for mine, other in zip(ours.bodies(ids), theirs.bodies(ids), strict=True):
        assert all(np.array_equal(one, another) for one, another in zip(mine, other, strict=True))
    asked = with_run(RunRequest(replay_from="hf://me/algebra")).replay_from
    assert asked == str(local_run("hf://me/algebra")) == str(fetched)

    assert exgrpo(["replay-stats", "hf://me/algebra", "--no-plots", "--json"]) == 0
    published = json.loads(capsys.readouterr().out)
    assert exgrpo(["replay-stats", str(run), "--no-plots", "--json"]) == 0
    assert {**published, "run": ""} == {**json.loads(capsys.readouterr().out), "run": ""}


@pytest.mark.slow
def test_the_data_set_loads_with_datasets_and_equals_the_ledger(run, hub, tmp_path):
    assert exgrpo(["publish", str(run), "--to", "me/algebra", "--quiet"]) == 0
    code = (
        "import datasets, json\n"
        "rows = datasets.load_dataset('me/algebra', split='train')\n"
        "names = datasets.get_dataset_config_names('me/algebra')\n"
        "events = datasets.load_dataset('me/algebra', 'events', split='train')\n"
        "rows.to_parquet('rows.parquet'); events.to_parquet('events.parquet'); print(json.dumps(names))\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reader = LedgerReader(run / "replay")
    assert set(json.loads(done.stdout)) == {ROWS, "questions", "scores", "draws", "visits", "events"}
    loaded, ours = pq.read_table(tmp_path / "rows.parquet"), reader.trajectories()
    assert loaded.select(ours.column_names).cast(ours.schema).equals(ours)
    bodies = reader.bodies(ours.column("trajectory_id").to_pylist())
    stored = zip(loaded.column("token_ids").to_pylist(), loaded.column("behaviour_logprobs").to_pylist(), strict=True)
    assert list(stored) == [(token_ids.tolist(), logprobs.tolist()) for token_ids, logprobs in bodies]
    assert loaded.column("response")[0].as_py() == " ".join(f"word{token}" for token in bodies[0][0])
    assert pq.read_table(tmp_path / "events.parquet").cast(reader.events().schema).equals(reader.events())


def test_every_column_is_described():
    assert list(MEANINGS[ROWS]) == ROW_SCHEMA.names
    assert all(list(MEANINGS[table]) == SCHEMAS[table].names for table in TABLES[2:])


def test_a_dry_run_lists_files_and_sizes_and_asks_nobody(run, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert exgrpo(["publish", str(run), "--to", "me/algebra", "--dry-run", "--json"]) == 0
    ledger, model = json.loads(capsys.readouterr().out)["repositories"]
    assert (ledger["type"], model["type"]) == ("dataset", "model")
    assert model["files"]["model-00001.safetensors"] > 4000 and model["bytes"] == sum(model["files"].values())
    assert {"README.md", "config.toml", "data/train.parquet", "replay/ledger.json"} <= set(ledger["files"])
    assert not any(name.startswith("replay/bodies") for name in ledger["files"])


def test_a_second_upload_brings_up_to_date_and_other_content_is_left_alone(run, hub, tmp_path, capsys):
    command = ["publish", "--to", "me/algebra", "--quiet"]
    assert exgrpo([*command, str(run)]) == 0
    ledger = hub.repositories["dataset", "me/algebra"]
    sent = len(hub.uploaded)
    ledger.files["replay/events/part-00000099-00000099.parquet"] = b"merged since"
    ledger.files[".gitattributes"] = b"the hub's"
    assert exgrpo([*command, str(run)]) == 0
    assert len(hub.uploaded) == sent
    assert "replay/events/part-00000099-00000099.parquet" not in ledger.files and ".gitattributes" in ledger.files

    other = shutil.copytree(run, tmp_path / "another-run")
    command.append("--no-ledger")
    assert exgrpo([*command, str(other)]) == 2
    assert "me/algebra (model) holds something else (my-run): choose another name for --to" in said(capsys)
    hub.repositories["model", "me/notes"] = Repository(files={"notes.md": b"mine"})
    before = dict(hub.repositories)
    assert exgrpo(["publish", str(run), "--to", "me/notes", "--no-ledger"]) == 2
    assert "me/notes (model) holds something else (1 files, first notes.md)" in said(capsys)
    assert hub.repositories == before


def test_a_token_that_is_missing_wrong_or_without_the_right_is_one_line(run, hub, monkeypatch, capsys):
    missing = "no token for the hub: set HF_TOKEN, or log in with `hf auth login`."
    for token, text in {READER: "(status 403)", "hf_nobody": "(status 401)", "": missing}.items():
        monkeypatch.setattr("huggingface_hub.get_token", lambda token=token: token or None)
        monkeypatch.setenv("HF_TOKEN", token)
        assert exgrpo(["publish", str(run), "--to", "me/algebra", "--no-ledger"]) == 2
        assert text in said(capsys)
    assert hub.repositories == {}


def test_an_upload_that_broke_off_goes_on_with_the_same_command(run, hub, capsys):
    command = ["publish", str(run), "--to", "me/algebra", "--no-ledger", "--quiet"]
    hub.refuse_after = 1
    assert exgrpo(command) == 1
    assert "the upload to me/algebra broke off" in said(capsys) and len(hub.uploaded) == 1
    assert hub.repositories["model", "me/algebra"].files == {}
    hub.refuse_after = None
    assert exgrpo(command) == 0
    # Nothing was sent twice.
    assert len(hub.uploaded) == 3 == len(set(hub.uploaded))
    assert len(hub.repositories["model", "me/algebra"].files) == 7


@pytest.mark.engines
def test_an_upload_that_was_stopped_says_how_to_go_on(run, hub):
    command = ["publish", str(run), "--to", "me/algebra", "--no-ledger", "--quiet"]
    hub.hang_after = 1
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    # A suite started in the background of a shell inherits that SIGINT is ignored; a terminal's Ctrl-C is not.
    code = "import signal; signal.signal(2, signal.default_int_handler); from exgrpo_cli.main import main; main()"
    program = [sys.executable, "-c", code, *command]
    with subprocess.Popen(program, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert hub.hanging.wait(120)
        process.send_signal(signal.SIGINT)
        # The request that hangs is answered once the signal has been taken; before that the upload would end well.
        time.sleep(2)
        hub.released.set()
        _, talk = process.communicate(timeout=60)
    assert process.returncode == 130, talk
    assert "the same command goes on with the upload to me/algebra" in talk
    hub.hang_after = None
    assert exgrpo(command) == 0
    assert len(hub.uploaded) == 3 == len(set(hub.uploaded))
    # A hub that cannot be reached is one line, whatever its client says of each request.
    nowhere = {**environment, "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(program, env=nowhere, capture_output=True, text=True, check=False)
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and "http://127.0.0.1:9 cannot be asked about me/algebra" in line


def test_a_planted_token_stops_the_upload_and_is_not_repeated(run, hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("MY_PASSWORD", ODD_SECRET)
    token = "hf_" + "a1B2" * 8
    for place, secret, old, new in (
        # A sample is published on the page alone.
        ("samples/step-000008.jsonl", ODD_SECRET, "asks", json.dumps(ODD_SECRET)[1:-1]),
        ("config.toml", token, "[data]", f"# {token}\n[data]"),
        ("metrics.jsonl", SECRET, "lost", SECRET),
        ("model/config.json", SECRET, "qwen2", SECRET),
    ):
        copy = shutil.copytree(run, tmp_path / place.replace("/", "-") / "my-run")
        text = (copy / place).read_text()
        assert old in text
        (copy / place).write_text(text.replace(old, new))
        alone = ["--no-ledger"] if place.startswith("model") else []
        assert exgrpo(["publish", str(copy), "--to", "me/algebra", *alone]) == 2
        line = said(capsys)
        assert place.replace("samples/step-000008.jsonl", "report.html") in line and "holds a secret" in line
        assert secret not in line
    assert hub.repositories == {}


def test_what_the_run_did_not_write_stays_here_and_nothing_is_sent_unseen(run, tmp_path, capsys):
    outside, token = tmp_path / "outside.txt", "github_pat_" + "a1B2" * 9
    outside.write_text("mine")
    copy = shutil.copytree(run, tmp_path / "my-run")
    note_checksums(copy, at_the_end=True)
    for name in ("notes.txt", "x.json"):
        (copy / "model" / name).write_text(json.dumps(token))
    assert exgrpo(["publish", str(copy), "--to", "me/algebra", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "has more than the run wrote, which stays here: notes.txt, x.json" in err
    assert "model-00001.safetensors" in out and "notes.txt" not in out and "x.json" not in out

    def header(folder):
        save_file({"layer": np.zeros(3, np.float32)}, folder / "model/model-00001.safetensors", {"note": token})

    def column(folder):
        path = folder / "data/train.parquet"
        table = pq.read_table(path)
        at = table.column_names.index("level")
        pq.write_table(table.set_column(at, "level", [[token, *table["level"].to_pylist()[1:]]]), path)

    for number, (plant, message) in enumerate(
        (
            (lambda folder: (folder / "model/merges.txt").symlink_to(outside), "is a link to"),
            (header, "the header of"),
            (column, "holds a secret that begins with 'gith'"),
        )
    ):
        copy = shutil.copytree(run, tmp_path / str(number) / "my-run")
        plant(copy)
        assert exgrpo(["publish", str(copy), "--to", "me/algebra", "--dry-run"]) == 2
        assert message in (line := said(capsys)) and token not in line


def test_rows_with_something_private_are_named_and_not_changed(tmp_path):
    private = Private.of(tmp_path / "run", {"HOSTNAME": "gpu-node-17.cluster.internal"})
    private.check_rows(["What is 1/2 of 3/4?", "a path such as /usr/bin is nobody's"], "the questions")
    for text in ("it ran on gpu-node-17.", f"see {tmp_path}/notes.txt", "hf_" + "x" * 30):
        with pytest.raises(ValueError, match=r"the questions, row 1") as refused:
            private.check_rows(["fine", text], "the questions")
        assert "hf_xxxx" not in str(refused.value)


def test_what_cannot_be_published_or_fetched_is_one_line(run, hub, tmp_path, capsys):
    (tmp_path / "young").mkdir()
    write_config(tmp_path / "young", SyntheticRun())
    unscored = shutil.copytree(run, tmp_path / "unscored")
    change(unscored / "summary.json", heldout={"set": "none", "before": {}, "after": {}})
    hub.repositories["dataset", "me/words"] = Repository(files={"a.jsonl": b"{}"})
    for command, text in {
        f"publish {tmp_path / 'young'} --to me/x": "has no final model yet. Go on with exgrpo train --resume",
        f"publish {unscored} --to me/x": "has no held-out figure for its card",
        f"publish {tmp_path} --to me/x": "is neither a run (no config.toml) nor a study with a run that has finished",
        f"publish {tmp_path / 'nowhere'} --to me/x": "is neither a run",
        f"publish {run} --to algebra": "it must be OWNER/NAME",
        f"publish {run} --to me/a:b": "it must be OWNER/NAME",
        "replay-stats hf://me/words": "is no ledger that exgrpo published",
        "replay-stats hf://me/nothing": "has no data set 'me/nothing'",
        "replay-stats hf://words": "is not hf://OWNER/NAME",
    }.items():
        assert exgrpo(command.split()) == 2
        err = capsys.readouterr().err
        assert text in err and err.count("\n") == 1
    (tmp_path / "study" / "on-policy").mkdir(parents=True)
    shutil.copytree(run, tmp_path / "study" / "on-policy" / "seed-0")
    (tmp_path / "study" / "results.json").symlink_to("results.json")
    assert exgrpo(["publish", str(tmp_path / "study"), "--to", "me/x"]) == 2
    assert "study/results.json is neither a file nor a folder" in capsys.readouterr().err


def test_a_run_without_evaluation_takes_the_figures_of_evaluate(run, hub, tmp_path, capsys):
    results = tmp_path / "results"
    results.mkdir()
    protocol = {"benchmark": {"name": "olympics"}}
    (results / "protocol.json").write_text(json.dumps(protocol))
    figures = {"avg_at_k": 0.4321, "k": 8, "low": 0.4, "high": 0.5, "questions": 30, "protocol": protocol}
    ResultsFolder(results).write_results(figures)
    command = ["publish", str(run), "--to", "me/alone", "--no-ledger", "--quiet", "--results", str(results)]
    assert exgrpo(command) == 0
    assert set(hub.repositories) == {("model", "me/alone")}
    card = hub.repositories["model", "me/alone"].files["README.md"].decode()
    assert "| olympics | after training | 0.432 | 0.400 to 0.500 | 30 | 8 |" in card and "replay-stats" not in card
    file = results / "results.json"
    file.write_text(file.read_text().replace("0.4321", "0.8321"))
    assert exgrpo(command) == 2 and f"{file} is damaged (its checksum differs)" in capsys.readouterr().err


def test_a_study_is_published_as_tables_with_its_page(hub, tmp_path, capsys):
    study = tmp_path / "study"
    for arm in ("ent-min", "on-policy"):
        for seed in (0, 1):
            folder = study / arm / f"seed-{seed}"
            folder.parent.mkdir(parents=True, exist_ok=True)
            write_run(folder, SyntheticRun(steps=4, num_questions=30, questions_per_step=4, seed=seed))
            score = {"pass_at_1": 0.5 + 0.1 * seed, "low": 0.4, "high": 0.7, "questions": 50, "samples": 4}
            change(folder / "summary.json", seed=seed, heldout={"set": "h", "before": score, "after": score})
            write_result(folder / "result.json", result_of([2 + seed, 2]))
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": 5, "optim/skip_reason": f"{HOST} lost {tmp_path}/x.bin"}) + "\n")
            with (folder / "config.toml").open("a") as file:
                file.write(f'[data]\ntrain = "{tmp_path}/questions/algebra.jsonl"\n')
    write_result(study / "results" / "ent-min-0.result.json", result_of([2, 2]))
    (study / "results.json").write_text(json.dumps({"folder": str(study)}))
    (study / "report.md").write_text("hf_" + "a1B2" * 8)
    assert exgrpo(["publish", str(study), "--to", "me/study", "--quiet"]) == 2
    assert "report.md holds a secret that begins with 'hf_a'" in said(capsys) and hub.repositories == {}
    (study / "report.md").write_text(f"made on {HOST} in {study}")
    assert exgrpo(["publish", str(study), "--to", "me/study", "--quiet"]) == 0
    files = hub.repositories["dataset", "me/study"].files
    for name, content in files.items():
        for private in (HOST, str(tmp_path), TOKEN):
            assert private.encode() not in content, name
    assert files["report.md"] == b"made on host in study"
    assert {"README.md", "report.html", "runs.jsonl", "steps.jsonl", "results.json"} <= set(files)
    assert {"configs/ent-min-seed-1.toml", "results/ent-min-0.result.json"} <= set(files)
    rows, steps = (
        [json.loads(line) for line in files[name].decode().splitlines()] for name in ("runs.jsonl", "steps.jsonl")
    )
    assert next((row["arm"], row["after"]) for row in rows if row["arm"] == "ent-min") == ("ent-min", "2 2")
    assert len(rows) == 4 and len(steps) == 20
    assert {row.get("optim/skip_reason") for row in steps} >= {"host lost x.bin"}
    assert b"config_name: runs" in files["README.md"] and b"| ent-min |" in files["README.md"]
    assert json.loads(files["results.json"]) == {"folder": "study"}
