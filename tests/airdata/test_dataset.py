"""UCVolumeDataset: the files of a volume as samples."""

from __future__ import annotations

import copy
import http.server
import itertools
import json
import os
import pickle
import threading
import warnings
from pathlib import Path

import pytest
import torch.utils.data
from torch.utils.data import IterableDataset

import airdata
from airdata import UCVolumeDataset
from airdata.errors import BadFilesError, FetchError, ManifestError, StateError, TopologyError
from airdata.manifest import Manifest


def names(samples) -> list[str]:
    return [os.path.basename(sample) for sample in samples]


class Lengths(IterableDataset):
    """A wrapper that decodes."""

    def __init__(self, source) -> None:
        self.source = source

    def __iter__(self):
        for path in self.source:
            yield os.path.getsize(path)


# --- what is yielded ---


def test_paths_on_local_disk_end_with_the_path_in_the_volume(s3_volume, make_files, tmp_path) -> None:
    contents = make_files(tmp_path / "local", 9)
    transport = airdata.transport.open_transport(s3_volume)
    for relative, content in contents.items():
        transport.put(relative, content)
    dataset = UCVolumeDataset(s3_volume, cache_dir=tmp_path / "cache")
    paths = list(dataset)
    assert [path[-len(relative) :] for path, relative in zip(paths, sorted(contents), strict=True)] == sorted(contents)
    assert [Path(path).read_bytes() for path in paths] == [contents[relative] for relative in sorted(contents)]
    assert dataset.stats().misses == 9
    assert list(dataset) == paths
    assert dataset.stats().hits == 9


def test_a_local_directory_is_read_in_place(volume) -> None:
    directory = volume(5)
    assert all(path.startswith(directory + "/class") for path in UCVolumeDataset(directory))


def test_bytes_and_files_can_be_asked_for(volume) -> None:
    directory = volume(6)
    paths = list(UCVolumeDataset(directory))
    assert list(UCVolumeDataset(directory, yields="bytes")) == [Path(path).read_bytes() for path in paths]
    files = list(UCVolumeDataset(directory, yields="file"))
    assert [file.local_path for file in files] == paths
    assert [file.read() for file in files] == [Path(path).read_bytes() for path in paths]
    assert [file.size for file in files] == [os.path.getsize(path) for path in paths]
    assert files[0].path.startswith("class0/")


def test_columns_of_a_manifest_ride_along(volume) -> None:
    directory = volume(4)
    listed = [file.path for file in UCVolumeDataset(directory).manifest]
    manifest = Manifest.from_paths(listed, columns={"label": [path[5] for path in listed]})
    files = list(UCVolumeDataset(directory, manifest=manifest, yields="file", shuffle=True))
    assert {file.path: file.columns for file in files} == {path: {"label": path[5]} for path in listed}


def test_a_list_of_volumes_is_read_as_one(tmp_path, make_files) -> None:
    for name, count in (("one", 5), ("two", 7)):
        make_files(tmp_path / name, count)
    paths = [str(tmp_path / "one"), str(tmp_path / "two")]
    dataset = UCVolumeDataset(paths, shuffle=True)
    assert len(dataset) == 12
    assert sorted(dataset) == sorted([*UCVolumeDataset(paths[0]), *UCVolumeDataset(paths[1])])
    assert dataset.state_dict()["n"] == 12
    with pytest.raises(ValueError, match="2 volumes"):
        _ = dataset.manifest


def test_a_saved_manifest_needs_no_listing_and_fits_only_its_volume(volume, tmp_path) -> None:
    directory = volume(5)
    dataset = UCVolumeDataset(directory)
    dataset.manifest.save(tmp_path / "m.parquet")
    os.unlink(next(iter(dataset)))
    again = UCVolumeDataset(directory, manifest=tmp_path / "m.parquet")
    assert len(again) == 5  # what the manifest says, not what a listing would
    with pytest.raises(ManifestError, match="the manifest lists"):
        UCVolumeDataset(str(tmp_path), manifest=tmp_path / "m.parquet")


# --- order and epochs ---


