"""Test how a stream is cut into lines and passing states, and how they are drawn: pure functions, given any bytes."""

import dataclasses
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_jax.distributed.launcher.display import Display
from ipu_jax.distributed.launcher.lines import EVERY, LONGEST, PART_AFTER, STATE_AFTER, Screen, Splitter, fitting

TEXT = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"\xff", b" 10%", b""]), max_size=30).map(b"".join)


def cut(text):
    """Cut a text at arbitrary places."""
    return st.lists(st.integers(0, len(text)), max_size=8).map(
        lambda places: [text[a:b] for a, b in zip([0, *sorted(places)], [*sorted(places), len(text)], strict=True)]
    )


def pieces_of(parts, seconds=0.0):
    splitter, snippets = Splitter(), []
    for i, part in enumerate(parts):
        snippets += splitter.feed(part, i * seconds)
        snippets += splitter.tick((i + 0.99) * seconds) if seconds else []
    return singly(snippets + splitter.finish())


def singly(snippets):
    """Return snippets with one line each."""
    return [
        dataclasses.replace(piece, text=line, goes_on=piece.goes_on and i == 0)
        for piece in snippets
        for i, line in enumerate(piece.text.split(b"\n"))
    ]


def joined(snippets):
    """Return the lines and states, with the parts of a line put together."""
    whole, rest = [], b""
    for piece in snippets:
        assert piece.goes_on == bool(rest) or not rest
        if piece.kind == "part":
            rest += piece.text
        else:
            whole.append((piece.kind, rest + piece.text))
            rest = b""
    return whole + ([("line", rest)] if rest else [])


@given(st.data())
def test_waiting_cuts_lines_but_loses_and_adds_nothing(data):
    text = data.draw(TEXT).replace(b"\r", b"")
    slow = joined(pieces_of(data.draw(cut(text)), seconds=2 * PART_AFTER))
    assert b"".join(line for _, line in slow) == text.replace(b"\n", b"")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"\r  0%\r 50%\r100%\nnext\n", "state:  0% state: 50% line:100% line:next"),
        (b"  0%\r 50%\r100%\r", "state:  0% state: 50% state:100%"),  # the other way to write one
        (b" 50%\r\n", "line: 50%"),
    ],
)
def test_a_bar_is_passing_until_its_newline(text, expected):
    assert " ".join(f"{piece.kind}:{piece.text.decode()}" for piece in pieces_of([text])) == expected


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


def test_what_follows_a_newline_is_a_state_where_a_bar_is_drawn():
    splitter = Splitter()
    splitter.feed(b" 10%\r\x1b[2Ka message\n 20%", 0)  # as rich prints above its bar
    assert [(piece.kind, piece.text) for piece in splitter.tick(PART_AFTER)] == [("state", b" 20%")]
    assert [(piece.kind, piece.text) for piece in splitter.feed(b"\n", 5)] == [("line", b" 20%")]


def test_a_newline_of_gloo_leaves_no_state_behind():
    noise = b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"
    writer = Written()
    shown = display(writer)
    shown._screens["stdout"].columns = shown._screens["stderr"].columns = 40
    shown.show(0, "stdout", b"\r 10%\r 20%" + noise + b"\r 30%\r")
    shown.show(0, "stdout", b"done\n")
    rows = re.sub(rb"\r[^\n\r]*\r\x1b\[K", b"", writer.data)
    assert rows == b"[1,0]<stdout>:done\n"


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


class Written:
    """Takes the place of an `OutputWriter`."""

    def __init__(self):
        self.data = b""
        self.bytes = 0

    def put(self, handle, data):
        self.bytes += len(data)
        self.data = (self.data + data)[-(1 << 12) :]


def display(writer):
    shown = Display(writer, only=None, tags="full", timestamps=False, folder=None)
    shown.begin(0)
    return shown


def seconds(function, *arguments):
    """Return the least CPU time of some calls."""
    times = []
    for _ in range(5):
        begun = time.process_time()
        for _ in range(8):
            function(*arguments)
        times.append(time.process_time() - begun)
    return min(times)


FLOODS = {
    "no newline": b"x" * (1 << 16),
    "lines": (b"y" * 79 + b"\n") * 820,
    "lines with CRLF": (b"y" * 78 + b"\r\n") * 820,
    "bars": b"".join(b"\r%5d|%b|" % (i, b"#" * 73) for i in range(820)),
    "bars of blocks": b"".join(b"\r%5d|%b|" % (i, "\u2588".encode() * 24) for i in range(820)),
    "colours": (b"\x1b[31m" + b"y" * 70 + b"\x1b[0m\n") * 820,
    "commands": (b"\x1b[2K" + b"y" * 75 + b"\n") * 820,
    "titles": (b"\x1b]0;title\x07" + b"y" * 69 + b"\n") * 820,
    "commands with CRLF": (b"\x1b[1A\x1b[2K" + b"y" * 70 + b"\r\n") * 820,
    "bars with commands": b"".join(b"\r\x1b[K%5d|%b|" % (i, b"#" * 70) for i in range(820)),
}


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_is_shown_in_a_few_times_the_time_of_a_copy(kind):
    data, writer = FLOODS[kind], Written()
    shown, table = display(writer), bytes(range(256))
    # 3 to 19 times; to handle each line or bar on its own took 64 to 193, to search again what has no end 285
    assert seconds(shown.show, 0, "stdout", data) < 40 * seconds(data.translate, table)
    shown.show(0, "stdout", b"")
    assert writer.bytes >= (1 if "bars" in kind else 5 * 8 * len(data))


