"""A door lets in who knows the secret, and nobody else gets as far as a message."""

import contextlib
import os
import resource
import select
import selectors
import socket
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from airdist.channel import Channel
from airdist.link import Door, LinkError, dial, interface_of, own_addresses
from airdist.peers import Peers
from airdist.pulse import Pulse
from airdist.rundir import RunDirectory
from airdist.spec import AgentSpec

SECRET = "s" * 64


class Porter:
    """Serves a door in a thread of its own, as an agent's loop would."""

    def __init__(self, door):
        self.door, self.admitted, self.stop = door, [], threading.Event()
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self):
        with selectors.DefaultSelector() as selector:
            selector.register(self.door, selectors.EVENT_READ)
            while not self.stop.is_set():
                selector.select(0.05)
                self.admitted += self.door.admit()

    def close(self):
        self.stop.set()
        self.thread.join()
        self.door.close()


@pytest.fixture
def porter():
    porter = Porter(Door(SECRET))
    yield porter
    porter.close()


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_two_sides_that_know_the_secret_talk(porter):
    channel = dial([("127.0.0.1", porter.door.port)], SECRET, seconds=30)
    channel.send("hello", data=b"\n{bytes}\n", number=1)
    wait_until(lambda: porter.admitted)
    (other,) = porter.admitted
    assert other.receive() == [{"kind": "hello", "number": 1, "data": b"\n{bytes}\n"}]
    assert channel.addresses == ("127.0.0.1", "127.0.0.1")


def test_a_wrong_secret_is_turned_away_and_told_apart_from_nobody(porter):
    with pytest.raises(LinkError, match="hung up: another launch, or another program"):
        dial([("127.0.0.1", porter.door.port)], "t" * 64, seconds=0.5)
    assert not porter.admitted


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.0\r\n\r\n", b"\0" * 64, b'{"kind":"hello","node":0}\n' * 20])
def test_a_stranger_gets_a_nonce_and_nothing_more(porter, said):
    with socket.create_connection(("127.0.0.1", porter.door.port), timeout=30) as stranger:
        assert len(stranger.recv(100)) == 32
        stranger.sendall(said)
        if len(said) >= 64:
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
    assert dial([("127.0.0.1", porter.door.port)], SECRET, seconds=30)
    wait_until(lambda: porter.admitted)
    assert len(porter.admitted) == 1


def test_a_proof_that_was_overheard_is_worth_nothing_the_next_time(porter):
    overheard = {}

    class Tap(threading.Thread):
        def __init__(self):
            super().__init__()
            self.listener = socket.create_server(("127.0.0.1", 0))

        def run(self):
            inner, _ = self.listener.accept()
            with inner, socket.create_connection(("127.0.0.1", porter.door.port)) as outer:
                inner.sendall(outer.recv(32))
                overheard["proof"] = inner.recv(64)
                outer.sendall(overheard["proof"])
                inner.sendall(outer.recv(32))

    tap = Tap()
    tap.start()
    dial([tap.listener.getsockname()[:2]], SECRET, seconds=30)
    tap.join()
    tap.listener.close()
    with socket.create_connection(("127.0.0.1", porter.door.port), timeout=30) as again:
        again.recv(32)
        again.sendall(overheard["proof"])
        assert again.recv(32) == b""


def test_who_dials_takes_no_orders_from_one_who_does_not_know_the_secret():
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def pretend():
            sock, _ = impostor.accept()
            with sock:
                sock.sendall(b"n" * 32)
                sock.recv(64)
                sock.sendall(b"d" * 32)

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(LinkError, match="somebody else listens there"):
            dial([impostor.getsockname()[:2]], SECRET, seconds=0.1)
        thread.join()


def test_every_address_is_tried_until_one_answers(porter, free_ports):
    (dead,) = free_ports(1)
    assert dial([("127.0.0.1", dead), ("127.0.0.1", porter.door.port)], SECRET, seconds=30)
    with pytest.raises(LinkError, match=rf"no answer within 0.1 s \(127.0.0.1:{dead}: .*refused"):
        dial([("127.0.0.1", dead)], SECRET, seconds=0.1)


def test_who_dials_waits_for_a_door_that_opens_later(free_ports):
    (port,) = free_ports(1)
    found = []
    thread = threading.Thread(target=lambda: found.append(dial([("127.0.0.1", port)], SECRET, seconds=60)))
    thread.start()
    porter = Porter(Door(SECRET, port=port))
    thread.join()
    porter.close()
    assert found


