"""What must not leave this machine: paths and host names are taken out of texts, and a secret stops the upload."""

import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from markupsafe import escape

from exgrpo_cli.base.errors import InputError

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

TOLD = ("config.toml", "metrics.jsonl", "summary.json", "environment.json")
"""Files in which a run tells about itself."""


def told_files(folder: Path) -> list[Path]:
    """Those files of a run, or of every run of a study."""
    return [path for name in TOLD for path in (folder / name, *folder.glob(f"*/seed-*/{name}")) if path.is_file()]


def written(secret: str) -> set[str]:
    """A secret as it stands in a text, in JSON or TOML, and on a page."""
    return {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], str(escape(secret))}


@dataclass(frozen=True, kw_only=True, slots=True)
class Private:
    """What is private on this machine, in this run."""

    folders: tuple[str, ...]
    """Absolute ones, the longest first."""
    hosts: tuple[str, ...]
    """Names of this machine."""
    servers: tuple[str, ...]
    """Hosts of addresses in the settings and the journal; in data they may be anybody's."""
    secrets: tuple[str, ...]

    @classmethod
    def of(cls, folder: Path, environment: Mapping[str, str] = os.environ) -> "Private":
        """Home, working folder and that of the run; this host; the hub's token and all secrets of `environment`."""
        from huggingface_hub import get_token

        places = {str(place) for place in (Path.home(), Path.cwd(), folder.absolute(), folder.resolve())}
        parents = {str(folder.resolve().parent), str(folder.absolute().parent)}
        nodes = {platform.node(), environment.get("HOSTNAME", ""), environment.get("SLURMD_NODENAME", "")}
        hosts = nodes | {node.partition(".")[0] for node in nodes}
        servers = {host for path in told_files(folder) for host in URL_HOST.findall(path.read_text(errors="replace"))}
        secrets = {value for name, value in environment.items() if SECRET_NAME.search(name)} | {get_token() or ""}
        return cls(
            folders=tuple(sorted((places | parents) - {"/"}, key=len, reverse=True)),
            hosts=tuple(sorted((h for h in hosts if len(h) >= LEAST_HOST and h != "localhost"), key=len, reverse=True)),
            servers=tuple(sorted(servers, key=len, reverse=True)),
            secrets=tuple(sorted(secret for secret in secrets if len(secret) >= LEAST_SECRET)),
        )

    def without(self, text: str, where: str) -> str:
        """The text with paths by their last part and without host names.

        Raises InputError, naming `where` and not the secret, for a text with one.
        """
        self._refuse_secrets(text, where)
        for folder in self.folders:
            text = re.sub(re.escape(folder) + r"(?![\w-])[^\s\"'<>,;:]*", lambda match: Path(match[0]).name, text)
        text = ABSOLUTE_PATH.sub(lambda match: Path(match[0]).name, text)
        for host in (*self.servers, *self.hosts):
            text = re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "host", text)
        return text

    def without_in(self, texts: Mapping[str, str], where: str) -> dict[str, str]:
        """Each of the texts by name, as `without` has it."""
        return {name: self.without(text, where) for name, text in texts.items()}

    def check_rows(self, texts: Iterable[str], where: str) -> None:
        """Raise InputError for a row with a secret, this host's name or one of its folders: rows are not changed."""
        for row, text in enumerate(texts):
            self._refuse_secrets(text, f"{where}, row {row}")
            found = next((name for name in (*self.folders, *self.hosts) if self._names(text, name)), None)
            if found is not None:
                raise InputError(
                    f"{where}, row {row} has {found!r} of this machine in it: it would be published. Leave the row's "
                    "question out of the training set, or publish without the ledger (--no-ledger)."
                )

    @staticmethod
    def _names(text: str, name: str) -> bool:
        return name in text and re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text) is not None

    def _refuse_secrets(self, text: str, where: str) -> None:
        match = SECRET.search(text)
        known = match[0] if match else next((s for s in self.secrets if any(w in text for w in written(s))), None)
        if known is not None:
            raise InputError(
                f"{where} holds a secret that begins with {known[:4]!r}: nothing was published. Remove it there, and "
                "replace it where it is valid."
            )
