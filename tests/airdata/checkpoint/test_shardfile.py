import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from airdata.checkpoint.integrity import as_bytes, block_digests, crc32c
from airdata.checkpoint.shardfile import ShardFile, pack, tensor_bytes, through_host

sizes = st.lists(st.integers(0, 100), max_size=40)


@given(sizes, st.integers(1, 200), st.integers(1, 6), st.integers(1, 50))
def test_packing_takes_each_item_once_in_order_and_fills_no_file_beyond_its_limit(items, limit, files, smallest):
    packed = pack(items, limit, files, smallest)
    assert [index for file in packed for index in file] == list(range(len(items)))
    assert all(len(file) == 1 or sum(items[i] for i in file) <= limit for file in packed)


def test_packing_uses_every_thread_when_there_is_enough_to_write():
    assert len(pack([10] * 40, limit=1000, files=4, smallest=10)) == 4
    assert len(pack([10] * 40, limit=50, files=4, smallest=10)) == 8
    assert pack([1] * 5, limit=1000, files=4, smallest=10) == [[0, 1, 2, 3, 4]]
    assert pack([], limit=10, files=4) == []


TENSORS = {
    "float": torch.arange(12.0).view(3, 4),
    "bfloat16": torch.arange(5.0).to(torch.bfloat16),
    "float8": torch.arange(5.0).to(torch.float8_e5m2),
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j]),
    "scalar": torch.tensor(3.5),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "view of a larger storage": torch.arange(100.0)[20:30],
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
    "large": torch.arange(300_000.0),
}
DECODED = {
    "empty": torch.zeros(0, 4),
    "conjugated": torch.tensor([1 + 2j]).conj(),
    "sparse": torch.eye(3).to_sparse(),
}


def write(*values):
    sink = io.BytesIO()
    shard = ShardFile("name", sink)
    items = [shard.add(value) for value in values]
    return sink.getvalue(), items, shard.record()


@pytest.mark.parametrize("kind", [*TENSORS, *DECODED])
def test_an_item_is_what_torch_load_reads(kind):
    tensor = {**TENSORS, **DECODED}[kind]
    data, [item], _ = write(tensor)
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert loaded.dtype == tensor.dtype
    assert torch.equal(
        loaded.to_dense().resolve_conj().to(torch.complex64), tensor.to_dense().resolve_conj().to(torch.complex64)
    )
    assert item.length == len(data) < tensor.numel() * 16 + 4000


@pytest.mark.parametrize("kind", TENSORS)
def test_the_raw_bytes_of_a_tensor_lie_at_its_payload_offset(kind):
    tensor = TENSORS[kind].contiguous()
    data, [item], _ = write(io.BytesIO(b"before"), tensor)[0], write(io.BytesIO(b"before"), tensor)[1][1:], None
    raw = tensor_bytes(tensor).tobytes()
    start = item.offset + item.payload_offset
    assert item.payload_offset > 0
    assert data[start : start + len(raw)] == raw


@pytest.mark.parametrize("kind", DECODED)
def test_what_has_no_plain_payload_says_so(kind):
    assert write(DECODED[kind])[1][0].payload_offset == -1


def test_items_follow_each_other_and_digests_cover_every_byte():
    data, items, record = write(*TENSORS.values(), io.BytesIO(b"object"), *DECODED.values())
    end = 0
    for item in items:
        assert item.offset == end
        end += item.length
        assert item.blocks == block_digests([as_bytes(data[item.offset : end])])
    assert end == record.size == len(data)
    assert record.crc32c == crc32c(as_bytes(data))
    assert record.items == tuple(items)


def test_a_tensor_with_a_gradient_is_stored_as_a_plain_one():
    data, _, _ = write(torch.nn.Parameter(torch.ones(3)))
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert type(loaded) is torch.Tensor
    assert not loaded.requires_grad


@pytest.mark.parametrize("step", [1, 7, 24, 1 << 20])
@pytest.mark.parametrize(
    "tensor",
    [torch.arange(6.0), torch.arange(12).reshape(3, 4).T, torch.tensor(True), torch.arange(5, dtype=torch.bfloat16)],
    ids=["plain", "transposed", "scalar", "bfloat16"],
)
def test_the_way_off_a_device_gives_the_same_bytes_whatever_the_step(tensor, step):
    steps = [bytes(part.data) for part in through_host(tensor, step)]
    assert b"".join(steps) == bytes(tensor_bytes(tensor.contiguous()).data)
    assert max(map(len, steps)) <= step


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_tensor_on_a_gpu_is_stored_as_the_same_bytes_as_one_on_the_cpu():
    def stored(tensor):
        sink = io.BytesIO()
        item = ShardFile("file", sink).add(tensor)
        return item, sink.getvalue()

    tensor = torch.randn(3, 7 << 20)
    for variant in (tensor, tensor.T, tensor[:, 5:9], tensor[0, 0], tensor[:0]):
        assert stored(variant.cuda()) == stored(variant.contiguous())
