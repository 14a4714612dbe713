"""Bytes of ranks become lines that a person can read."""

import io
import itertools

from hypothesis import given
from hypothesis import strategies as st

from airdist.logs import STDERR, STDOUT, Console, redraws, show

LINES = st.lists(st.text(st.characters(exclude_characters="\r\n\x1b", exclude_categories=["Cs"])), max_size=8)


def shown(pieces):
    return "".join(text for _, text in pieces)


def feed_in_pieces(console, data, cuts):
    pieces = []
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        pieces += console.feed(1, STDOUT, data[start:end])
    return pieces + console.close()


@given(LINES, st.lists(st.integers(0, 1000), max_size=6))
def test_lines_come_out_whole_with_their_prefix_however_the_bytes_are_cut(lines, cuts):
    data = "".join(f"{line}\n" for line in lines).encode()
    out = shown(feed_in_pieces(Console(2, "all"), data, cuts))
    assert out == "".join(f"[rank 1] {line}\n" for line in lines)


@given(
    st.lists(
        st.text(st.characters(exclude_characters="\r\n\x1b", exclude_categories=["C", "Z"]), min_size=1),
        min_size=1,
        max_size=6,
    ),
    st.lists(st.integers(0, 1000), max_size=6),
)
def test_of_a_progress_bar_only_the_last_state_becomes_a_line(states, cuts):
    data = ("".join(f"\r{state}" for state in states) + "\n").encode()
    out = shown(feed_in_pieces(Console(2, "all"), data, cuts))
    assert out == f"[rank 1] {states[-1]}\n"


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([STDOUT, STDERR]), st.binary(max_size=50)), max_size=20))
def test_no_bytes_are_too_odd_and_every_piece_of_a_line_ends_it(feeds):
    console = Console(3, "all", live=False)
    pieces = [piece for feed in feeds for piece in console.feed(*feed)] + console.close()
    assert all(text.endswith("\n") for _, text in pieces)


def test_windows_line_ends_are_line_ends():
    assert shown(Console(1).feed(0, STDOUT, b"a\r\nb\r\n")) == "a\nb\n"


def test_broken_utf8_is_replaced_and_split_utf8_is_not():
    console = Console(1)
    assert console.feed(0, STDOUT, "é".encode()[:1]) == []
    assert shown(console.feed(0, STDOUT, "é".encode()[1:] + b"\xff\n")) == "é\ufffd\n"


def test_a_single_rank_needs_no_prefix():
    assert Console(1).feed(0, STDERR, b"x\n") == [(STDERR, "x\n")]


def test_modes_choose_what_is_displayed_and_count_what_is_not():
    def lines(mode):
        console = Console(2, mode)
        text = "".join(shown(console.feed(rank, stream, b"x\n")) for rank in (0, 1) for stream in (STDOUT, STDERR))
        return text.count("x"), console.hidden_lines

    assert [lines(mode) for mode in ("all", "default", "rank0", "none")] == [(4, 0), (3, 1), (2, 2), (0, 4)]


def test_a_bar_is_redrawn_at_most_five_times_a_second_and_wiped_before_a_line():
    console = Console(2, "all")
    console.feed(0, STDERR, b"\r 10%")
    assert console.tick(now=100.0) == [(STDERR, "[rank 0]  10%")]
    console.feed(0, STDERR, b"\r 20%")
    assert console.tick(now=100.1) == []
    redraw = shown(console.tick(now=100.3))
    assert redraw.startswith("\r")
    assert redraw.endswith("[rank 0]  20%")
    line = shown(console.feed(1, STDOUT, b"hello\n"))
    assert line.endswith("\r[rank 1] hello\n")
    assert shown(console.tick(now=100.6)) == "[rank 0]  20%"


def test_of_several_bars_the_lowest_ranks_is_drawn():
    console = Console(3, "all")
    console.feed(2, STDERR, b"\rtwo")
    console.feed(1, STDERR, b"\rone")
    assert console.tick(now=1.0) == [(STDERR, "[rank 1] one")]


def test_where_nothing_can_be_redrawn_only_the_final_state_appears():
    console = Console(1, live=False)
    console.feed(0, STDERR, b"\r 10%")
    assert console.tick(now=1.0) == []
    assert console.feed(0, STDERR, b"\r100%\n") == [(STDERR, "100%\n")]


def test_a_bar_that_wipes_itself_out_leaves_no_line():
    console = Console(1)
    console.feed(0, STDERR, b"\r 10%\r     \r")
    assert shown(console.feed(0, STDERR, b"\n")) == ""
    assert shown(console.feed(0, STDERR, b"\r 10%\r     \rdone\n")) == "done\n"


def test_a_line_without_end_does_not_fill_the_memory():
    console = Console(1)
    text = "".join(shown(console.feed(0, STDOUT, b"x" * 10_000)) for _ in range(20))
    assert text.count("x") > 100_000


def test_show_goes_to_the_stream_of_the_moment(capsys):
    show([(STDOUT, "out\n"), (STDERR, "err\n")])
    assert capsys.readouterr() == ("out\n", "err\n")


def test_a_display_that_cannot_spell_or_is_closed_ends_nothing(monkeypatch):
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", ascii_only)
    show([(STDOUT, "é█\n")])
    assert ascii_only.buffer.getvalue() == b"??\n"
    ascii_only.close()
    show([(STDOUT, "more\n")])


def test_a_file_cannot_redraw(tmp_path):
    with (tmp_path / "file").open("w") as file:
        assert not redraws(file)
