"""Addresses and messages of a store, in the form that may be shown and kept."""

import pytest

from runner.config.passwords import hide_password, password_to_fill_in, without_password


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://host:5000", "http://host:5000"),
        ("https://me:a%20word@host/x", "https://host/x"),
        ("postgresql://me@host:5432/runs", "postgresql://host:5432/runs"),
        ("postgresql:///runs?password=a%20word&x=1", "postgresql:///runs?password=***&x=1"),
        ("sqlite:////a/b@c.db", "sqlite:////a/b@c.db"),
        ("sqlite:///outputs/a:b@c.db", "sqlite:///outputs/a:b@c.db"),
        ("http://host/x@y", "http://host/x@y"),
        # A password that no address may have, and that people type.
        ("postgresql://me:p/w#x?y@z@host:5432/db", "postgresql://host:5432/db"),
        ("postgresql://me@realm:p:w@host/db", "postgresql://host/db"),
        ("http://:pw@[::1]:5000", "http://[::1]:5000"),
        ("postgresql://host/db?SSLPassword=a@b", "postgresql://host/db?SSLPassword=***"),
        ("mysql://me:pw@host/db?x=1&Pwd=a#b", "mysql://host/db?x=1&Pwd=***"),
        ("https://host?access_token=a&x=1", "https://host?access_token=***&x=1"),
        ("databricks://profile", "databricks://profile"),
        ("outputs/runs", "outputs/runs"),
    ],
)
def test_a_uri_is_shown_without_its_password(uri: str, shown: str) -> None:
    assert without_password(uri) == shown == without_password(shown)


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("postgresql://me:p/w@host/db?x=1", "postgresql://me:PASSWORD@host/db?x=1"),
        (
            "postgresql://host/db?user=me&password=a",
            "postgresql://host/db?user=me&password=PASSWORD",
        ),
        # Users without a password in it keep it elsewhere, as in ~/.pgpass.
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("sqlite:////a/b.db", "sqlite:////a/b.db"),
    ],
)
def test_a_command_shows_where_the_password_goes(uri: str, shown: str) -> None:
    assert password_to_fill_in(uri) == shown


@pytest.mark.parametrize(
    ("uri", "message", "shown"),
    [
        ("postgresql://me:a%20b@host/db", "no a%20b, and no 'a b'", "no ***, and no '***'"),
        ("postgresql://me:abc/d@host/db", "no port abc, nor 'abc/d'", "no port ***, nor '***'"),
        ("postgresql://me:a@nowhere:9@host/db", "no host nowhere", "no host ***"),
        ("postgresql://me@host/db?sslpassword=a+b", "a+b is not a b", "*** is not ***"),
    ],
)
def test_a_message_of_the_store_has_no_password_either(uri: str, message: str, shown: str) -> None:
    assert hide_password(message, uri) == shown


def test_a_message_without_a_password_is_unchanged() -> None:
    for uri in ("http://host:5000", "postgresql://me@host", "postgresql://me:@host?password="):
        assert hide_password("me at host: no such table", uri) == "me at host: no such table"
