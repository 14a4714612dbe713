"""TCP between the processes of a launch on several machines: who may speak, and under which address.

    caller: Door ◄── agent of node 0: dial        both prove that they know the launch's secret, before
    node 0: Door ◄── agent of node k: dial        a byte of anything else is looked at

The secret itself never travels. The door sends a nonce; who dials answers with a nonce and a digest over both, compared
in constant time; the door answers with a digest of its own, so that an agent never takes work from a stranger who
happens to listen on that port. A door never blocks: it is one more descriptor in its owner's selector.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from airdist.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Door", "LinkError", "dial", "interface_of", "own_addresses"]

_NONCE = 32
_DIGEST = hashlib.sha256().digest_size
_PROOF_SECONDS = 10.0
_STRANGERS = 64  # connections that have not proved themselves yet; all others wait in the backlog
_PATIENCE_SECONDS = 1.0  # an agent answers within a round trip; who takes longer has to make room if need be
_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 0.2
_BACKLOG = 4096
_SIOCGIFADDR = 0x8915


class LinkError(ConnectionError):
    """Nobody who knows the secret answers at any of the addresses."""


def _digest(secret: str, side: bytes, *nonces: bytes) -> bytes:
    return hmac.new(secret.encode(), side + b"".join(nonces), hashlib.sha256).digest()


@dataclass
class _Stranger:
    sock: socket.socket
    since: float
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(_NONCE))
    inbox: bytes = b""


class Door:
    """A listening socket that lets in only who knows the secret.

    Strangers are few at any time, so that they cannot use up the descriptors of this process. When there is no place,
    whoever has been silent for a while gives theirs up; until somebody has, the next wait outside, unlistened to.

    Args:
        secret: that of the launch.
        port: 0 for one that the system chooses.
    """

    def __init__(self, secret: str, *, port: int = 0) -> None:
        self._secret = secret
        self._listener = socket.create_server(("", port), backlog=_BACKLOG)
        self._listener.setblocking(False)  # noqa: FBT003 - the parameter has no other name
        self._strangers: dict[int, _Stranger] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    @property
    def port(self) -> int:
        """Where it listens, on all addresses of this machine."""
        port: int = self._listener.getsockname()[1]
        return port

    def fileno(self) -> int:
        """A descriptor that is readable when `admit` has something to do, besides what time brings."""
        return self._selector.fileno()

    def admit(self) -> list[Channel]:
        """Serve whoever stands at the door, and return those that have just proved themselves. Never blocks.

        Call it about every second also when nothing is readable: silent strangers are shown out by the clock.
        """
        admitted = []
        for key, _ in self._selector.select(0):
            stranger = self._strangers.get(key.fd)
            if stranger is not None and (channel := self._hear(stranger)) is not None:
                admitted.append(channel)
        while self._show_out(_PROOF_SECONDS):
            pass
        self._accept()
        return admitted

    def close(self) -> None:
        """Let nobody in any more; channels of those who are in stay open."""
        for stranger in list(self._strangers.values()):
            self._forget(stranger).close()
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        while len(self._strangers) < _STRANGERS or self._overdue(_PATIENCE_SECONDS):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:  # nobody is outside any more
                self._listen(on=True)
                return
            except OSError:  # there is no descriptor left
                if self._show_out(_PATIENCE_SECONDS):
                    continue
                break
            if len(self._strangers) >= _STRANGERS:
                self._show_out(_PATIENCE_SECONDS)
            sock.setblocking(False)  # noqa: FBT003 - as above
            stranger = _Stranger(sock, time.monotonic())
            self._strangers[sock.fileno()] = stranger
            self._selector.register(sock, selectors.EVENT_READ)
            with suppress(OSError):
                sock.send(stranger.nonce)
        self._listen(on=False)  # else whoever waits outside would wake the owner again and again; `admit` looks anyway

    def _listen(self, *, on: bool) -> None:
        if on and self._listener not in self._selector.get_map():
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif not on and self._listener in self._selector.get_map():
            self._selector.unregister(self._listener)

    def _overdue(self, seconds: float) -> _Stranger | None:
        """The one that has been here longest, if that is longer than `seconds`."""
        oldest = next(iter(self._strangers.values()), None)  # a dict keeps the order of arrival
        return oldest if oldest is not None and time.monotonic() - oldest.since > seconds else None

    def _show_out(self, seconds: float) -> bool:
        """Close the connection of the one that has been here longest, if that is longer than `seconds`."""
        overdue = self._overdue(seconds)
        if overdue is not None:
            self._forget(overdue).close()
        return overdue is not None

    def _hear(self, stranger: _Stranger) -> Channel | None:
        try:
            data = stranger.sock.recv(_NONCE + _DIGEST - len(stranger.inbox))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        stranger.inbox += data
        if data and len(stranger.inbox) < _NONCE + _DIGEST:
            return None
        sock = self._forget(stranger)
        nonce, proof = stranger.inbox[:_NONCE], stranger.inbox[_NONCE:]
        if not hmac.compare_digest(proof, _digest(self._secret, b"dials", stranger.nonce, nonce)):
            sock.close()
            return None
        with suppress(OSError):  # then the first read says so
            sock.send(_digest(self._secret, b"listens", nonce, stranger.nonce))
        _watch_the_wire(sock)
        return Channel(sock)

    def _forget(self, stranger: _Stranger) -> socket.socket:
        self._selector.unregister(stranger.sock)
        del self._strangers[stranger.sock.fileno()]
        return stranger.sock


def dial(addresses: Sequence[tuple[str, int]], secret: str, *, seconds: float) -> Channel:
    """Connect to the first of `addresses` where somebody knows the secret; the channel blocks.

    All are tried again and again, since the other side may not be there yet.

    Raises:
        LinkError: when nobody has answered within `seconds`; it names every address and what was found there.
    """
    deadline = time.monotonic() + seconds
    while True:
        found = {}
        for host, port in addresses:
            answer = _connect(host, port, secret)
            if isinstance(answer, Channel):
                return answer
            found[f"{host}:{port}"] = answer
        if time.monotonic() + _RETRY_SECONDS >= deadline:
            tried = "; ".join(f"{address}: {error}" for address, error in found.items())
            raise LinkError(f"no answer within {seconds:g} s ({tried})")
        time.sleep(_RETRY_SECONDS)


def _connect(host: str, port: int, secret: str) -> Channel | str:
    """A channel to whoever proves to know the secret there, or why there is none."""
    sock: socket.socket | None = None
    try:
        sock = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
        sock.settimeout(_PROOF_SECONDS)
        theirs, nonce = _exactly(sock, _NONCE), secrets.token_bytes(_NONCE)
        sock.sendall(nonce + _digest(secret, b"dials", theirs, nonce))
        if not hmac.compare_digest(_exactly(sock, _DIGEST), _digest(secret, b"listens", nonce, theirs)):
            raise ConnectionError("somebody else listens there")
        sock.settimeout(None)
        _watch_the_wire(sock)
    except OSError as error:
        if sock is not None:
            sock.close()
        return str(error)
    return Channel(sock)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionError("it hung up: another launch, or another program")
        data += part
    return data


def _watch_the_wire(sock: socket.socket) -> None:
    """Have the kernel notice a machine that is gone; it answers for a process that is merely suspended."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def own_addresses() -> list[str]:
    """Addresses under which others may reach this machine, the likeliest first.

    `AIRDIST_ADDRESS` (an address, a host name or an interface) comes before all; then the source address of the
    default route, the interfaces in the kernel's order and, for agents on this very machine, the loopback.
    """
    interfaces = _interfaces()
    chosen = os.environ.get("AIRDIST_ADDRESS", "")
    found = [interfaces.get(chosen, chosen), _default_route(), *interfaces.values(), "127.0.0.1"]
    return list(dict.fromkeys(filter(None, _loopback_last(found))))


def interface_of(address: str) -> str | None:
    """The name of the network interface that has this address, or None."""
    return next((name for name, found in _interfaces().items() if found == address), None)


def _loopback_last(addresses: Iterable[str]) -> list[str]:
    first, *others = addresses
    return [first, *sorted(others, key=lambda address: address.startswith("127."))]


def _default_route() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # a datagram socket sends nothing when it is connected
        address: str = probe.getsockname()[0]
        return address
    return ""


def _interfaces() -> dict[str, str]:
    """IPv4 address by name of interface."""
    if sys.platform != "linux":
        return {"lo0": "127.0.0.1"}
    import fcntl  # noqa: PLC0415 - not everywhere

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found
