"""What travels to the ranks, and what is said of what cannot."""

import linecache
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from airdist import PayloadError, payload
from airdist.captures import captures, largest, unpicklable
from airdist.decorator import distributed

MODULE_LOCK = threading.Lock()


def test_a_payload_is_a_context_definitions_and_a_call():
    data = payload.pack(sorted, ([2, 1],), {"reverse": False})
    with_context = _file(data)
    context = pickle.load(with_context)
    definitions, call = payload.read(with_context)
    assert all(Path(entry).is_absolute() for entry in context.path)
    assert definitions == {}
    assert call() == [1, 2]


@pytest.mark.parametrize(
    ("name", "travels"),
    [("/tmp/ipykernel_1/2.py", True), ("<ipython-input-1-a>", True), ("<attrs generated init x>", False)],
)
def test_the_lines_of_cells_travel_and_those_that_libraries_generate_do_not(name, travels, monkeypatch):
    monkeypatch.setitem(linecache.cache, name, (4, None, ["x=1\n"], name))
    assert (name in payload.Context.of_this_process().sources) == travels


def test_a_function_of_an_importable_module_travels_as_its_name(tmp_path, monkeypatch):
    # Given a module whose function uses a lock of the module, which cannot be pickled.
    module = _module(tmp_path, monkeypatch, "importable_one", lock=True)
    assert payload.Name.of(module.plain) == payload.Name("importable_one", "plain")
    assert payload.Name.of(module.decorated.__wrapped__).resolve() is module.decorated.__wrapped__
    assert payload.Name.of(module.Holder.method) == payload.Name("importable_one", "Holder.method")
    assert len(payload.pack(module.plain, (), {})) < 50_000


def test_a_function_of_a_module_that_ranks_cannot_import_travels_by_value(tmp_path, monkeypatch):
    module = _module(tmp_path, monkeypatch, "not_importable", lock=False)
    sys.path.remove(str(tmp_path))
    assert payload.Name.of(module.plain) is None
    data = payload.pack(module.plain, (module.Holder(),), {})
    # Then an interpreter that has never heard of the module can call it, the class of the argument included.
    out = _load_elsewhere(tmp_path, data)
    assert out == "plain called with Holder"


def test_another_file_of_the_same_name_does_not_count_as_the_module(tmp_path, monkeypatch):
    module = _module(tmp_path, monkeypatch, "shadowed", lock=False)
    other = tmp_path / "first"
    other.mkdir()
    (other / "shadowed.py").write_text("")
    monkeypatch.syspath_prepend(str(other))
    assert not payload.importable("shadowed")
    assert payload.Name.of(module.plain) is None


def test_importable_asks_the_importer_and_not_the_loaded_modules():
    assert payload.importable("os.path".partition(".")[0])
    assert payload.importable("xml.etree.ElementTree")
    assert not payload.importable("no_such_module_at_all")
    assert not payload.importable("xml.no_such_part")


def test_code_that_no_file_holds_travels_with_its_source_so_that_tracebacks_show_it(tmp_path):
    # Given a function of a notebook cell: a code name that is no file, its source known to linecache.
    import linecache

    source = "def cell_function(_=None):\n    raise ValueError('in a cell')\n"
    linecache.cache["<ipython-input-1-cell>"] = (
        len(source),
        None,
        source.splitlines(keepends=True),
        "<ipython-input-1-cell>",
    )
    namespace = {"__name__": "__main__"}
    exec(compile(source, "<ipython-input-1-cell>", "exec"), namespace)
    out = _load_elsewhere(tmp_path, payload.pack(namespace["cell_function"], (None,), {}))
    assert 'File "<ipython-input-1-cell>", line 2, in cell_function' in out
    assert "raise ValueError('in a cell')" in out


def test_the_culprit_is_named_with_its_path():
    lock = threading.Lock()
    config = {"deep": [1, {"lock": lock}]}

    def closure():
        return lock

    def nested():
        return config

    def uses_global():
        return MODULE_LOCK

    for function, args, kwargs, words in [
        (closure, (), {}, r"closure variable 'lock' \(type _thread.lock\)"),
        (nested, (), {}, r"closure variable 'config' -> \['deep'\] -> \[1\] -> \['lock'\] \(type _thread.lock\)"),
        (uses_global, (), {}, r"global 'MODULE_LOCK' \(type _thread.lock\)"),
        (len, (lock,), {}, r"argument 0 \(type _thread.lock\)"),
        (len, (), {"obj": [lock]}, r"argument 'obj' -> \[0\] \(type _thread.lock\)"),
    ]:
        with pytest.raises(PayloadError, match=words):
            payload.pack(function, args, kwargs)


def test_a_cycle_does_not_keep_the_search_going():
    loop = [threading.Lock()]
    loop.insert(0, loop)
    assert "_thread.lock" in unpicklable([("loop", loop)])


def test_a_large_payload_warns_with_the_names_of_its_largest_parts(monkeypatch):
    big = np.zeros(300_000, dtype=np.uint8)
    small = [1]

    def function():
        return big, small

    monkeypatch.setattr(payload, "WARN_BYTES", 100_000)
    with pytest.warns(UserWarning, match=r"closure variable 'big' 0\.3 MiB") as caught:
        payload.pack(function, (), {})
    assert caught[0].filename == __file__
    monkeypatch.setattr(payload, "LIMIT_BYTES", 200_000)
    with pytest.raises(PayloadError, match=r"'big'.*limit is 0\.2 MiB"):
        payload.pack(function, (), {})


def test_captures_are_closure_globals_used_and_defaults():
    here = 1

    def function(a, b=here, *, c=MODULE_LOCK):
        def inner():
            return np.zeros, here

        return inner

    names = [name for name, _ in captures(function)]
    assert names == ["closure variable 'here'", "global 'np'", "default value 0", "default of 'c'"]
    assert [name for name, _ in captures(distributed(function))] == names


def test_the_largest_come_first():
    assert [name for name, _ in largest([("a", "x"), ("b", "x" * 100), ("c", "x" * 10)])] == ["b", "c", "a"]


def _file(data):
    import io

    return io.BytesIO(data)


def _module(tmp_path, monkeypatch, name, *, lock):
    (tmp_path / f"{name}.py").write_text(
        f"""
import threading
from airdist import distributed
lock = {"threading.Lock()" if lock else "None"}
def plain(held=None):
    with lock or threading.Lock():
        return f"plain called with {{type(held).__name__}}"
@distributed
def decorated():
    return lock
class Holder:
    def method(self):
        return lock
"""
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return __import__(name)


def _load_elsewhere(tmp_path, data):
    """Run a payload in an interpreter without this one's modules; what it returns, or the traceback."""
    (tmp_path / "payload").write_bytes(data)
    program = """
import pickle, traceback
from airdist import payload
with open("payload", "rb") as file:
    pickle.load(file).enter()
    _, call = payload.read(file)
try:
    print(call())
except Exception:
    print(traceback.format_exc())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()
