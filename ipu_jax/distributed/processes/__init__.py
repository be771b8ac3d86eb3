"""Publish the state of a running process for poprun and `ipu-monitor`.

identity.py     tells a process from a later one with the same number
beacons.py      the page that steps write to: progress, and what the process is doing
record.py       the file that `ipu-monitor` finds: a beacon, and the command, IPUs and stages
flight.py       the tick in which each IPU is, if a launcher wants to know
listener.py     hears what the library says of its steps and its other work (`base/facts.py`), and writes it there
"""
