"""Importing airdata is quick and quiet."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = "mlflow ray boto3 botocore s3fs obstore gcsfs adlfs aiohttp torch pyarrow".split()


def fresh_interpreter(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    ).stdout.strip()


def test_importing_airdata_imports_nothing_heavy() -> None:
    assert fresh_interpreter(f"import sys, airdata; print([m for m in {HEAVY} if m in sys.modules])") == "[]"


def test_importing_the_data_side_imports_no_tracking_and_no_cloud_client() -> None:
    clients = [name for name in HEAVY if name not in {"torch", "pyarrow"}]
    code = f"import sys; from airdata import UCVolumeDataset, DataLoader, Volume; print([m for m in {clients} if m in sys.modules])"
    assert fresh_interpreter(code) == "[]"


def test_every_public_name_can_be_imported_and_is_listed() -> None:
    import airdata

    for name in airdata.__all__:
        assert getattr(airdata, name) is not None
    assert set(airdata.__all__) <= set(dir(airdata))


def test_an_unknown_name_is_an_attribute_error() -> None:
    import airdata

    with pytest.raises(AttributeError, match="nonsense"):
        airdata.nonsense  # noqa: B018
