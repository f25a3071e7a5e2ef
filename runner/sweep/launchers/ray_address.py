"""The address of a Ray cluster, and whether a server answers there: Ray would retry for long."""

import os
import socket
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from fxpart.errors import SpecError

__all__ = ["LOCAL", "address_of", "answers_http2", "check_address"]

LOCAL = "local"
"""Stands for a cluster that is started on this machine for the sweep."""
_CLIENT = "ray://"
_CONNECT_S = 5.0
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS = 4


def address_of(init: Mapping[str, Any]) -> str:
    """Return where the cluster is that `init` of the settings, or the environment, names."""
    return str(init.get("address") or os.environ.get("RAY_ADDRESS") or LOCAL)


def check_address(address: str) -> None:
    """Refuse an address that cannot be read, or at which no server answers.

    Raises:
        SpecError: in one line.

    """
    host, colon, port = address.removeprefix(_CLIENT).rpartition(":")
    if not colon or not port.isdigit() or not 0 < int(port) < 2**16 or "/" in host:
        if address in (LOCAL, "auto"):
            return
        raise SpecError(
            f"hydra.launcher.init.address={address} is no address; write host:6379,"
            " ray://host:10001, auto or local"
        )
    if address.startswith(_CLIENT) and find_spec("grpc") is None:
        raise SpecError(
            f"hydra.launcher.init.address={address} needs Ray's client, which is not installed; pip"
            " install 'ray[client]', or write the address of the cluster itself, such as host:6379"
        )
    wrong = answers_http2(host, int(port))
    if wrong:
        raise SpecError(
            f"no Ray cluster at {address}: {wrong}; start one with `ray start --head`, or leave"
            " hydra.launcher.init.address out to have one started here"
        )


def answers_http2(host: str, port: int) -> str | None:
    """Return None if a server at the port speaks HTTP/2, as Ray's do, else what is wrong."""
    try:
        # An IPv6 address stands in brackets.
        with socket.create_connection((host.strip("[]"), port), timeout=_CONNECT_S) as connection:
            connection.sendall(_HTTP2_HELLO)
            header = connection.recv(4, socket.MSG_WAITALL)
    except OSError as error:
        return error.strerror or str(error)
    return None if header[3:4] == bytes([_SETTINGS]) else "what answers there is something else"
