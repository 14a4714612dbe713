"""An option of an fsspec driver means the same to obstore, or obstore is not used."""

from __future__ import annotations

from datetime import timedelta

import pytest

from airdata.transport.store_options import plan_store

AZURE = "abfs://box@account.dfs.core.windows.net/a/b"


def arguments(url, options=None, environ=None):
    return plan_store(url, options or {}, environ or {}).arguments


def test_s3_options_are_mapped():
    given = {"key": "k", "secret": "s", "token": "t", "endpoint_url": "http://h:1", "requester_pays": True}
    found = arguments("s3://bucket/a/b/", {**given, "client_kwargs": {"region_name": "eu"}})
    expected = {
        "bucket": "bucket",
        "prefix": "a/b",
        "access_key_id": "k",
        "secret_access_key": "s",
        "session_token": "t",
        "endpoint": "http://h:1",
        "region": "eu",
        "request_payer": True,
    }
    assert found.items() >= expected.items()
    assert found["client_options"]["allow_http"]
    assert arguments("s3://bucket", {"anon": True})["skip_signature"] is True
    assert arguments("s3://bucket", {}, {"AWS_ENDPOINT_URL": "http://h:2"})["endpoint"] == "http://h:2"
    assert arguments("s3://bucket", {"client_kwargs": {"endpoint_url": "https://h:3"}})["endpoint"] == "https://h:3"


def test_time_outs_are_mapped():
    limits = arguments("s3://b", {"config_kwargs": {"read_timeout": 3, "connect_timeout": 2}})["client_options"]
    assert (limits["read_timeout"], limits["connect_timeout"]) == (timedelta(seconds=3), timedelta(seconds=2))
    limits = arguments(AZURE, {"account_key": "k", "read_timeout": 7})["client_options"]
    assert limits["read_timeout"] == timedelta(seconds=7)


def test_azure_options_are_mapped():
    found = arguments(AZURE, {"account_key": "k"})
    expected = {"container_name": "box", "account_name": "account", "prefix": "a/b", "account_key": "k"}
    assert found.items() >= expected.items()
    assert arguments("az://box/a", {"account_name": "n", "sas_token": "?sv=1&sig=x"})["sas_key"] == "sv=1&sig=x"
    principal = {"client_id": "i", "client_secret": "s", "tenant_id": "t"}
    assert arguments(AZURE, principal).items() >= principal.items()
    assert arguments(AZURE, {}, {"AZURE_STORAGE_ACCOUNT_KEY": "k"})["account_key"] == "k"
    assert arguments("abfs://box", {"account_name": "n", "account_host": "h"})["endpoint"] == "https://h"
    assert arguments(AZURE, {"anon": True})["skip_signature"] is True


def test_azure_connection_strings_are_mapped():
    text = "DefaultEndpointsProtocol=https;AccountName=n;AccountKey=k==;EndpointSuffix=core.chinacloudapi.cn"
    found = arguments("abfs://box/a", {"connection_string": text})
    expected = {"account_name": "n", "account_key": "k==", "endpoint": "https://n.blob.core.chinacloudapi.cn"}
    assert found.items() >= expected.items()
    text = "AccountName=n;SharedAccessSignature=sv=1&sig=x;BlobEndpoint=http://127.0.0.1:1/n/"
    found = arguments("abfs://box/a", {"connection_string": text})
    assert found.items() >= {"sas_key": "sv=1&sig=x", "endpoint": "http://127.0.0.1:1/n"}.items()
    assert plan_store("abfs://box", {"connection_string": "UseDevelopmentStorage=true"}, {}) is None


def test_google_options_are_mapped():
    assert arguments("gs://bucket/a").items() >= {"bucket": "bucket", "prefix": "a"}.items()
    assert arguments("gs://bucket", {"token": "anon"})["skip_signature"] is True
    assert arguments("gs://bucket", {"token": "anon", "endpoint_url": "http://h:1"})["base_url"] == "http://h:1"
    assert arguments("gs://bucket", {}, {"STORAGE_EMULATOR_HOST": "h:1"})["base_url"] == "http://h:1"


def test_http_headers_are_mapped():
    options = {"client_kwargs": {"headers": {"X-Token": "t"}}}
    found = arguments("https://host/a", options)
    assert found["url"] == "https://host/a"
    assert found["client_options"]["default_headers"] == {"X-Token": "t"}


@pytest.mark.parametrize(
    ("url", "options", "chain"),
    [
        ("s3://b", {}, "aws"),
        ("s3://b", {"key": "k", "secret": "s"}, ""),
        ("s3://b", {"anon": True}, ""),
        ("gs://b", {}, "google"),
        ("gs://b", {"token": "anon"}, ""),
        (AZURE, {}, "azure"),
        (AZURE, {"anon": False}, "azure"),
        (AZURE, {"sas_token": "s"}, ""),
        (AZURE, {"anon": True}, ""),
        ("http://h/a", {}, ""),
    ],
)
def test_credentials_that_are_not_given_come_from_the_drivers_chain(url, options, chain):
    assert plan_store(url, options, {}).chain == chain


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://b", {"profile": "work"}),
        ("s3://b", {"client_kwargs": {"verify": False}}),
        ("s3://b", {"config_kwargs": {"signature_version": "s3"}}),
        ("s3://b", {"version_aware": True}),
        ("s3://b", {"s3_additional_kwargs": {"SSECustomerKey": "k"}}),
        ("s3://", {}),
        (AZURE, {"credential": object()}),
        (AZURE, {"account_name": "another", "account_key": "k"}),
        (AZURE, {"client_id": "i"}),
        ("abfs://box@account.dfs.core.example/a", {"account_key": "k"}),
        ("abfs://box/a", {"account_key": "k"}),
        ("gs://b", {"token": "cloud"}),
        ("gs://b", {"token": {"type": "service_account"}}),
        ("gs://b", {"requester_pays": True}),
        ("http://user:secret@host/a", {}),
        ("http://host/a?sig=secret", {}),
        ("http://host/a", {"client_kwargs": {"auth": object()}}),
        ("http://host/a", {"encoded": True}),
        ("sftp://host/a", {}),
    ],
)
def test_what_has_no_counterpart_is_left_to_fsspec(url, options):
    assert plan_store(url, options, {}) is None


def test_a_plan_shows_no_credentials():
    plan = plan_store("s3://b", {"key": "hidden", "secret": "hidden", "token": "hidden"}, {})
    assert "hidden" not in repr(plan)
