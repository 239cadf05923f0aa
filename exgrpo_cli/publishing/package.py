"""Files of one repository of the hub, and the check that nothing private leaves this machine.

Every text passes `Private` on its way into a package: paths and host names are taken out, and a secret stops it all.
"""

import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import escape

from exgrpo_cli.base.errors import InputError

MARKER = "exgrpo.json"
"""File of a repository that says what was published into it."""
METADATA_FILES = ("config.toml", "metrics.jsonl", "summary.json", "environment.json")
"""Files in which a run describes itself."""
SECRET_NAME = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$")
"""Ends of the names of environment variables whose values are secret."""
SECRET = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{30,}|AKIA[A-Z0-9]{16}|xox[abp]-[A-Za-z0-9-]{20,})"
)
"""Tokens of the hub, GitHub, OpenAI and Anthropic, Amazon, Slack by their look."""
LEAST_SECRET = 8
"""Characters; a shorter value of a variable is in texts by chance."""
LEAST_HOST = 4
ABSOLUTE_PATH = re.compile(r"(?<![\w.~/<])/(?!/)(?:[\w.@+~-]+/)+[\w.@+~-]*")
URL_HOST = re.compile(r"(?<=://)(?!huggingface\.co\b)[\w.:@-]*\w")


@dataclass(frozen=True, kw_only=True, slots=True)
class Private:
    """Private words of this machine, in this run; of each kind the longest first."""

    folders: tuple[str, ...]
    """Absolute ones."""
    hosts: tuple[str, ...]
    """Names of this machine."""
    servers: tuple[str, ...]
    """Hosts of addresses in the settings and the journal; in data they may be anybody's."""
    secrets: tuple[str, ...]
    """Values of variables, in every form that `_forms` gives."""

    @classmethod
    def of(cls, folder: Path, environment: Mapping[str, str] = os.environ) -> "Private":
        """Home, working folder and that of the run; this host; the hub's token and all secrets of `environment`."""
        from huggingface_hub import get_token

        runs = (folder.absolute(), folder.resolve())
        folders = {Path.home(), Path.cwd(), *runs, *(run.parent for run in runs)} - {Path("/")}
        nodes = {platform.node(), environment.get("HOSTNAME", ""), environment.get("SLURMD_NODENAME", "")}
        hosts = {host for node in nodes for host in (node, node.partition(".")[0]) if len(host) >= LEAST_HOST}
        told = (path for name in METADATA_FILES for place in ("", "*/seed-*/") for path in folder.glob(place + name))
        servers = (host for path in told for host in URL_HOST.findall(path.read_text(errors="replace")))
        secrets = {value for name, value in environment.items() if SECRET_NAME.search(name)} | {get_token() or ""}
        written = {form for secret in secrets if len(secret) >= LEAST_SECRET for form in _forms(secret)}
        return cls(
            folders=_longest_first(map(str, folders)),
            hosts=_longest_first(hosts - {"localhost"}),
            servers=_longest_first(servers),
            secrets=_longest_first(written),
        )

    def redact(self, text: str, where: str) -> str:
        """The text with paths by their last part and without host names.

        Raises InputError, naming `where` and not the secret, for a text with one.
        """
        self._refuse_secrets(text, where)
        for folder in self.folders:
            text = re.sub(re.escape(folder) + r"(?![\w-])[^\s\"'<>,;:]*", lambda match: Path(match[0]).name, text)
        text = ABSOLUTE_PATH.sub(lambda match: Path(match[0]).name, text)
        for host in (*self.servers, *self.hosts):
            text = _whole(host).sub("host", text)
        return text

    def check_rows(self, texts: Iterable[str], where: str) -> None:
        """Raise InputError for a row with a secret, this host's name or one of its folders: rows are not changed."""
        for row, text in enumerate(texts):
            self._refuse_secrets(text, f"{where}, row {row}")
            names = (name for name in (*self.folders, *self.hosts) if name in text)
            found = next((name for name in names if _whole(name).search(text)), None)
            if found is not None:
                raise InputError(
                    f"{where}, row {row} has {found!r} of this machine in it: it would be published. Leave the row's "
                    "question out of the training set, or publish without the ledger (--no-ledger)."
                )

    def _refuse_secrets(self, text: str, where: str) -> None:
        match = SECRET.search(text)
        known = match[0] if match else next((secret for secret in self.secrets if secret in text), None)
        if known is not None:
            raise InputError(
                f"{where} holds a secret that begins with {known[:4]!r}: nothing was published. Remove it there, and "
                "replace it where it is valid."
            )


def _longest_first(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names), key=len, reverse=True))


def _whole(name: str) -> "re.Pattern[str]":
    return re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")


def _forms(secret: str) -> set[str]:
    """A secret as it stands in a text, in JSON or TOML, and on a page."""
    return {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], str(escape(secret))}


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """The content of one repository, its own files under `folder`."""

    repo_type: str
    """"model" or "dataset"."""
    origin: Mapping[str, str]
    """Identity of the run or study: a repository with another origin is not overwritten."""
    folder: Path
    private: Private
    files: dict[str, Path] = field(default_factory=dict)
    """All that goes, by name in the repository: files under `folder`, and those uploaded from where they lie."""

    def place(self, name: str) -> Path:
        """Path of a file of the package's own, which the caller writes."""
        path = self.files[name] = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, name: str, text: str, where: str) -> None:
        """Add a text without what is private; messages name `where` it is from. Raises InputError for a secret."""
        self.place(name).write_text(self.private.redact(text, where), encoding="utf-8")

    def copy(self, source: Path, name: str = "") -> None:
        """Add a text file, under its own name where no other is given, as `write` does."""
        self.write(name or source.name, source.read_text(encoding="utf-8"), str(source))

    def finish(self, template: str, front: Mapping[str, Any], tables: Mapping[str, str], **values: Any) -> "Package":
        """Add the marker, and the card: a template of this folder with its `front` matter and `values`.

        `tables` are the configurations of a data set with the pattern of their files; the first is the default one.
        """
        from huggingface_hub import CardData, RepoCard

        default = next(iter(tables), "")
        configs = [
            {"config_name": name, "data_files": path, "default": name == default} for name, path in tables.items()
        ]
        data = CardData(**front, configs=configs or None)
        path = Path(__file__).with_name(template)
        card = RepoCard.from_template(data, template_path=str(path), **values)
        self.write("README.md", str(card), "the card")
        self.write(MARKER, json.dumps(self.origin, indent=2) + "\n", "the name of the run or study")
        return self

    def describe(self, repo: str) -> dict[str, Any]:
        """The repository, its files and their sizes in bytes, as `--dry-run` shows them."""
        sizes = {name: path.stat().st_size for name, path in sorted(self.files.items())}
        return {"repository": repo, "type": self.repo_type, "bytes": sum(sizes.values()), "files": sizes}
