"""Secrets, paths and host names that stay on this machine: found in a text however it is written, or taken out of it.

Settings, journals, pages and cards lose paths and hosts; rows and vocabularies, which are not changed, are refused with
one. A secret refuses either. Patterns leave mathematics alone: fractions, chains of quotients, LaTeX commands.
"""

import base64
import html
import json
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from exgrpo_cli.base.data import expanded, tables
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.settings import Config

METADATA_FILES = ("config.toml", "metrics.jsonl", "summary.json", "environment.json")
"""Files in which a run describes itself."""
QUOTED = (".json", ".jsonl", ".toml")
"""Suffixes of files whose texts are quoted strings with JSON's escapes."""
LEAST_SECRET = 8
"""Characters; a shorter value of a variable is in texts by chance."""
LEAST_HOST = 4
Rules = tuple[tuple[tuple[str, ...], "re.Pattern[str]"], ...]
"""Patterns, each with marks: it is in no text without one of them. A search for marks is many times faster."""


_TABLES = tables(__file__, "private.toml")
_PIECES = _TABLES["pieces"]


def _rules(name: str, form: str = "{}") -> Rules:
    rules = _TABLES[name].items()
    return tuple((tuple(marks.split(" ")), re.compile(form.format(expanded(rule, _PIECES)))) for marks, rule in rules)


