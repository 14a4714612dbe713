"""Each fault of a server, on each transport: the bytes are right, the requests few, and nothing waits for ever."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from airdata.errors import SourceChangedError, TransferError
from airdata.transport import Retry, open_transport
from airdata.transport.object_store import ObjectTransport
from airdata.transport.parts import LARGE_BYTES, PART_BYTES
from airdata.transport.remote import FsspecTransport
from airdata.volume import Volume

CONTENT = bytes(range(256)) * 400
QUICK = Retry(deadline=60, first_wait=0.01, longest_wait=0.1)
IMPATIENT = {"config_kwargs": {"read_timeout": 1}}

EXPIRED = "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
INVALID = "<Error><Code>InvalidArgument</Code><Message>Invalid</Message></Error>"
DENIED = "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"

FAULTS = {
    "slow first byte": {"latency": 0.2},
    "no first byte": {"latency": 30},
    "stall": {"stall": 1000},
    "reset": {"reset": 1000},
    "truncated body": {"truncate": 1000},
    "500": {"status": 500},
    "503": {"status": 503},
    "429": {"status": 429},
    "503 with Retry-After": {"status": 503, "headers": {"Retry-After": "1"}},
    "429 with Retry-After": {"status": 429, "headers": {"Retry-After": "1"}},
    "expired token": {"status": 400, "body": EXPIRED},
    "401": {"status": 401},
    "403 without a reason": {"status": 403, "body": ""},
}


def fsspec(volume, retry=QUICK):
    return FsspecTransport(volume, retry)


def obstore(volume, retry=QUICK):
    return ObjectTransport(volume, retry, everywhere=True)


BOTH = pytest.mark.parametrize("kind", [fsspec, obstore])


@pytest.fixture(scope="module")
def _proxy(s3_endpoint, proxy_of):
    return proxy_of(s3_endpoint)


@pytest.fixture(scope="module")
def honest(s3_endpoint):
    """The volume as it is without the proxy; "a.bin" and "b.bin" lie there."""
    from s3fs import S3FileSystem

    options = {"key": "test", "secret": "test", "endpoint_url": s3_endpoint}
    bucket = f"faults-{os.getpid()}"
    S3FileSystem(**options, skip_instance_cache=True).mkdir(bucket)
    volume = Volume.of(f"s3://{bucket}/data", options)
    for name in ("a.bin", "b.bin"):
        open_transport(volume).put(name, CONTENT)
    return volume


@pytest.fixture
def s3_proxy(_proxy):
    _proxy.forget()
    yield _proxy
    _proxy.forget()


@pytest.fixture
def behind_proxy(honest, s3_proxy):
    """The volume as it is seen through the proxy."""
    return Volume.of(honest.url, {**honest.storage_options, "endpoint_url": s3_proxy.url, **IMPATIENT})


@BOTH
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_costs_one_more_request(fault, kind, behind_proxy, s3_proxy, tmp_path):
    transport = kind(behind_proxy)
    assert transport.read("b.bin") == CONTENT  # so that the credentials are known to be good
    s3_proxy.set_faults({"method": "GET", "match": "a.bin", "times": 1, **FAULTS[fault]})
    assert transport.get("a.bin", tmp_path / "a") == len(CONTENT)
    assert (tmp_path / "a").read_bytes() == CONTENT
    repeated = 0 if fault == "slow first byte" else 1
    assert transport.retries == repeated
    assert len(s3_proxy.requests("GET", "a.bin")) == 1 + repeated


@BOTH
@pytest.mark.parametrize("fault", ["503", "reset", "truncated body"])
def test_faults_one_after_the_other_are_outlasted(fault, kind, behind_proxy, s3_proxy, tmp_path):
    transport = kind(behind_proxy)
    s3_proxy.set_faults({"method": "GET", "match": "a.bin", "times": 6, **FAULTS[fault]})
    assert transport.get("a.bin", tmp_path / "a", transport.stat("a.bin").version) == len(CONTENT)
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert transport.retries == 6


@BOTH
def test_a_fault_that_stays_is_an_error_that_names_the_file(kind, behind_proxy, s3_proxy, tmp_path):
    transport = kind(behind_proxy, Retry(deadline=0.5, first_wait=0.01, longest_wait=0.1))
    assert transport.read("b.bin") == CONTENT
    s3_proxy.set_faults({"method": "GET", "match": "a.bin", "status": 503})
    start = time.monotonic()
    with pytest.raises(TransferError, match=r"data/a\.bin: after \d+ attempts"):
        transport.get("a.bin", tmp_path / "a")
    assert time.monotonic() - start < 30


@BOTH
def test_a_server_that_says_when_to_return_is_not_asked_before(kind, behind_proxy, s3_proxy):
    transport = kind(behind_proxy)
    s3_proxy.set_faults({"method": "GET", "match": "a.bin", "times": 2, "status": 503, "headers": {"Retry-After": "1"}})
    assert transport.read("a.bin") == CONTENT
    moments = s3_proxy.times("GET", "a.bin")
    # obstore does not show the header of an error, so that its first answer is acted on at once.
    assert moments[-1] - moments[-2] >= 1


@BOTH
def test_a_file_that_is_forbidden_is_not_asked_for_again(kind, behind_proxy, s3_proxy):
    transport = kind(behind_proxy)
    assert transport.read("b.bin") == CONTENT
    s3_proxy.set_faults({"method": "GET", "match": "a.bin", "status": 403, "body": DENIED})
    with pytest.raises(TransferError, match=r"a\.bin"):
        transport.read("a.bin")
    # obstore's refusal gets a second opinion from s3fs.
    assert len(s3_proxy.requests("GET", "a.bin")) == (1 if kind is fsspec else 2)


def test_a_store_that_has_worked_is_not_given_up(behind_proxy, s3_proxy, caplog):
    transport = obstore(behind_proxy)
    assert transport.read("b.bin") == CONTENT
    for _ in range(4):
        s3_proxy.set_faults({"method": "GET", "match": "a.bin", "times": 1, "status": 400, "body": INVALID})
        assert transport.read("a.bin") == CONTENT, "s3fs has the last word"
    assert "keeps failing" not in caplog.text


@BOTH
@pytest.mark.parametrize("fault", ["503", "reset", "stall"])
def test_ranges_survive_what_whole_files_do(fault, kind, behind_proxy, s3_proxy):
    transport = kind(behind_proxy)
    ranges = [(start, start + 5000) for start in range(0, 50_000, 10_000)]
    s3_proxy.set_faults({"method": "GET", "match": "a.bin", "times": 2, **FAULTS[fault]})
    assert transport.read_ranges("a.bin", ranges) == [CONTENT[start:end] for start, end in ranges]
    assert transport.retries >= 1


def test_of_many_ranges_only_those_that_failed_are_asked_for_again(behind_proxy, s3_proxy):
    transport = fsspec(behind_proxy)
    ranges = [(start, start + 100) for start in range(0, 1000, 100)]
    s3_proxy.set_faults({"method": "GET", "match": "a.bin", "times": 2, "status": 503})
    assert transport.read_ranges("a.bin", ranges) == [CONTENT[start:end] for start, end in ranges]
    assert len(s3_proxy.requests("GET", "a.bin")) == len(ranges) + 2


@BOTH
def test_listing_and_writing_survive_too(kind, behind_proxy, s3_proxy):
    transport = kind(behind_proxy)
    s3_proxy.set_faults({"method": "GET", "match": "list-type", "times": 1, "status": 503})
    assert sorted(file.path for file in transport.list()) == ["a.bin", "b.bin"]
    s3_proxy.set_faults({"method": "PUT", "times": 2, "status": 503})
    transport.put("c.bin", CONTENT)
    s3_proxy.set_faults({"method": "HEAD", "times": 2, "status": 503})
    assert transport.stat("c.bin").size == len(CONTENT)
    s3_proxy.set_faults({"method": "DELETE", "times": 1, "status": 503})
    transport.delete("c.bin")
    assert sorted(file.path for file in transport.list()) == ["a.bin", "b.bin"]


def test_a_long_listing_goes_on_from_the_page_that_failed(proxy_of):
    # A server of made-up objects: a thousand keys a page is what S3 gives, and writing thousands takes long.
    benchmarks = os.path.join(os.path.dirname(__file__), "../../benchmarks")
    spec = importlib.util.spec_from_file_location("airdata_tests_object_server", f"{benchmarks}/object_server.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.ObjectServer.start({"many": (2500, 10)}) as server:
        proxy = proxy_of(server.url())
        transport = obstore(Volume.of("s3://bench/many", {"key": "k", "secret": "s", "endpoint_url": proxy.url}))
        pages = transport.pages()
        paths = [file.path for file in next(pages)]
        proxy.set_faults({"method": "GET", "times": 2, "status": 503})
        paths += [file.path for page in pages for file in page]
        assert len(paths) == len(set(paths)) == 2500
        assert transport.retries == 2
        assert len(proxy.requests("GET")) == 3 + 2


# --- credentials that run out ------------------------------------------------------------------------------------


@BOTH
def test_credentials_that_ran_out_are_read_anew_once(kind, behind_proxy, s3_proxy, monkeypatch):
    def environment(key):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")

    environment("FIRSTKEY")
    transport = kind(Volume.of(behind_proxy.url, {"endpoint_url": s3_proxy.url}))
    assert transport.read("b.bin") == CONTENT
    s3_proxy.set_faults({"header": ["Authorization", "FIRSTKEY"], "status": 400, "body": EXPIRED})
    environment("SECONDKEY")
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(transport.read("a.bin"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [CONTENT] * 6

    def refused():
        return [request for verb in ("GET", "HEAD") for request in s3_proxy.requests(verb) if request[2] == 400]

    before = refused()
    assert before
    assert transport.read("b.bin") == CONTENT
    assert refused() == before


@BOTH
def test_credentials_of_azure_that_ran_out_are_read_anew_from_the_environment(
    kind, azure_volume, azure_endpoint, proxy_of, monkeypatch
):
    from azure.storage.blob import AccountSasPermissions, BlobServiceClient, ResourceTypes, generate_account_sas

    open_transport(azure_volume).put("a.bin", CONTENT)
    proxy = proxy_of(azure_endpoint)
    client = BlobServiceClient.from_connection_string(azure_volume.storage_options["connection_string"])

    def environment(day):
        token = generate_account_sas(
            client.account_name,
            client.credential.account_key,
            ResourceTypes(container=True, object=True),
            AccountSasPermissions(read=True, list=True),
            expiry=f"2099-01-{day}T00:00:00Z",
        )
        place = f"BlobEndpoint={proxy.url}/{client.account_name};AccountName={client.account_name}"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"{place};SharedAccessSignature={token}")

    environment("01")
    transport = kind(Volume.of(azure_volume.url))
    assert transport.read("a.bin") == CONTENT
    proxy.set_faults({"match": "2099-01-01", "status": 403, "headers": {"x-ms-error-code": "AuthenticationFailed"}})
    environment("02")
    assert transport.read("a.bin") == CONTENT
    refused = len(proxy.requests("GET", "2099-01-01"))
    assert [transport.read("a.bin") for _ in range(2)] == [CONTENT] * 2
    assert len(proxy.requests("GET", "2099-01-01")) == refused


@BOTH
def test_credentials_that_stay_refused_end_the_matter_and_stay_secret(kind, behind_proxy, s3_proxy):
    volume = Volume.of(behind_proxy.url, {**behind_proxy.storage_options, "secret": "hidden", "token": "hidden"})
    transport = kind(volume)
    assert transport.read("b.bin") == CONTENT
    s3_proxy.set_faults({"method": "GET", "status": 400, "body": EXPIRED})
    with pytest.raises(TransferError, match=r"a\.bin.*credentials were refused.*expired") as caught:
        transport.read("a.bin")
    assert "hidden" not in f"{caught.value!r} {caught.value.__cause__!r} {transport!r} {vars(transport)!r}"
    assert len(s3_proxy.requests("GET", "a.bin")) <= 4


# --- large files, in parts ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(honest, tmp_path_factory):
    content = os.urandom(LARGE_BYTES + 12_345)
    source = tmp_path_factory.mktemp("large") / "large"
    source.write_bytes(content)
    open_transport(honest).put("large.bin", source)
    return content


@BOTH
@pytest.mark.parametrize("size", ["known", "unknown"])
def test_a_large_file_comes_in_parts_and_whole(size, kind, *, large, behind_proxy, s3_proxy, tmp_path):
    transport = kind(behind_proxy)
    version = transport.stat("large.bin").version
    arguments = {"size": len(large)} if size == "known" else {}
    assert transport.get("large.bin", tmp_path / "copy", version, **arguments) == len(large)
    assert (tmp_path / "copy").read_bytes() == large
    if size == "known":
        assert len(s3_proxy.requests("GET", "large.bin")) == -(-len(large) // PART_BYTES)


@BOTH
@pytest.mark.parametrize("fault", ["503", "reset", "truncated body", "stall"])
def test_of_a_large_file_only_the_part_that_failed_is_asked_for_again(
    fault, kind, *, large, behind_proxy, s3_proxy, tmp_path
):
    transport = kind(behind_proxy)
    s3_proxy.set_faults({"method": "GET", "match": "large.bin", "times": 1, **FAULTS[fault]})
    assert transport.get("large.bin", tmp_path / "copy", size=len(large)) == len(large)
    assert (tmp_path / "copy").read_bytes() == large
    assert len(s3_proxy.requests("GET", "large.bin")) == -(-len(large) // PART_BYTES) + 1
    assert transport.retries == 1


def _put(volume, content, directory):
    (directory / "upload").write_bytes(content)
    open_transport(volume).put("large.bin", directory / "upload")


def _no_thread_is_left(name):
    deadline = time.monotonic() + 60
    while any(thread.name == name for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@BOTH
def test_a_large_file_replaced_while_its_parts_come_is_a_changed_source(
    kind, *, large, honest, behind_proxy, s3_proxy, tmp_path
):
    transport = kind(behind_proxy)
    version = transport.stat("large.bin").version
    # One part is on its way until the file has been replaced.
    s3_proxy.set_faults({"method": "GET", "match": "large.bin", "times": 1, "stall": 1000})
    pool = ThreadPoolExecutor(1)
    download = pool.submit(transport.get, "large.bin", tmp_path / "copy", version, len(large))
    deadline = time.monotonic() + 60
    while not any(status == 206 for _, _, status in s3_proxy.requests("GET", "large.bin")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        _put(honest, large[::-1], tmp_path)
        assert type(download.exception(timeout=60)) is SourceChangedError
        refused = any(status == 412 for _, _, status in s3_proxy.requests("GET", "large.bin"))
        assert refused == (kind is obstore), "obstore asks for the version, and s3fs cannot"
    finally:
        _put(honest, large, tmp_path)
    pool.shutdown()


@BOTH
@pytest.mark.parametrize("listed", ["with a version", "without"])
def test_a_large_file_that_has_shrunk_since_the_listing_is_a_changed_source(
    listed, kind, *, large, honest, behind_proxy, tmp_path
):
    transport = kind(behind_proxy)
    version = transport.stat("large.bin").version if listed == "with a version" else ""
    try:
        _put(honest, large[:-10], tmp_path)
        with pytest.raises(SourceChangedError, match=r"large\.bin"):
            transport.get("large.bin", tmp_path / "copy", version, len(large))
    finally:
        _put(honest, large, tmp_path)


def test_a_part_that_fails_for_good_ends_the_download_and_writes_nothing_more(large, behind_proxy, s3_proxy, tmp_path):
    transport = fsspec(behind_proxy)
    s3_proxy.set_faults(
        {"method": "GET", "match": "large.bin", "times": 1, "status": 403, "body": DENIED},
        {"method": "GET", "match": "large.bin", "latency": 0.3},
    )
    with pytest.raises(TransferError, match=r"large\.bin"):
        transport.get("large.bin", tmp_path / "copy", size=len(large))
    (tmp_path / "copy").write_bytes(b"mine")
    _no_thread_is_left("airdata-part")
    assert (tmp_path / "copy").read_bytes() == b"mine"


# --- hedged reads ------------------------------------------------------------------------------------------------


@BOTH
def test_a_hedged_read_does_not_wait_for_a_request_that_stalls(kind, behind_proxy, s3_proxy, tmp_path):
    volume = Volume.of(behind_proxy, hedge_seconds=0.2)
    transport = kind(volume)
    version = transport.stat("a.bin").version
    s3_proxy.set_faults({"method": "GET", "match": "a.bin", "times": 1, "stall": 0})
    assert transport.get("a.bin", tmp_path / "a", version, len(CONTENT)) == len(CONTENT)
    assert (tmp_path / "a").read_bytes() == CONTENT
    # The first request would have ended by its time-out, as a repetition.
    assert transport.retries == 0
    assert len(s3_proxy.requests("GET", "a.bin")) == 2
    _no_thread_is_left("airdata-hedge")


@BOTH
def test_without_hedging_there_is_no_second_request(kind, behind_proxy, s3_proxy, tmp_path):
    transport = kind(behind_proxy)
    s3_proxy.set_faults({"method": "GET", "match": "a.bin", "latency": 0.5})
    assert transport.get("a.bin", tmp_path / "a", size=len(CONTENT)) == len(CONTENT)
    assert len(s3_proxy.requests("GET", "a.bin")) == 1


# --- HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def web(proxy_of, web_directory):
    (web_directory.path / "a.bin").write_bytes(CONTENT)
    return proxy_of(web_directory.url), web_directory


@BOTH
@pytest.mark.parametrize("fault", ["503", "reset", "truncated body", "429 with Retry-After"])
def test_a_plain_web_server_that_misbehaves(fault, kind, web, tmp_path):
    proxy, _ = web
    transport = kind(Volume.of(proxy.url))
    proxy.set_faults({"method": "GET", "match": "a.bin", "times": 1, **FAULTS[fault]})
    assert transport.get("a.bin", tmp_path / "a") == len(CONTENT)
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert transport.retries == 1


# --- what the training loop sees of it ---------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_retries_are_counted_in_the_loaders_statistics(workers, behind_proxy, s3_proxy):
    import airdata

    dataset = airdata.UCVolumeDataset(behind_proxy, pattern="?.bin", yields="bytes")
    loader = airdata.DataLoader(dataset, batch_size=None, num_workers=workers)
    s3_proxy.set_faults({"method": "GET", "match": "a.bin", "times": 2, "reset": 1000})
    assert list(loader) == [CONTENT, CONTENT]
    assert loader.stats().files.retries == 2
    assert dataset.warm(progress=False).retries == 0
