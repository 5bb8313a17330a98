"""`TrustedHosts`: which names a request may have called the server by, against DNS rebinding.

A web page can point its own domain at 127.0.0.1 and then call a server there as if it were its own, past the browser's
rules for foreign sites; what gives it away is the Host header, which still holds its domain. So a server that only this
machine can reach, and that asks for no key, answers to the names of this machine alone. The forms of names are those of
starlette's TrustedHostMiddleware, which reads no IPv6 addresses and does not speak JSON.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from nanoinfer.entrypoints.openai.config import ServerConfig

ANY = "*"


def is_loopback(host: str) -> bool:
    """Whether a name or address (IPv6: also in brackets) means this machine and no other."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


class TrustedHosts:
    """names: beside those of loopback; "*.example.com" is every name below, "*" is all."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {_normal(name) for name in names}
        self._endings = tuple(name[1:] for name in self._names if name.startswith("*."))

    @classmethod
    def of(cls, config: ServerConfig) -> TrustedHosts:
        """Those that were named, or all where the check would not protect anything."""
        is_exposed = config.uds is None and not config.api_key and is_loopback(config.host)
        if not config.allowed_hosts and not is_exposed:
            return cls([ANY])
        return cls([*config.allowed_hosts, config.host])

    def trusts(self, header: bytes | None) -> bool:
        """header: of the request, `name` or `name:port`. Browsers always send it, so one without it is no attack."""
        if header is None or ANY in self._names:
            return True
        name = _normal(_without_port(header.decode("latin-1")))
        return is_loopback(name) or name in self._names or name.endswith(self._endings)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def _normal(name: str) -> str:
    return name.strip().lower().removesuffix(".").removeprefix("[").removesuffix("]")