SECRET_NAME = re.compile(_TABLES["secret_name"], re.IGNORECASE)
LOOKS, SENTENCES, PERSONAL = _rules("looks", "(?<![A-Za-z0-9]){}"), _rules("sentences"), _rules("personal")
URL, IPV4, IPV6, MAIL, INNER = (expanded(f"«{name}»", _PIECES) for name in ("url", "ipv4", "ipv6", "mail", "inner"))
PATHS = _rules("paths", f"({URL})|{{}}")
"""Addresses on the web, the first group, are kept."""
VALUE = re.compile(expanded(_TABLES["value"], _PIECES))
URL_HOST = re.compile(r"(?<=://)(?!huggingface\.co\b)[\w.:@-]*\w")
_FOUR_NUMBERS = re.compile(r"\d\.\d+\.\d+\.\d")
_OF_URL = re.compile(r"((?:https?|hf)://[\w.:@-]+)[^\s\"'<>]*")
_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"|[^"]+')
_SAYING = re.compile(r"[A-Za-df-z/\\~@]|\d\.\d+\.\d|:.*:")
_LONG = re.compile(r"[\w.:-]{16,}")
_RUN = re.compile(r"[A-Za-z0-9+/_-]{16,}")
_ESCAPES = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|([\"'\\/])|([nrtbf]))")


def _unescaped(text: str) -> str:
    def sign(match: "re.Match[str]") -> str:
        number = match[1] or match[2] or match[3]
        return chr(min(int(number, 16), 0x10FFFF)) if number else match[4] or "\n"

    return _ESCAPES.sub(sign, text) if "\\" in text else text


def readings(text: str, depth: int = 2) -> Iterator[str]:
    """The text, and what it says without JSON's escapes, %XX, HTML's entities and base64, one in another too."""
    seen = dict.fromkeys((text,))
    for begun in (text, _unescaped(text)):
        unquoted = unquote(begun) if "%" in begun else begun
        text = html.unescape(unquoted)
        seen |= dict.fromkeys((begun, unquoted, text))
    yield from seen
    told = {True: "", False: ""}
    for run in dict.fromkeys(_RUN.findall(text) if depth else ()):
        standard = run.replace("-", "+").replace("_", "/")
        # What stands before it may belong to something else.
        for part in (standard[begin:] for begin in range(4)):
            part = part[:-1] if len(part) % 4 == 1 else part
            plain = base64.b64decode(part + "=" * (-len(part) % 4)).decode(errors="replace")
            told[plain.isprintable()] += f"{plain}\n"
    yield from (told[False], *(readings(told[True], depth - 1) if told[True] else ()))


class Private(NamedTuple):
    """Patterns of what is private to this machine, in this run."""

    variables: Mapping[str, str]
    """Variable of the environment that a secret is the value of, by how the secret is written."""
    own: Rules
    """Folders of this machine, and its names, in small letters as marks: data may not have them."""
    folders: "re.Pattern[str]"
    """Those of this machine with the rest of a path; addresses on the web are the first group."""
    hosts: "re.Pattern[str]"
    """Names and addresses of machines: this one, and those of addresses in the settings and the journal."""

    @classmethod
    def of(cls, folder: Path, environment: Mapping[str, str] = os.environ) -> "Private":
        """Home, working folder and that of the run; this host; the hub's token and all secrets of `environment`."""
        runs = (folder.absolute(), folder.resolve())
        folders = {Path.home(), Path.cwd(), *runs, *(run.parent for run in runs)} - {Path("/")}
        told = (path for name in METADATA_FILES for place in ("", "*/seed-*/") for path in folder.glob(place + name))
        servers = {host for path in told for host in URL_HOST.findall(path.read_text(errors="replace"))}
        long, short = ([str(path) for path in folders if (len(path.parts) > 2) is several] for several in (True, False))
        # A folder of one part is a word as well.
        own = rf"(?<![\w.@+~-])(?:{_any_of(long)}(?![\w-])|{_any_of(short)}/)"
        names, machine = _host_pattern(environment)
        hosts = (machine, _whole(_any_of(servers)), IPV4, IPV6, INNER)
        return cls(
            variables=_written_secrets(environment),
            own=((tuple(folder.lower() for folder in (*long, *short)), re.compile(own)), (names, re.compile(machine))),
            folders=re.compile(rf"({URL})|{own}[^\s\"'<>,;:]*"),
            hosts=re.compile(rf"(?:[\w.+-]+@)?(?:{'|'.join(hosts)})(?::\d{{2,5}}\b)?|{MAIL}"),
        )

    def redact(self, text: str, where: str, *, quoted: bool = False) -> str:
        """The text with paths by their last part and without host names; `quoted` strings are read as JSON's.

        Raises InputError, naming `where` and not the secret, for a text with one, and for a path or host in a writing
        that cannot be taken out of.
        """
        for told in readings(text):
            self._refuse_secrets(told, where)

        @cache
        def public(part: str) -> str:
            return self._without_literal(part) if part.startswith('"') else self._without(part)

        text = _LITERAL.sub(lambda match: public(match[0]), text) if quoted else self._without(text)
        self.check(text, where, quoted=quoted)
        return text

    def _without_literal(self, literal: str) -> str:
        try:
            value = json.loads(literal)
        except ValueError:
            return self._without(literal)
        public = _last_part(value) if VALUE.fullmatch(value) else value
        public = self._without(public)
        return literal if public == value else json.dumps(public, ensure_ascii=False)

    def _without(self, text: str) -> str:
        # Numbers of a journal.
        if not _SAYING.search(text):
            return text
        for marks, pattern in ((("",), self.folders), *PATHS):
            if any(mark in text for mark in marks):
                text = pattern.sub(lambda match: match[0] if match[1] else _last_part(match[0]), text)
        return self.hosts.sub("host", text)

    def check(self, text: str, where: str, remedy: str = "remove it there.", *, quoted: bool = False) -> None:
        """Raise InputError for a text, which is not changed, with a secret, or a path or host of a person's."""
        for told in readings(_unescaped(text) if quoted else text):
            self._refuse_secrets(told, where)
            if found := self._find(told):
                raise InputError(f"{where} has {found!r:.60} in it, which would be published: {remedy}")

    def _find(self, text: str) -> str:
        """The first path or host in a text that is not changed, or ""."""
        if found := _first_match(self.own, text.lower(), text):
            return found
        # The rest of an address on the web is nobody's.
        text = _OF_URL.sub(r"\1", text) if "://" in text else text
        address = re.search(IPV4, text) if _FOUR_NUMBERS.search(text) else None
        return address[0] if address else _first_match(PERSONAL, text, text)

    def check_rows(self, texts: Iterable[str], where: str, first: int = 0) -> None:
        """Raise InputError, naming the row, for one that `check` refuses; `first` is the number of the first."""
        rows = list(texts)
        try:
            self.check("\n\0\n".join(dict.fromkeys(rows)), where)
        except InputError:
            remedy = "leave the row's question out of the training set, or publish without the ledger (--no-ledger)."
            for row, text in enumerate(rows, first):
                self.check(text, f"{where}, row {row}", remedy)
            raise

    def _refuse_secrets(self, text: str, where: str) -> None:
        own = next((name for form, name in self.variables.items() if form in text), "")
        long = "\n".join(_LONG.findall(text))
        if own or (found := _first_match(LOOKS, long, long) or _first_match(SENTENCES, text, text)):
            which = f", the value of {own}" if own else f" that begins with {found[:4]!r}"
            remedy = "Remove it there, and replace it where it is valid"
            raise InputError(f"{where} holds a secret{which}: nothing was published. {remedy}.")


def _first_match(rules: Rules, marked: str, text: str) -> str:
    for marks, pattern in rules:
        if any(mark in marked for mark in marks) and (match := pattern.search(text)):
            return match[0]
    return ""


def _any_of(names: Iterable[str]) -> str:
    """Pattern of any of the names, the longest first; of no names it matches nothing."""
    listed = sorted(names, key=len, reverse=True)
    return f"(?:{'|'.join(map(re.escape, listed)) or '(?!)'})"


def _whole(pattern: str) -> str:
    """Pattern of what is no part of a longer word; a hyphen or an underscore ends a word."""
    return f"(?<![A-Za-z0-9]){pattern}(?![A-Za-z0-9])"


def _written_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Origin of each secret, by what it is looked for as: itself, and its bytes in hexadecimal digits."""
    from huggingface_hub import get_token

    secrets = {get_token() or "": "HF_TOKEN"}
    for name, value in environment.items():
        if SECRET_NAME.search(name):
            secrets |= dict.fromkeys((value, *value.splitlines()), name)
        secrets |= dict.fromkeys((password for password in re.findall(r"://[^\s/:@]*:([^\s/@]+)@", value)), name)
    long = {secret: name for secret, name in secrets.items() if len(secret.strip()) >= LEAST_SECRET}
    # Every other way to write one is read before it is looked for.
    hexadecimal = {secret: secret.encode(errors="surrogateescape").hex() for secret in long}
    return {form: long[s] for s, hex in hexadecimal.items() for form in (s, hex, hex.upper())}


def _host_pattern(environment: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    """Marks and pattern of this machine's names, in any letters where they are no plain word, and of its domain.

    A word that the settings have as well is no name: it would be taken out of every file.
    """
    nodes = {platform.node(), *(environment.get(name, "") for name in ("HOSTNAME", "SLURMD_NODENAME", "HOST"))}
    own = set(re.findall(r"[a-z]+", repr(Config()).lower())) | {"localhost"}
    hosts = {host for node in nodes for host in (node, node.partition(".")[0]) if len(host) >= LEAST_HOST}
    hosts = {host for host in hosts if host.lower() not in own}
    words = {form for host in hosts if host.isalpha() for form in (host, host.lower(), host.upper())}
    domains = {node.partition(".")[2] for node in nodes} - {""}
    below = rf"(?:[\w-]+\.)+{_any_of(domains)}"
    pattern = _whole(rf"(?:(?i:{below}|{_any_of(hosts - words)})|{_any_of(words)})")
    return tuple(name.lower() for name in (*hosts, *domains)), pattern


def _last_part(path: str) -> str:
    """The last part of a path; `~` for the home of somebody, whose last part is a name."""
    parts = [part for part in re.split(r"[\\/]+", path) if part]
    whose = len(parts) > 1 and parts[-2] in ("home", "Users")
    return "~" if not parts or whose or parts[-1] in (Path.home().name, "..") or parts[-1][0] == "~" else parts[-1]