def test_each_epoch_has_an_order_of_its_own_without_being_told(volume) -> None:
    directory = volume(20)
    dataset = UCVolumeDataset(directory, shuffle=True, seed=1)
    first, second = names(dataset), names(dataset)
    assert sorted(first) == sorted(second)
    assert first != second
    assert dataset.epoch == 2
    dataset.set_epoch(0)
    assert names(dataset) == first
    assert names(UCVolumeDataset(directory, shuffle=True, seed=1)) == first
    assert names(UCVolumeDataset(directory, shuffle=True, seed=2)) != first


def test_ranks_share_the_epoch(volume) -> None:
    directory = volume(11)
    shares = [names(UCVolumeDataset(directory, rank=rank, world_size=3)) for rank in range(3)]
    assert [len(share) for share in shares] == [4, 4, 3]
    assert sorted(itertools.chain(*shares)) == sorted(names(UCVolumeDataset(directory)))
    assert [len(UCVolumeDataset(directory, rank=rank, world_size=3)) for rank in range(3)] == [4, 4, 3]


def test_rank_is_read_when_iteration_starts(volume, monkeypatch) -> None:
    dataset = UCVolumeDataset(volume(10))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(list(dataset)) == 5
    monkeypatch.delenv("RANK")
    with pytest.raises(TopologyError, match="RANK"):
        iter(dataset)


def test_ranks_with_different_numbers_of_batches_are_warned_of_once_with_remedies(volume) -> None:
    directory = volume(5)
    with pytest.warns(UserWarning, match=r"uneven='drop'.*uneven='pad'") as caught:
        list(UCVolumeDataset(directory, rank=0, world_size=2))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(UCVolumeDataset(directory, rank=1, world_size=2))
        list(UCVolumeDataset(directory, rank=0, world_size=2, uneven="drop"))
        list(UCVolumeDataset(directory, rank=0, world_size=2, uneven="pad"))


def test_no_batch_at_all_is_warned_of(volume) -> None:
    with pytest.warns(UserWarning, match="no batch at all"):
        assert list(UCVolumeDataset(volume(2), rank=0, world_size=3, uneven="drop")) == []


def test_a_rank_may_have_nothing_to_read(volume) -> None:
    assert list(UCVolumeDataset(volume(2), rank=2, world_size=3)) == []
    assert len(list(UCVolumeDataset(volume(2), rank=2, world_size=3, uneven="pad"))) == 1


# --- foreign loaders ---


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_pytorchs_own_loader_covers_the_epoch(volume, workers) -> None:
    directory = volume(17)
    dataset = UCVolumeDataset(directory, shuffle=True)
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=workers)
    read = [path for batch in loader for path in batch]
    assert sorted(names(read)) == sorted(names(UCVolumeDataset(directory)))


def test_set_epoch_reaches_persistent_workers_of_pytorchs_own_loader(volume) -> None:
    dataset = UCVolumeDataset(volume(12), shuffle=True)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    orders = []
    for epoch in (0, 1, 0):
        dataset.set_epoch(epoch)
        orders.append(names(loader))
    assert orders[0] == orders[2]
    assert orders[0] != orders[1]
    expected = UCVolumeDataset(volume(12), shuffle=True)
    assert [names(expected), names(expected)] == orders[:2]


def test_a_position_that_cannot_be_known_is_not_made_up(volume) -> None:
    dataset = UCVolumeDataset(volume(6))
    for _ in torch.utils.data.DataLoader(dataset, num_workers=1):
        pass
    with pytest.raises(StateError, match=r"airdata\.DataLoader"):
        dataset.state_dict()


def test_a_loaded_position_is_for_one_iteration_of_workers_too(volume) -> None:
    dataset = UCVolumeDataset(volume(10))
    state = {**dataset.state_dict(), "samples_served": 7}
    dataset.load_state_dict(state)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    assert [len(list(loader)) for _ in range(3)] == [3, 10, 10]


# --- state ---


