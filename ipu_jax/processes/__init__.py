"""What a process says of itself while it runs, for poprun and `ipu-monitor` to read. Everything may import it.

identity.py     tells a process from a later one with the same number
beacons.py      the page that steps write to: progress, and what the process does
own_record.py   the file that `ipu-monitor` finds: a beacon, and the command, IPUs and stages
jax_facts.py    what jax knows and a record says: devices, stages, compilations, examples, memory
"""
