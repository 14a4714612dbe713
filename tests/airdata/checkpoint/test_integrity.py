import crc32c as castagnoli
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airdata.checkpoint.integrity import (
    BLOCK_BYTES,
    BlockDigest,
    FileRecord,
    IntegrityRecord,
    ItemRecord,
    as_bytes,
    block_digests,
    crc32c,
)
from airdata.errors import CorruptCheckpointError


def test_the_digest_is_the_one_that_stores_compute():
    assert crc32c(as_bytes(b"123456789")) == 0xE3069283  # the check value of CRC-32/ISCSI
    assert crc32c(as_bytes(b"6789"), crc32c(as_bytes(b"12345"))) == 0xE3069283


chunks = st.lists(st.binary(max_size=50), max_size=8)


@given(chunks, st.integers(1, 20))
def test_the_digests_of_blocks_do_not_depend_on_how_the_bytes_arrive(parts, block_bytes):
    whole = b"".join(parts)
    expected = tuple(castagnoli.crc32c(whole[at : at + block_bytes]) for at in range(0, len(whole), block_bytes))
    digest = BlockDigest(block_bytes)
    for part in parts:
        digest.update(as_bytes(part))
    assert digest.total == castagnoli.crc32c(whole)
    assert digest.item() == expected
    assert block_digests([as_bytes(part) for part in parts], block_bytes) == expected


@pytest.mark.parametrize("head", [0, 1, 704, BLOCK_BYTES, BLOCK_BYTES + 5])
def test_the_digest_of_a_file_is_that_of_its_bytes_also_over_whole_blocks(head):
    content = np.random.default_rng(head).integers(0, 256, 5 * BLOCK_BYTES + 321, np.uint8)
    digest = BlockDigest()
    digest.update(content[:head])
    digest.update(content[head:])
    assert digest.total == castagnoli.crc32c(content.tobytes())
    assert digest.item() == block_digests([content])


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=5))
def test_each_item_starts_a_block_of_its_own_and_the_file_digest_runs_on(items):
    digest = BlockDigest(16)
    for item in items:
        digest.update(as_bytes(item))
        assert digest.item() == block_digests([as_bytes(item)], 16)
    assert digest.total == crc32c(as_bytes(b"".join(items)))


record = IntegrityRecord(
    save_id="20260101T000000Z-00000000",
    metadata_size=10,
    metadata_crc32c=7,
    files=(FileRecord("__0_0.x.distcp", 30, 9, (ItemRecord(0, 20, 12, (1, 2**32 - 1)), ItemRecord(20, 10, -1, (3,)))),),
    ranks=2,
    torch="2.13.0",
    created="2026-01-01T00:00:00+00:00",
)


def test_a_record_survives_its_file():
    assert IntegrityRecord.from_bytes(record.to_bytes(), "r") == record


@given(st.integers(0, len(record.to_bytes()) - 1), st.integers(0, 7))
def test_a_flipped_bit_anywhere_in_the_record_is_noticed(position, bit):
    data = bytearray(record.to_bytes())
    data[position] ^= 1 << bit
    with pytest.raises(CorruptCheckpointError, match="some/record"):
        IntegrityRecord.from_bytes(bytes(data), "some/record")


@pytest.mark.parametrize("data", [b"", b"{}", b'{"crc32c":"00000000",', record.to_bytes()[:-1]])
def test_a_truncated_record_is_noticed(data):
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        IntegrityRecord.from_bytes(data, "r")


def test_a_view_of_bytes_is_no_copy():
    buffer = bytearray(b"abc")
    view = as_bytes(buffer)
    buffer[0] = ord("x")
    assert view.tobytes() == b"xbc"
    assert view.dtype == np.uint8