TOKENS = [b"a", b"50%", b" ", b"\n", b"\r", b"\r\n", b"\r  \r", b"\b", b"\x1b", b"[2J", b"\x1b[31m", b"\x1b]0;t"]
TOKENS += [b"\x07", b"\xc2", b"\x9b", "\u2588".encode(), b"[Gloo] Rank ", b"is connected to 1 peer ranks"]


@given(st.lists(st.sampled_from(TOKENS), max_size=40).map(b"".join), st.sampled_from(["stdout", "stderr"]))
def test_a_stream_looks_the_same_read_at_once_or_byte_by_byte(text, stream):
    seen, tails = [], []
    for parts in ([text], [bytes([byte]) for byte in text]):
        writer = Written()
        shown = display(writer)
        for part in parts:
            shown.show(0, stream, part)
        shown.show(0, stream, b"")
        seen.append(writer.data)
        tails.append(shown.tail(0, stream, seen=True))
    assert seen[0] == seen[1]
    assert tails[0] == tails[1]


def test_of_bars_read_at_once_a_terminal_shows_the_last():
    writer = Written()
    shown = display(writer)
    shown.show(0, "stderr", b"")
    shown._screens["stderr"].columns = 40
    shown.show(0, "stderr", b"\r 1%\r 2%\r 3%\r ")
    assert writer.data.endswith(b"\r[1,0]<stderr>: 3%")
    shown.show(0, "stderr", b"  \r4")
    assert writer.data.endswith(b"\r\x1b[K")


def test_passing_states_of_other_instances_are_not_shown():
    writer = Written()
    shown = display(writer)
    for i in (0, 1):
        shown.show(i, "stderr", b"\r 1/3\r 2/3\r 3/3" + b"\n" * (i == 0))
        shown.show(i, "stderr", b"")
    assert writer.data == b"[1,0]<stderr>: 1/3\n[1,0]<stderr>: 3/3\n[1,1]<stderr>: 3/3\n"


def test_what_is_kept_of_a_flood_is_bounded():
    shown = display(Written())
    for _ in range(40):
        shown.show(0, "stderr", b"x" * (1 << 16))
        shown.show(0, "stderr", b"ab\n" * 1000)
    kept = shown.tail(0, seen=True)
    assert len(kept) == 20
    shown.show(0, "stderr", b"x" * (3 << 20))
    assert [len(line) for line in shown.tail(0, seen=True)][-1] == 2000


@pytest.mark.parametrize("letter", ["\u2588", "\u00e9", "\U0001f600", "\x1b[31m"])
def test_a_line_that_is_cut_is_not_cut_in_a_letter_or_a_colour(letter):
    for before in range(6):
        splitter = Splitter()
        text = b"x" * before + letter.encode() * (LONGEST // len(letter.encode()) + 3)
        (part,) = splitter.feed(text[: LONGEST + 1], 0)
        assert part.text.removeprefix(b"x" * before).replace(letter.encode(), b"") == b""
        assert b"".join([part.text, *(piece.text for piece in splitter.feed(text[LONGEST + 1 :] + b"\n", 0))]) == text


# What a terminal takes for a command, and what is shown of it. Each is between "one " and "two".
COMMANDS = {
    "title": (b"\x1b]0;mine\x07", b""),
    "title until ST": (b"\x1b]2;mine\x1b\\", b""),
    "clipboard": (b"\x1b]52;c;cm0gLXJm\x07", b""),
    "hyperlink": (b"\x1b]8;;http://a\x1b\\here\x1b]8;;\x1b\\", b"here"),
    "device control": (b"\x1bPq#0\x1b\\", b""),
    "reset": (b"\x1bc", b""),
    "character set": (b"\x1b(0", b""),
    "saved cursor": (b"\x1b7", b""),
    "where is the cursor": (b"\x1b[6n", b""),
    "which terminal": (b"\x1b[>0c", b""),
    "answerback": (b"\x05", b""),
    "window": (b"\x1b[8;1;1t", b""),
    "erase": (b"\x1b[2J", b""),
    "backspaces": (b"\b\b\b\b", b""),
    "other font": (b"\x0e", b""),
    "C1 in UTF-8": (b"\xc2\x9b2J\xc2\x9d0;t\xc2\x9c", b"2J0;t"),
    "C1 in 8 bits": (b"\x9b2J\x9d", b"2J"),
    "begun": (b"\x1b\x1b\x1b[1\x07", b""),
    "colour": (b"\x1b[1;38;5;3m", b"\x1b[1;38;5;3m"),
    "colour with colons": (b"\x1b[38:2:1:2:3m", b"\x1b[38:2:1:2:3m"),
    "letters": ("\t\u2588\u00e9\u8a13\U0001f600\u00a9".encode(), "\t\u2588\u00e9\u8a13\U0001f600\u00a9".encode()),
    "no text": (b"\xff\xfe", b"\xff\xfe"),
}


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("kind", COMMANDS)
def test_no_command_to_the_terminal_is_shown(kind, stream):
    command, left = COMMANDS[kind]
    for end in (b"\n", b"\r", b""):  # as a line, a state of a bar, and a part of a line
        writer = Written()
        shown = display(writer)
        shown.show(0, stream, b"one " + command + b"two" + end)
        shown.show(0, stream, b"")
        assert f"[1,0]<{stream}>:one ".encode() + left + b"two" in writer.data
    writer = Written()
    display(writer).say(f"one {command.decode(errors='ignore')}two\nthree")
    one, three, nothing = writer.data.split(b"\n")
    assert (three, nothing) == (b"poprun: three", b"")
    assert one == b"poprun: one " + left.decode(errors="ignore").encode() + b"two"
