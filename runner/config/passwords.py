"""Redact the passwords in tracking URIs, or mark where a person types them."""

import re
from urllib.parse import unquote, unquote_plus

__all__ = ["hide_password", "password_to_fill_in", "without_password"]

_SECRET = re.compile(
    r"(?<=[?&;])([^=&?;]*(?:password|passwd|passphrase|pwd|token|secret)=)([^&]*)", re.IGNORECASE
)
"""A password in a query, such as ``sslpassword=word``."""
_LOGIN = re.compile(r"(?<=://)(?P<user>[^:/?#]*)(?::(?P<word>.*))?@(?=[^@]*$)", re.DOTALL)
"""A user and a password, up to the last @: one that is not quoted may have any of / # ? @ in it."""


def without_password(uri: str) -> str:
    """Return a tracking URI as it may be shown and kept: without the password and the user.

    Of an address that can be read in two ways, rather too much is left out than a part of a
    password left in.
    """
    shown = _SECRET.sub(r"\1***", uri)
    login = _LOGIN.search(shown)
    if login is None:
        return shown
    return shown[: login.start()] + shown[login.end() :]


def password_to_fill_in(uri: str) -> str:
    """Return a tracking URI for a command that a person types: PASSWORD stands where it goes."""
    shown = _SECRET.sub(r"\1PASSWORD", uri)
    login = _LOGIN.search(shown)
    if login is None or not login["word"]:
        return shown
    return f"{shown[: login.start('word')]}PASSWORD{shown[login.end('word') :]}"


def hide_password(text: str, uri: str) -> str:
    """Return `text`, such as a store's own message, without the passwords of `uri`."""
    login = _LOGIN.search(_SECRET.sub(r"\1***", uri))
    words = [match[2] for match in _SECRET.finditer(uri)]
    if login and login["word"]:
        # Whoever takes the address apart finds a host or a port in it, and says so.
        parts = re.split(r"[/:#?@]", login["word"])
        words += [login["word"], *(part for part in parts if len(part) > 2)]
    # As it was given, and as it is read; the longest first.
    spelled = {one for word in words if word for one in (word, unquote(word), unquote_plus(word))}
    for word in sorted(spelled, key=lambda one: (-len(one), one)):
        text = text.replace(word, "***")
    return text
