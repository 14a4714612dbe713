"""Servers that misbehave, for the tests of this directory."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def _load_proxy() -> Any:
    name = "airdata_tests_fault_proxy"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "proxy.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture
def s3_proxy(s3_endpoint: str) -> Iterator[Any]:
    """A ``FaultProxy`` (see proxy.py) before the S3 server of the session."""
    proxy = _load_proxy().FaultProxy.start(s3_endpoint.removeprefix("http://"))
    try:
        yield proxy
    finally:
        proxy.stop()
