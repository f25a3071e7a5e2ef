"""Redact the passwords in tracking URIs, or replace them by placeholders."""

import re
from urllib.parse import unquote, unquote_plus

__all__ = ["hide_password", "password_to_fill_in", "without_password"]

_SECRET = re.compile(
    r"(?<=[?&;])([^=&?;]*(?:password|passwd|passphrase|pwd|token|secret)=)([^&]*)", re.IGNORECASE
)
"""A password in a query, such as ``sslpassword=word``."""
_LOGIN = re.compile(r"(?<=://)(?P<user>[^:/?#]*)(?::(?P<word>.*))?@(?=[^@]*$)", re.DOTALL)
"""User and password, up to the last @: an unquoted password may contain any of / # ? @."""


def without_password(uri: str) -> str:
    """Return a tracking URI without password and user, safe to show and store.

    If a URI is ambiguous, it removes too much rather than too little.
    """
    shown = _SECRET.sub(r"\1***", uri)
    login = _LOGIN.search(shown)
    if login is None:
        return shown
    return shown[: login.start()] + shown[login.end() :]


def password_to_fill_in(uri: str) -> str:
    """Return a tracking URI with the placeholder PASSWORD, for a command to be completed."""
    shown = _SECRET.sub(r"\1PASSWORD", uri)
    login = _LOGIN.search(shown)
    if login is None or not login["word"]:
        return shown
    return f"{shown[: login.start('word')]}PASSWORD{shown[login.end('word') :]}"


def hide_password(text: str, uri: str) -> str:
    """Return `text`, such as a store's own message, without the passwords of `uri`."""
    login = _LOGIN.search(_SECRET.sub(r"\1***", uri))
    secrets = [match[2] for match in _SECRET.finditer(uri)]
    if login and login["word"]:
        # A library that parses the URI may take part of the password for a host or a port.
        parts = re.split(r"[/:#?@]", login["word"])
        secrets += [login["word"], *(part for part in parts if len(part) > 2)]
    # Quoted and unquoted, longest first.
    spellings = {spell(word) for word in secrets if word for spell in (str, unquote, unquote_plus)}
    for word in sorted(spellings, key=lambda word: (-len(word), word)):
        text = text.replace(word, "***")
    return text
