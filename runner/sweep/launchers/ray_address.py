"""The address of a Ray cluster, and a check that it answers: Ray itself would retry for long."""

import os
import socket
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from fxpart.errors import SpecError

__all__ = ["LOCAL", "address_of", "answers_http2", "check_address"]

LOCAL = "local"
"""The address of a cluster started on this machine for the sweep."""
_CLIENT = "ray://"
_CONNECT_S = 5.0
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS = 4


def address_of(init: Mapping[str, Any]) -> str:
    """Return the address of the cluster from the `init` settings or the environment."""
    return str(init.get("address") or os.environ.get("RAY_ADDRESS") or LOCAL)


def check_address(address: str) -> None:
    """Check that an address is valid and that a Ray server answers there.

    Raises:
        SpecError: if not, or if the address needs Ray's client, which is not installed.

    """
    host, colon, port = address.removeprefix(_CLIENT).rpartition(":")
    if not colon or not port.isdigit() or not 0 < int(port) < 2**16 or "/" in host:
        if address in (LOCAL, "auto"):
            return
        raise SpecError(
            f"hydra.launcher.init.address={address} is not an address; write host:6379, "
            "ray://host:10001, auto or local"
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
    """Return None if a server at the port speaks HTTP/2, as Ray's do, or an error message."""
    try:
        # IPv6 addresses are in brackets.
        with socket.create_connection((host.strip("[]"), port), timeout=_CONNECT_S) as connection:
            connection.sendall(_HTTP2_HELLO)
            header = connection.recv(4, socket.MSG_WAITALL)
    except OSError as error:
        return error.strerror or str(error)
    return None if header[3:4] == bytes([_SETTINGS]) else "a service other than Ray answers there"
