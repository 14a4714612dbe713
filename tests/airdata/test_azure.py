"""Data and checkpoints on a real Azure Blob API server, through adlfs and through obstore."""

from __future__ import annotations

import os

import pytest

import airdata
from airdata.errors import SourceChangedError, TransferError, VolumeError
from airdata.transport import Retry, open_transport
from airdata.transport.object_store import ObjectTransport
from airdata.transport.parts import LARGE_BYTES, PART_BYTES
from airdata.transport.remote import FsspecTransport
from airdata.volume import Volume

QUICK = Retry(deadline=60, first_wait=0.01, longest_wait=0.1)


def adlfs(volume):
    return FsspecTransport(volume, QUICK)


def obstore(volume):
    return ObjectTransport(volume, QUICK, everywhere=True)


BOTH = pytest.mark.parametrize("kind", [adlfs, obstore])


@pytest.fixture(scope="module")
def azure_proxy(azure_endpoint, proxy_of):
    return proxy_of(azure_endpoint)


@pytest.fixture
def behind_proxy(azure_volume, azure_proxy, azure_connection):
    azure_proxy.forget()
    open_transport(azure_volume).put("a.bin", b"0123456789" * 1000)
    options = {"connection_string": azure_connection(azure_proxy.url), "read_timeout": 1}
    return Volume.of(azure_volume.url, options)


@BOTH
def test_every_verb(kind, azure_volume, tmp_path):
    transport = kind(azure_volume)
    for path in ("x/one", "x/y/two", "three", "odd name ü%#?+"):
        transport.put(path, path.encode())
    names = ["odd name ü%#?+", "three", "x/one", "x/y/two"]
    assert sorted(file.path for file in transport.list()) == names
    assert transport.directories() == ["x"]
    assert transport.read("odd name ü%#?+") == "odd name ü%#?+".encode()
    assert transport.get("three", tmp_path / "three") == 5
    assert transport.read_ranges("three", [(1, 3), (0, 1), (2, 2)]) == [b"hr", b"t", b""]
    with pytest.raises(FileNotFoundError):
        transport.read("missing")
    transport.delete("three")
    transport.delete("three")
    with pytest.raises(FileNotFoundError):
        transport.stat("three")


def test_both_clients_see_the_same_versions_and_refuse_one_that_is_gone(azure_volume, tmp_path):
    ours, theirs = obstore(azure_volume), adlfs(azure_volume)
    theirs.put("a", b"one")
    before = theirs.stat("a")
    assert before == ours.stat("a") == next(ours.list()) == next(theirs.list())
    assert ours.get("a", tmp_path / "a", before.version) == 3
    theirs.put("a", b"two")
    for transport in (ours, theirs):
        with pytest.raises(SourceChangedError):
            transport.get("a", tmp_path / "a", before.version)


@BOTH
@pytest.mark.parametrize("size", ["known", "unknown"])
def test_a_large_file_comes_in_parts_of_one_version(size, kind, azure_volume, tmp_path):
    content = os.urandom(LARGE_BYTES + PART_BYTES // 2)
    (tmp_path / "large").write_bytes(content)
    transport = kind(azure_volume)
    transport.put("large", tmp_path / "large")
    known = {"size": len(content)} if size == "known" else {}
    assert transport.get("large", tmp_path / "copy", transport.stat("large").version, **known) == len(content)
    assert (tmp_path / "copy").read_bytes() == content


@BOTH
@pytest.mark.parametrize(
    "fault",
    [
        {"status": 503},
        {"status": 429, "headers": {"Retry-After": "1"}},
        {"reset": 1000},
        {"truncate": 1000},
        {"stall": 1000},
        {"status": 403, "headers": {"x-ms-error-code": "AuthenticationFailed"}},
    ],
    ids=lambda fault: next(f"{name} {value}" for name, value in fault.items()),
)
def test_faults_that_pass_are_outlasted(fault, kind, behind_proxy, azure_proxy, tmp_path):
    transport = kind(behind_proxy)
    assert transport.stat("a.bin").size == 10_000
    azure_proxy.set_faults({"method": "GET", "match": "a.bin", "times": 1, **fault})
    assert transport.get("a.bin", tmp_path / "a") == 10_000
    assert (tmp_path / "a").read_bytes() == b"0123456789" * 1000


@BOTH
def test_a_server_that_stays_away_is_asked_by_us_alone(kind, behind_proxy, azure_proxy, tmp_path):
    transport = kind(behind_proxy)
    assert transport.stat("a.bin").size == 10_000
    azure_proxy.set_faults({"method": "GET", "match": "a.bin", "times": 3, "status": 503})
    transport.get("a.bin", tmp_path / "a")
    # azure-storage's own policy would wait for 15 s before its second try, uncounted.
    assert transport.retries == 3
    assert len(azure_proxy.requests("GET", "a.bin")) == 4


@BOTH
def test_a_signature_in_the_options_shows_in_no_error(kind, azure_volume, azure_endpoint):
    account = f"BlobEndpoint={azure_endpoint}/devstoreaccount1;AccountName=devstoreaccount1"
    options = {"connection_string": f"{account};SharedAccessSignature=sv=2020-01-01&sig=hidden"}
    with pytest.raises(TransferError) as caught:
        kind(Volume.of(azure_volume.url, options)).read("a.bin")
    assert "a.bin" in str(caught.value)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset(workers, azure_volume):
    transport = open_transport(azure_volume)
    expected = {f"class{n % 2}/{n}": str(n).encode() for n in range(10)}
    for path, content in expected.items():
        transport.put(path, content)
    dataset = airdata.UCVolumeDataset(azure_volume, yields="file")
    loader = airdata.DataLoader(dataset, batch_size=None, num_workers=workers)
    assert {file.path: file.read() for file in loader} == expected


def test_a_checkpoint(azure_volume):
    import torch
    import torch.distributed.checkpoint as dcp

    place = azure_volume.child("checkpoint")
    state = {"weight": torch.arange(1000.0), "step": 7}
    dcp.save(state, storage_writer=airdata.UCVolumeWriter(place))
    loaded = {"weight": torch.zeros(1000), "step": 0}
    dcp.load(loaded, storage_reader=airdata.UCVolumeReader(place))
    assert loaded["step"] == 7
    assert torch.equal(loaded["weight"], state["weight"])


def test_options_that_name_no_account_are_an_error_that_says_where_to_look():
    pytest.importorskip("adlfs")
    with pytest.raises(VolumeError, match=r"abfs://box/a: cannot be opened.*account_name.*storage_options"):
        open_transport(Volume.of("abfs://box/a", {"anon": True})).read("x")
