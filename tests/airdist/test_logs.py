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
    pieces = console.feed(0, STDERR, b"\r100%\n") + console.tick(now=2.0) + console.tick(now=2.3)
    assert pieces == [(STDERR, "100%\n")]


OUTER, INNER, UP = b"\router %d/2", b"\n\rinner %d/9\x1b[A", b"\x1b[A"


def test_bars_below_bars_are_drawn_side_by_side_and_leave_one_line_each():
    # Given what tqdm writes for two bars, the inner one of which goes when it is done.
    console = Console(2, "all")
    pieces = []
    for epoch in range(2):
        pieces += console.feed(0, STDERR, OUTER % epoch)
        for step in range(10):
            pieces += console.feed(0, STDERR, INNER % step)
        assert pieces == []
        assert console.tick(now=10.0 + epoch)[-1] == (STDERR, f"[rank 0] outer {epoch}/2  inner 9/9")
        pieces += console.feed(0, STDERR, b"\n\r         \r\x1b[A")
    pieces += console.feed(0, STDERR, OUTER % 2 + b"\n")
    pieces += console.feed(0, STDOUT, b"done\n")
    assert shown(pieces).rpartition("\r")[2] == "[rank 0] outer 2/2\n[rank 0] done\n"
    assert console.close() == []


def test_an_inner_bar_that_stays_is_a_line_and_the_outer_one_goes_on_below_it():
    console = Console(1)
    console.feed(0, STDERR, OUTER % 0 + INNER % 5)
    pieces = console.feed(0, STDERR, b"\rinner 9/9\n" + OUTER % 1)
    pieces += console.tick(now=1.0) + console.tick(now=1.3)
    assert pieces == [(STDERR, "inner 9/9\n"), (STDERR, "outer 1/2")]


def test_bars_one_after_the_other_end_as_lines_in_time():
    console = Console(1)
    console.feed(0, STDERR, b"\rfirst 9/9\n\rsecond 0/9")
    assert console.tick(now=1.0) == []
    console.feed(0, STDERR, b"\rsecond 1/9")
    assert console.tick(now=1.3) == [(STDERR, "first 9/9\n"), (STDERR, "second 1/9")]


def test_text_among_bars_comes_at_once():
    console = Console(1)
    console.feed(0, STDERR, b"\rbar 1/9")
    assert console.feed(0, STDERR, b"\r        \rwritten\n\rbar 1/9") == [(STDERR, "written\n")]


def test_a_line_of_bars_is_no_wider_than_the_display():
    console = Console(1, columns=20)
    console.feed(0, STDERR, b"\r" + b"=" * 100)
    assert console.tick(now=1.0) == [(STDERR, "=" * 19)]


def test_a_move_that_is_cut_between_two_reads_is_still_a_move():
    console = Console(1)
    console.feed(0, STDERR, OUTER % 1 + (INNER % 1)[:-2])
    console.feed(0, STDERR, b"[A" + OUTER % 2)
    assert console.close() == [(STDERR, "outer 2/2\ninner 1/9\n")]


@given(st.lists(st.sampled_from([b"\n", b"\r", UP, b"\x1b[", b"x", b"   ", b"\xff"]), max_size=40), st.data())
def test_no_moves_are_too_odd_and_what_comes_after_them_is_shown(parts, data):
    console = Console(1)
    pieces = []
    for now, part in enumerate(parts):
        pieces += console.feed(0, STDERR, part)
        if data.draw(st.booleans()):
            console.tick(float(now))
    pieces += console.feed(0, STDERR, b"\nlast\n") + console.close()
    assert "last\n" in shown(pieces)


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
