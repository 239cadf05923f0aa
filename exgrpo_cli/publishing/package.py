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

from markupsafe import Markup, escape

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.output import in_markdown, printable

MARKER = "exgrpo.json"
"""File of a repository that says what was published into it."""
METADATA_FILES = ("config.toml", "metrics.jsonl", "summary.json", "environment.json")
"""Files in which a run describes itself."""
SECRET_NAME = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$")
"""Ends of the names of environment variables whose values are secret."""
SECRET = (
    r"\b(hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{30,}"
    r"|AKIA[A-Z0-9]{16}|xox[abp]-[A-Za-z0-9-]{20,})"
)
"""Tokens of the hub, GitHub, OpenAI and Anthropic, Amazon, Slack by their look."""
LEAST_SECRET = 8
"""Characters; a shorter value of a variable is in texts by chance."""
LEAST_HOST = 4
ABSOLUTE_PATH = re.compile(r"(?<![\w.~/<])/(?!/)(?:[\w.@+~-]+/)+[\w.@+~-]*")
WHOLE = r"(?<![\w-]){}(?![\w-])"
"""Form of a pattern that finds no part of a longer word."""
URL_HOST = re.compile(r"(?<=://)(?!huggingface\.co\b)[\w.:@-]*\w")


@dataclass(frozen=True, kw_only=True, slots=True)
class Private:
    """Patterns of what is private to this machine, in this run."""

    secrets: "re.Pattern[str]"
    folders: "re.Pattern[str]"
    """Absolute ones, with the rest of a path in them."""
    hosts: "re.Pattern[str]"
    """Names of this machine, and hosts of addresses in the settings and the journal."""
    here: "re.Pattern[str]"
    """Folders and names of this machine, which data may not have; other hosts may be anybody's there."""

    @classmethod
    def of(cls, folder: Path, environment: Mapping[str, str] = os.environ) -> "Private":
        """Home, working folder and that of the run; this host; the hub's token and all secrets of `environment`."""
        from huggingface_hub import get_token

        runs = (folder.absolute(), folder.resolve())
        folders = {Path.home(), Path.cwd(), *runs, *(run.parent for run in runs)} - {Path("/")}
        nodes = {platform.node(), environment.get("HOSTNAME", ""), environment.get("SLURMD_NODENAME", "")}
        hosts = {host for node in nodes for host in (node, node.partition(".")[0]) if len(host) >= LEAST_HOST}
        told = (path for name in METADATA_FILES for place in ("", "*/seed-*/") for path in folder.glob(place + name))
        servers = {host for path in told for host in URL_HOST.findall(path.read_text(errors="replace"))}
        secrets = {value for name, value in environment.items() if SECRET_NAME.search(name)} | {get_token() or ""}
        written = {form for secret in secrets if len(secret) >= LEAST_SECRET for form in _forms(secret)}
        hosts -= {"localhost"}
        return cls(
            secrets=re.compile(f"{SECRET}|{_any_of(written)}"),
            folders=re.compile(_any_of(map(str, folders)) + r"(?![\w-])[^\s\"'<>,;:]*"),
            hosts=re.compile(WHOLE.format(_any_of(servers | hosts))),
            here=re.compile(WHOLE.format(_any_of({*map(str, folders), *hosts}))),
        )

    def redact(self, text: str, where: str) -> str:
        """The text with paths by their last part and without host names.

        Raises InputError, naming `where` and not the secret, for a text with one.
        """
        self._refuse_secrets(text, where)
        for paths in (self.folders, ABSOLUTE_PATH):
            text = paths.sub(lambda match: Path(match[0]).name, text)
        return self.hosts.sub("host", text)

    def check_rows(self, texts: Iterable[str], where: str) -> None:
        """Raise InputError for a row with a secret, this host's name or one of its folders: rows are not changed."""
        for row, text in enumerate(texts):
            self._refuse_secrets(text, f"{where}, row {row}")
            if found := self.here.search(text):
                raise InputError(
                    f"{where}, row {row} has {found[0]!r} of this machine in it: it would be published. Leave the "
                    "row's question out of the training set, or publish without the ledger (--no-ledger)."
                )

    def _refuse_secrets(self, text: str, where: str) -> None:
        if found := self.secrets.search(text):
            raise InputError(
                f"{where} holds a secret that begins with {found[0][:4]!r}: nothing was published. Remove it there, "
                "and replace it where it is valid."
            )


def _any_of(names: Iterable[str]) -> str:
    """Pattern of any of the names, the longest first; of no names it matches nothing."""
    listed = sorted(names, key=len, reverse=True)
    return f"(?:{'|'.join(map(re.escape, listed)) or '(?!)'})"


def _forms(secret: str) -> set[str]:
    """A secret as it stands in a text, in JSON or TOML, and on a page."""
    return {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], str(escape(secret))}


def _in_card(value: object) -> object:
    """A value as a card shows it; what is marked up already stays."""
    return in_markdown(value) if isinstance(value, str) and not isinstance(value, Markup) else value


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
        from huggingface_hub import CardData
        from jinja2 import Environment

        default = next(iter(tables), "")
        configs = [
            {"config_name": name, "data_files": path, "default": name == default} for name, path in tables.items()
        ]
        data = CardData(**front, configs=configs or None)
        named = data.to_dict() | values | {"card_data": Markup(printable(data.to_yaml()))}
        source = Path(__file__).with_name(template).read_text(encoding="utf-8")
        card = Environment(finalize=_in_card).from_string(source).render(**named)
        self.write("README.md", card, "the card")
        self.write(MARKER, json.dumps(self.origin, indent=2) + "\n", "the name of the run or study")
        return self

    def describe(self, repo: str) -> dict[str, Any]:
        """The repository, its files and their sizes in bytes, as `--dry-run` shows them."""
        sizes = {name: path.stat().st_size for name, path in sorted(self.files.items())}
        return {"repository": repo, "type": self.repo_type, "bytes": sum(sizes.values()), "files": sizes}
