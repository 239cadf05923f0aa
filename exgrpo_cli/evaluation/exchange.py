"""One request to a server that is not trusted: so many bytes and seconds at most, and no way to another server.

The bounds hold for the reply as a whole, head and body, however slowly or endlessly it comes. What goes with a request
(questions, a key) reaches the server that the user named and no other.
"""

import base64
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from functools import partial
from http.client import HTTPException, HTTPResponse
from typing import Any

from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.base.output import printable

_LEAST_PIECE = 6
"""Characters of a key that tell of it."""
_LONGEST_PART = 16
"""Characters of a part of an address; a longer one may be a key."""
_LOOKED_AT, _SHOWN = 4096, 200
"""Characters of a server's text that are looked at for a message, and shown."""


class MayPass(Exception):
    """An attempt failed, in words; the next one may not."""

    pause = 0.0
    """Seconds that the server wants to be left alone."""


def checked_address(url: str) -> str:
    """An address without a closing `/`.

    Raises InputError unless it is one of http or https with a host and, where it has one, a port, and nothing else: a
    key in it would be stored and shown with it.
    """
    if re.search("[@?#]", url):
        more = "more than an address (a user before an @, or a part from ? or # on)"
        raise InputError(f"--endpoint holds {more}: leave it out, and put a key into OPENAI_API_KEY.")
    try:
        parts = urllib.parse.urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or re.search(r"[^!-~]", url):
        form = "it begins with http:// or https://, as in http://localhost:8000"
        raise InputError(f"--endpoint {shown_address(url)!r} is no address: {form}.")
    return url.rstrip("/")


def shown_address(url: str) -> str:
    """An address as it may be stored and shown: a long part of its path, which may be a key, is left out."""
    begin, slashes, rest = url.partition("://")
    host, *path = rest.split("/")
    return "/".join([begin + slashes + host, *(part if len(part) < _LONGEST_PART else "***" for part in path)])


def checked_key(key: str | None) -> str | None:
    """A key without white space around it; raises InputError where no header can hold it, without showing it."""
    key = (key or "").strip()
    if not re.fullmatch(r"[ -~]*", key):
        raise InputError("OPENAI_API_KEY holds a character that no header may hold: set it again.")
    return key or None


def without_key(text: str, key: str | None) -> str:
    """A server's text without the key or a piece of it, plain or in a usual code, as one printable line."""
    text = " ".join(printable(text).split())
    hidden = bytearray(len(text))
    for form in _forms(key) if key else ():
        size = min(len(form), _LEAST_PIECE)
        for piece in {form[at : at + size] for at in range(len(form) - size + 1)}:
            for found in re.finditer(f"(?={re.escape(piece)})", text, re.IGNORECASE):
                hidden[found.start() : found.start() + size] = b"\x01" * size
    return re.sub("\0+", "***", "".join("\0" if hide else char for char, hide in zip(text, hidden, strict=True)))


def _forms(key: str) -> set[str]:
    """The key as it is, in hexadecimal digits, in an address, and in base64 after any number of bytes."""
    codes = (base64.b64encode(b" " * shift + key.encode()).decode()[(0, 2, 3)[shift] : -4] for shift in range(3))
    return {key, key.encode().hex(), urllib.parse.quote(key, safe=""), *(code for code in codes if code)}


def said(text: str, key: str | None) -> str:
    """A server's text as it may be shown."""
    return without_key(text[:_LOOKED_AT], key).strip()[:_SHOWN]


def ask(url: str, body: bytes | None, *, key: str | None, seconds: float, max_bytes: int) -> tuple[int, Any, bytes]:
    """Status, headers and body of the reply to a GET, or with a `body` to a POST of JSON, whatever the status.

    Raises RunError for a redirect that leaves the server (scheme, host and port), for any of a POST, and for too many
    bytes; MayPass where there is no reply, or no whole one in time.
    """
    exchange = _Exchange(shown_address(url), key, seconds, max_bytes)
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    if key:
        # Goes along where the server redirects: that can only be to itself.
        request.add_header("Authorization", f"Bearer {key}")
    try:
        try:
            reply = urllib.request.build_opener(exchange).open(request, timeout=seconds)
        except urllib.error.HTTPError as error:
            reply = error
        return reply.status, reply.headers, reply.read(max_bytes)
    except (OSError, HTTPException, ValueError) as error:
        # Its own words hold the server's, and would be shown by `--debug`.
        reason = getattr(error, "reason", None) or error
        why = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        if isinstance(reason, TimeoutError):
            why = f"timed out: no whole answer in {seconds:g} s (see --timeout)"
        raise MayPass(said(why, key)) from None
    finally:
        for opened in exchange.replies:
            opened.close()


class _Exchange(urllib.request.HTTPSHandler, urllib.request.HTTPHandler, urllib.request.HTTPRedirectHandler):
    """Bounds of a request, redirects included: the moment at which all must have come, the bytes left, one server."""

    def __init__(self, server: str, key: str | None, seconds: float, max_bytes: int) -> None:
        super().__init__()
        self.server, self.key, self.max_bytes = server, key, max_bytes
        self.until, self.left = time.monotonic() + seconds, max_bytes
        self.replies: list[HTTPResponse] = []

    def do_open(self, http_class: Any, req: Any, **given: Any) -> Any:
        """See `AbstractHTTPHandler.do_open`."""

        def begin(sock: Any, **named: Any) -> HTTPResponse:
            self.replies.append(reply := HTTPResponse(sock, **named))
            raw: Any = reply.fp.raw
            raw.readinto = partial(self._readinto, sock, raw.readinto)
            return reply

        def connect(*places: Any, **named: Any) -> Any:
            connection = http_class(*places, **named)
            connection.response_class = begin
            return connection

        return super().do_open(connect, req, **given)

    def redirect_request(self, request: Any, reply: Any, code: int, words: str, headers: Any, url: str) -> Any:
        """See `HTTPRedirectHandler`. Raises RunError."""
        # Taken apart as the request itself will be; behind a proxy a request's own host is the proxy.
        before, after = (urllib.request.Request(each) for each in (request.full_url, url))
        if request.data is not None or (before.type, before.host) != (after.type, after.host):
            elsewhere = f"{said(url, self.key)}, and they go to --endpoint alone"
            raise RunError(f"{self.server} sends requests on to {elsewhere}: name that address if it is the right one.")
        return super().redirect_request(request, reply, code, words, headers, url)

    def _readinto(self, sock: Any, read: Callable[[Any], int], buffer: Any) -> int:
        """Read what there is of a reply, in place of `read`. Raises TimeoutError or RunError at a limit."""
        seconds = self.until - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        sock.settimeout(seconds)
        count = read(buffer)
        self.left -= count
        if self.left < 0:
            much = f"{self.max_bytes / 1e6:.1f} MB as one answer, more than --max-tokens can be"
            raise RunError(f"{self.server} sends more than {much}: is --endpoint its address?")
        return count
