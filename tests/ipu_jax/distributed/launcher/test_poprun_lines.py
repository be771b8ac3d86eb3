"""Test how a stream is cut into lines and passing states, and how they are drawn: pure functions, given any bytes."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_jax.distributed.launcher.lines import LONGEST, PART_AFTER, STATE_AFTER, Splitter
from ipu_jax.distributed.launcher.screen import EVERY, Screen, fitting

TEXT = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"\xff", b" 10%", b""]), max_size=30).map(b"".join)


def cut(text):
    """Cut a text at arbitrary places."""
    return st.lists(st.integers(0, len(text)), max_size=8).map(
        lambda places: [text[a:b] for a, b in zip([0, *sorted(places)], [*sorted(places), len(text)], strict=True)]
    )


def pieces_of(parts, seconds=0.0):
    splitter, pieces = Splitter(), []
    for i, part in enumerate(parts):
        pieces += splitter.feed(part, i * seconds)
        pieces += splitter.tick((i + 0.99) * seconds) if seconds else []
    return singly(pieces + splitter.finish())


def singly(pieces):
    """Return pieces with one line each."""
    return [
        dataclasses.replace(piece, text=line, goes_on=piece.goes_on and i == 0)
        for piece in pieces
        for i, line in enumerate(piece.text.split(b"\n"))
    ]


def joined(pieces):
    """Return the lines and states, with the parts of a line put together."""
    whole, rest = [], b""
    for piece in pieces:
        assert piece.goes_on == bool(rest) or not rest
        if piece.kind == "part":
            rest += piece.text
        else:
            whole.append((piece.kind, rest + piece.text))
            rest = b""
    return whole + ([("line", rest)] if rest else [])


@given(st.data())
def test_where_a_stream_is_cut_does_not_matter(data):
    text = data.draw(TEXT)
    assert pieces_of(data.draw(cut(text))) == pieces_of([text])


@given(TEXT)
def test_text_without_carriage_returns_comes_out_as_its_lines(text):
    text = text.replace(b"\r", b"")
    lines = text.split(b"\n")
    expected = lines[:-1] + ([lines[-1]] if lines[-1] else [])
    assert [piece.text for piece in pieces_of([text])] == expected
    assert {piece.kind for piece in pieces_of([text])} <= {"line"}


@given(st.data())
def test_waiting_cuts_lines_but_loses_and_adds_nothing(data):
    text = data.draw(TEXT).replace(b"\r", b"")
    slow = joined(pieces_of(data.draw(cut(text)), seconds=2 * PART_AFTER))
    assert b"".join(line for _, line in slow) == text.replace(b"\n", b"")


def kinds(text):
    return [(piece.kind, piece.text) for piece in pieces_of([text])]


def test_a_bar_is_passing_until_its_newline():
    assert kinds(b"\r  0%\r 50%\r100%\nnext\n") == [
        ("state", b"  0%"),
        ("state", b" 50%"),
        ("line", b"100%"),
        ("line", b"next"),
    ]
    # the other way to write one
    assert kinds(b"  0%\r 50%\r100%\r") == [("state", b"  0%"), ("state", b" 50%"), ("state", b"100%")]
    assert kinds(b" 50%\r\n") == [("line", b" 50%")]


def test_a_newline_after_a_state_leaves_it_standing():
    splitter = Splitter()
    assert splitter.feed(b"50%\r", 0) == []
    assert [piece.kind for piece in splitter.tick(STATE_AFTER)] == ["state"]
    assert [(piece.kind, piece.text) for piece in splitter.feed(b"\n", 1)] == [("line", b"50%")]


def test_a_state_is_handed_on_once_and_soon():
    splitter = Splitter()
    splitter.feed(b"\r 10%", 0)
    assert splitter.tick(STATE_AFTER / 2) == []
    assert [piece.text for piece in splitter.tick(STATE_AFTER)] == [b" 10%"]
    assert splitter.tick(100) == []
    assert splitter.feed(b"\r 20%", 101) == []
    assert [piece.text for piece in splitter.feed(b"\n", 101)] == [b" 20%"]


def test_a_line_without_an_end_is_handed_on_in_parts():
    splitter = Splitter()
    splitter.feed(b"loading...", 0)
    (part,) = splitter.tick(PART_AFTER)
    assert (part.kind, part.text, part.goes_on) == ("part", b"loading...", False)
    (line,) = splitter.feed(b"done\n", 5)
    assert (line.kind, line.text, line.goes_on) == ("line", b"done", True)
    (long,) = Splitter().feed(b"x" * (LONGEST + 1), 0)
    assert long.kind == "part"


def test_lines_are_drawn_above_the_bar_of_a_terminal():
    screen = Screen(columns=40)
    assert screen.state("0 stderr", b"[1,0]<stderr>:", b" 10%", 0) == b"\r[1,0]<stderr>: 10%"
    drawn = screen.line("1 stdout", b"[1,1]<stdout>:", b"hello")
    assert drawn == b"\r\x1b[K[1,1]<stdout>:hello\n\r[1,0]<stderr>: 10%"
    assert screen.line("0 stderr", b"[1,0]<stderr>:", b"100%") == b"\r\x1b[K[1,0]<stderr>:100%\n"
    assert screen.line("1 stdout", b"[1,1]<stdout>:", b"bye") == b"[1,1]<stdout>:bye\n"
    assert screen.close() == b""


def test_a_bar_that_wipes_itself_is_gone():
    screen = Screen(columns=40)
    screen.state("0 stderr", b"t:", b" 10%", 0)
    assert screen.state("0 stderr", b"t:", b"     ", 1) == b"\r\x1b[K"
    assert screen.line("a", b"t:", b"x") == b"t:x\n"


def test_elsewhere_a_state_is_a_line_now_and_then_and_the_last():
    screen = Screen(columns=None)
    assert screen.state("0 stderr", b"t:", b"1%", 0) == b"t:1%\n"
    assert screen.state("0 stderr", b"t:", b"2%", 1) == b""
    assert screen.state("0 stderr", b"t:", b"3%", EVERY) == b"t:3%\n"
    assert screen.state("0 stderr", b"t:", b"4%", EVERY + 1) == b""
    assert screen.finish("0 stderr") == b"t:4%\n"
    assert screen.finish("0 stderr") == b""


@pytest.mark.parametrize("columns", [None, 80])
def test_no_line_is_glued_to_one_without_an_end(columns):
    screen = Screen(columns)
    out = screen.part("0 stdout", b"[0]", b"loading")
    out += screen.part("0 stdout", b"[0]", b"...", goes_on=True)
    out += screen.line("1 stdout", b"[1]", b"other")
    out += screen.line("0 stdout", b"[0]", b"done", goes_on=True)
    assert out == b"[0]loading...\n[1]other\n[0]done\n"
    out = screen.part("0 stdout", b"[0]", b"loading") + screen.line("0 stdout", b"[0]", b" done", goes_on=True)
    assert out == b"[0]loading done\n"
    assert screen.part("0 stdout", b"[0]", b"x") + screen.close() == b"[0]x\n"
    out = screen.part("0 stdout", b"[0]", b"a") + screen.part("1 stdout", b"[1]", b"b")
    assert out + screen.line("0 stdout", b"[0]", b"c", goes_on=True) == b"[0]a\n[1]b\n[0]c\n"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["line", "part", "state"]),
            st.sampled_from(["0", "1", "2"]),
            st.sampled_from([b"abc", b"50%", b"", b"   ", b"\xe2\x96\x88" * 30]),
        ),
        max_size=30,
    ),
    st.sampled_from([None, 20]),
)
def test_every_row_begins_with_a_tag_and_every_line_is_there(events, columns):
    screen, out, lines = Screen(columns), b"", []
    opened = set()
    for i, (kind, key, text) in enumerate(events):
        tag = b"<" + key.encode() + b">"
        if kind == "state":
            out += screen.state(key, tag, text, float(i))
        else:
            out += getattr(screen, kind)(key, tag, text, goes_on=key in opened)
            (opened.add if kind == "part" else opened.discard)(key)
            lines.append(text)
    out += screen.close()
    # what a terminal shows in the end: a bar that is cleared is not there
    shown = re.sub(rb"\r[^\n\r]*\r\x1b\[K", b"", out)
    rows = shown.split(b"\n")
    assert rows.pop() == b""
    assert all(re.match(rb"\r?<[012]>", row) for row in rows)
    for text in lines:
        assert text in shown


def test_a_bar_is_as_wide_as_the_terminal_at_most():
    assert fitting(b"x" * 50, 10) == b"x" * 10
    assert fitting("\u754c".encode() * 10, 7).decode() == "\u754c" * 3
    assert fitting(b"\x1b[31mred\x1b[0m", 3) == b"\x1b[31mred\x1b[0m"
    assert fitting(b"\xff\xfe", 1) == b"\xff"