@pytest.fixture
def clock(monkeypatch):
    """The time at the door."""
    clock = [100.0]
    monkeypatch.setattr("airdist.link.time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


@pytest.fixture
def knock():
    """Make a connection to a door, and say nothing."""
    with contextlib.ExitStack() as opened:

        def knock(door):
            sock = opened.enter_context(socket.create_connection(("127.0.0.1", door.port), timeout=30))
            sock.setblocking(False)
            return sock

        yield knock


def wakes(door):
    return bool(select.select([door], [], [], 0)[0])


def said(sock):
    """What the door has said: all there is, then None while the connection lasts."""
    try:
        return sock.recv(100)
    except BlockingIOError:
        return None


def test_silent_strangers_keep_an_agent_waiting_but_not_out_and_take_few_descriptors(porter, knock):
    before = psutil.Process().num_fds()
    strangers = [knock(porter.door) for _ in range(200)]
    assert dial([("127.0.0.1", porter.door.port)], SECRET, seconds=60)
    wait_until(lambda: porter.admitted)
    assert psutil.Process().num_fds() - before - len(strangers) < 80


def test_one_who_has_just_come_is_no_victim_and_those_outside_wake_nobody(clock, knock):
    door = Door(SECRET)
    inside = [knock(door) for _ in range(64)]
    outside = [knock(door) for _ in range(3)]
    door.admit()
    assert [len(said(sock)) for sock in inside] == [32] * 64
    assert [said(sock) for sock in inside + outside] == [None] * 67
    assert not wakes(door)
    inside[5].sendall(b"\0" * 64)  # one place becomes free
    assert wakes(door)
    door.admit()
    assert [len(said(sock) or b"") for sock in outside] == [32, 0, 0]
    assert not wakes(door)
    clock[0] += 2
    door.admit()
    assert [len(said(sock)) for sock in outside[1:]] == [32] * 2
    assert [said(sock) for sock in inside[:5]] == [b"", b"", None, None, None]
    door.close()


def test_without_descriptors_the_door_rests_and_goes_on_when_there_are_some(knock):
    door = Door(SECRET)
    outside = knock(door)
    limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(psutil.Process().num_fds() + 200, limits[1]), limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(outside.fileno()))
        assert wakes(door)
        assert door.admit() == []
        assert not wakes(door)
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    door.admit()
    assert len(said(outside)) == 32
    door.close()


def test_a_leader_shows_silent_strangers_out_though_nobody_else_comes(clock, knock, tmp_path):
    door, (ours, _theirs) = Door(SECRET), socket.socketpair()
    with selectors.DefaultSelector() as selector:
        spec = AgentSpec(str(tmp_path), 1, str(tmp_path), nodes=2)
        peers = Peers(spec, door, selector, Channel(ours), RunDirectory(tmp_path))
        stranger = knock(door)
        door.admit()
        assert len(said(stranger)) == 32
        clock[0] += 11
        assert not selector.select(0)
        peers.serve()
        assert said(stranger) == b""
    door.close()


def test_addresses_of_this_machine_have_an_interface_and_the_loopback_comes_last(monkeypatch):
    monkeypatch.delenv("AIRDIST_ADDRESS", raising=False)
    addresses = own_addresses()
    assert addresses[-1] == "127.0.0.1"
    assert all(interface_of(address) for address in addresses)
    assert interface_of("127.0.0.1") in ("lo", "lo0")
    assert interface_of("192.0.2.77") is None


@pytest.mark.parametrize(("chosen", "first"), [("10.9.8.7", "10.9.8.7"), ("lo", "127.0.0.1"), ("node-7", "node-7")])
def test_the_user_s_choice_of_address_or_interface_comes_first(monkeypatch, chosen, first):
    if chosen == "lo" and interface_of("127.0.0.1") != "lo":
        pytest.skip("the loopback has another name here")
    monkeypatch.setenv("AIRDIST_ADDRESS", chosen)
    assert own_addresses()[0] == first


def test_silence_counts_as_loss_only_while_this_side_was_listening(monkeypatch):
    one, other = socket.socketpair()
    one.setblocking(False)
    clock = [100.0]
    monkeypatch.setattr("airdist.pulse.time.monotonic", lambda: clock[0])
    channel, peer = Channel(one), Channel(other)
    pulse = Pulse(channel, 4.0)
    clock[0] += 3600  # suspended for an hour
    assert not pulse.lost()
    for _ in range(3):
        clock[0] += 1
        assert not pulse.lost()
    peer.send("beat")
    channel.receive()
    assert not pulse.lost()
    for _ in range(4):
        clock[0] += 1
        assert not pulse.lost()
    clock[0] += 1
    assert pulse.lost()


def test_a_pulse_beats_four_times_within_its_limit(monkeypatch):
    one, other = socket.socketpair()
    clock = [100.0]
    monkeypatch.setattr("airdist.pulse.time.monotonic", lambda: clock[0])
    pulse = Pulse(Channel(one), 8.0)
    for _ in range(64):
        clock[0] += 0.125
        pulse.beat()
    assert len(Channel(other).receive()) == 4


def test_messages_with_bytes_arrive_in_any_pieces():
    one, other = socket.socketpair()
    sender, receiver = Channel(one), Channel(other)
    sent = [("a", b""), ("b", b"\n\n"), ("c", None), ("d", os.urandom(50_000)), ("e", b'{"kind":"x"}\n')]
    raw = bytearray()
    for kind, data in sent:
        sender.send(kind, data=data)
    sender.close()
    while part := other.recv(1 << 16):
        raw += part
    third, fourth = socket.socketpair()
    receiver = Channel(fourth)
    received = []
    for start in range(0, len(raw), 997):
        third.sendall(raw[start : start + 997])
        received += receiver.receive()
    assert [(message["kind"], message.get("data")) for message in received] == sent