def test_a_position_counts_what_was_yielded_and_resumes_there(volume) -> None:
    directory = volume(9)
    whole = names(UCVolumeDataset(directory, shuffle=True))
    for served in range(10):
        dataset = UCVolumeDataset(directory, shuffle=True)
        iterator = iter(dataset)
        for _ in range(served):
            next(iterator)
        state = dataset.state_dict()
        assert (state["epoch"], state["samples_served"]) == (0, served)
        assert all(type(value) in {int, str} for value in state.values())
        assert len(json.dumps(state)) < 400
        resumed = UCVolumeDataset(directory, shuffle=True)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert resumed.state_dict() == state
        assert names(resumed) == whole[served:]
        assert len(list(resumed)) == 9
        assert resumed.epoch == 2


def test_a_state_of_other_data_is_refused_with_what_differs(volume) -> None:
    directory = volume(6)
    state = UCVolumeDataset(directory, seed=1).state_dict()
    for other, match in (
        (UCVolumeDataset(volume(7), seed=1), r"n \(the number of files\) was 6 and is 7"),
        (UCVolumeDataset(directory, seed=2), "seed was 1 and is 2"),
        (UCVolumeDataset(directory, seed=1, shuffle=True), "shuffle was False and is True"),
    ):
        with pytest.raises(StateError, match=match):
            other.load_state_dict(state)
    path = next(iter(UCVolumeDataset(directory)))
    os.utime(path, (1, 1))
    with pytest.raises(StateError, match=r"the versions of .* have changed"):
        UCVolumeDataset(directory, seed=1).load_state_dict(state)
    for broken in ({}, {**state, "version": 99}, {**state, "epoch": "x"}, {**state, "samples_served": 7}):
        with pytest.raises(StateError):
            UCVolumeDataset(directory, seed=1).load_state_dict(broken)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda dataset: pickle.loads(pickle.dumps(dataset))])
def test_a_copy_stands_where_the_original_stood_and_goes_its_own_way(volume, copier) -> None:
    dataset = UCVolumeDataset(volume(8), shuffle=True)
    iterator = iter(dataset)
    next(iterator)
    twin = copier(dataset)
    assert twin.state_dict() == dataset.state_dict()
    twin.set_epoch(5)
    assert dataset.epoch == 0


def test_set_epoch_keeps_the_position_of_the_current_epoch(volume) -> None:
    dataset = UCVolumeDataset(volume(8))
    dataset.load_state_dict({**dataset.state_dict(), "epoch": 3, "samples_served": 6})
    dataset.set_epoch(3)
    assert len(list(dataset)) == 2
    dataset.load_state_dict({**dataset.state_dict(), "epoch": 3, "samples_served": 6})
    dataset.set_epoch(4)
    assert len(list(dataset)) == 8


# --- trouble ---


def broken_volume(directory: str, *numbers: int) -> Manifest:
    """The manifest of a volume some of whose files have vanished since."""
    manifest = UCVolumeDataset(directory).manifest
    for number in numbers:
        os.unlink(os.path.join(directory, manifest[number].path))
    return manifest


def test_a_file_that_cannot_be_read_is_named(volume) -> None:
    directory = volume(5)
    manifest = broken_volume(directory, 3)
    iterator = iter(UCVolumeDataset(directory, manifest=manifest))
    assert len([next(iterator) for _ in range(3)]) == 3
    with pytest.raises(FetchError, match=manifest[3].path) as caught:
        next(iterator)
    assert caught.value.path == manifest[3].path
    assert pickle.loads(pickle.dumps(caught.value)).path == manifest[3].path


def test_a_bad_file_is_replaced_by_the_same_one_on_every_topology(volume) -> None:
    directory = volume(12)
    manifest = broken_volume(directory, 2, 9)
    options = {"manifest": manifest, "on_error": "replace", "max_bad_files": 2, "shuffle": True}
    whole = names(UCVolumeDataset(directory, **options))
    assert len(whole) == 12
    assert len(set(whole)) < 12
    shares = [names(UCVolumeDataset(directory, rank=rank, world_size=2, **options)) for rank in range(2)]
    assert [name for pair in zip(*shares, strict=True) for name in pair] == whole
    resumed = UCVolumeDataset(directory, **options)
    resumed.load_state_dict({**resumed.state_dict(), "samples_served": 1})
    assert names(resumed) == whole[1:]


@pytest.mark.parametrize("on_error", ["replace", "skip"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_over_bad_files_resumes_with_the_same_samples(volume, on_error, workers) -> None:
    directory = volume(14)
    options = {
        "manifest": broken_volume(directory, 1, 6, 13),
        "on_error": on_error,
        "max_bad_files": 9,
        "shuffle": True,
    }

    def loader() -> airdata.DataLoader:
        return airdata.DataLoader(UCVolumeDataset(directory, **options), batch_size=3, num_workers=workers)

    whole = [names(batch) for batch in loader()]
    assert sum(map(len, whole)) == {"replace": 14, "skip": 11}[on_error]
    for step in range(0, len(whole), 2 if workers else 1):
        running, resumed = loader(), loader()
        before = [names(batch) for batch in itertools.islice(iter(running), step)]
        resumed.load_state_dict(running.state_dict())
        assert before + [names(batch) for batch in resumed] == whole, step


def test_too_many_bad_files_are_an_error(volume, caplog) -> None:
    directory = volume(12)
    manifest = broken_volume(directory, 1, 2, 3)
    dataset = UCVolumeDataset(directory, manifest=manifest, on_error="replace", max_bad_files=2)
    with pytest.raises(BadFilesError, match="max_bad_files=2"):
        list(dataset)
    with pytest.raises(BadFilesError):
        list(UCVolumeDataset(directory, manifest=manifest, on_error="replace"))
    assert len([record for record in caplog.records if manifest[1].path in record.message]) == 2  # once per dataset


def test_bad_files_can_be_skipped_where_ranks_may_differ(volume) -> None:
    directory = volume(8)
    manifest = broken_volume(directory, 0, 5)
    dataset = UCVolumeDataset(directory, manifest=manifest, on_error="skip", max_bad_files=2)
    assert len(list(dataset)) == 6
    assert dataset.stats().bad_files == 2
    with pytest.raises(ValueError, match="skip"):
        UCVolumeDataset(directory, on_error="skip", uneven="drop")


@pytest.mark.parametrize(
    "wrong",
    [
        {"uneven": "maybe"},
        {"on_error": "ignore"},
        {"yields": "tensor"},
        {"shuffle_scope": "node"},
        {"prefetch": 0},
        {"rank": 1},
        {"rank": 2, "world_size": 2},
        {"cache": False, "cache_dir": "/x"},
        {"groups": 2},
        {"groups": 0, "shuffle_scope": "group"},
        {"nodes": 2},
        {"rank": 0, "world_size": 3, "nodes": 2},
        {"weights": [1.0], "shuffle": False},
        {"weights": [1.0, 2.0], "shuffle": True},
        {"weights": [0.0], "shuffle": True},
        {"weights": [float("nan")], "shuffle": True},
        {"weights": [1.0], "shuffle": True, "shuffle_scope": "group"},
    ],
)
def test_arguments_that_make_no_sense_are_refused_before_any_io(tmp_path, wrong) -> None:
    with pytest.raises((ValueError, TopologyError)):
        UCVolumeDataset(str(tmp_path / "missing"), **wrong)


# --- fetching ---


def remote(make_files, counting_server, tmp_path, count: int):
    """A server of files, and a manifest of them, for it cannot be listed."""
    contents = make_files(tmp_path / "served", count)
    server = counting_server(tmp_path / "served")
    manifest = Manifest.from_paths(contents, sizes=[len(content) for content in contents.values()])
    return server, manifest, contents


@pytest.mark.parametrize("cache", [None, False])
def test_without_a_cache_paths_still_open(make_files, counting_server, tmp_path, cache) -> None:
    server, manifest, contents = remote(make_files, counting_server, tmp_path, 15)
    dataset = UCVolumeDataset(server.url, manifest=manifest, cache=cache)
    for _ in range(2):
        assert sorted(Path(path).read_bytes() for path in dataset) == sorted(contents.values())
    assert set(server.gets.values()) == ({1} if cache is None else {2})


def test_two_processes_that_share_a_cache_read_each_file_once(
    make_files, counting_server, tmp_path, program, finish
) -> None:
    server, manifest, contents = remote(make_files, counting_server, tmp_path, 40)
    manifest.save(tmp_path / "m.parquet")
    code = """
        import json, sys
        from airdata import DataLoader, UCVolumeDataset
        dataset = UCVolumeDataset(sys.argv[1], manifest=sys.argv[2], cache_dir=sys.argv[3], shuffle=True, yields="bytes")
        for epoch in range(2):
            content = [sample.decode("latin1") for sample in DataLoader(dataset, batch_size=None, num_workers=1)]
        print(json.dumps(sorted(content)))
    """
    processes = [program(code, server.url, tmp_path / "m.parquet", tmp_path / "cache") for _ in range(2)]
    expected = sorted(content.decode("latin1") for content in contents.values())
    assert [json.loads(finish(process)) for process in processes] == [expected, expected]
    assert server.gets == dict.fromkeys(contents, 1)


def test_files_of_unknown_size_are_asked_for_it(make_files, counting_server, tmp_path) -> None:
    server, _, contents = remote(make_files, counting_server, tmp_path, 5)
    dataset = UCVolumeDataset(server.url, manifest=Manifest.from_paths(contents), yields="bytes")
    assert sorted(dataset) == sorted(contents.values())


def test_warm_fills_the_cache(make_files, counting_server, tmp_path, capsys) -> None:
    server, manifest, contents = remote(make_files, counting_server, tmp_path, 10)
    dataset = UCVolumeDataset(server.url, manifest=manifest)
    read = dataset.warm()
    assert (read.files, read.misses) == (10, 10)
    assert "10/10" in capsys.readouterr().err
    list(dataset)
    assert server.gets == dict.fromkeys(contents, 1)


def test_closing_an_iterator_stops_fetching(make_files, counting_server, tmp_path) -> None:
    server, manifest, _ = remote(make_files, counting_server, tmp_path, 60)
    dataset = UCVolumeDataset(server.url, manifest=manifest, prefetch=4)
    iterator = iter(dataset)
    next(iterator)
    iterator.close()
    assert sum(server.gets.values()) < 20
    assert len(list(dataset)) == 60


def test_a_decoding_wrapper_loses_nothing(volume) -> None:
    directory = volume(9)
    assert list(Lengths(UCVolumeDataset(directory))) == [os.path.getsize(path) for path in UCVolumeDataset(directory)]


def test_a_source_that_never_tells_a_size_is_an_error_of_the_file_and_not_a_missing_path(tmp_path):
    class Silent(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(200)
            self.end_headers()

        def do_GET(self):
            self.do_HEAD()
            self.wfile.write(b"content")

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        dataset = UCVolumeDataset(
            f"http://127.0.0.1:{server.server_port}",
            manifest=Manifest.from_paths(["a.txt"]),
            cache_dir=tmp_path / "cache",
            min_free_bytes=0,
        )
        with pytest.raises(FetchError, match=r"a\.txt"):
            list(dataset)
        server.shutdown()


def test_requests_repeated_for_files_that_turn_out_to_be_here_are_counted(tmp_path, monkeypatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    names = [str(number) for number in range(6)]
    for name in names:
        store.pipe_file(f"/{tmp_path.name}/{name}", b"x" * 10)
    files = airdata.UCVolumeDataset(
        f"memory://{tmp_path.name}",
        manifest=airdata.Manifest.from_paths(names),  # without sizes, so that each file is asked for its own
        cache_dir=tmp_path / "cache",
        min_free_bytes=0,
    )
    assert len(list(files)) == 6
    asked, left = type(store).info, [ConnectionResetError() for _ in range(3)]

    def info(self: object, path: str, **options: object) -> object:
        if left:
            raise left.pop()
        return asked(self, path, **options)

    monkeypatch.setattr(type(store), "info", info)
    before = files.stats()
    assert len(list(files)) == 6
    since = files.stats().minus(before)
    assert (since.hits, since.retries) == (6, 3)
