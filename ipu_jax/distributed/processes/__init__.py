"""Publish the state of a running process for poprun and `ipu-monitor`. Every module may import this package.

identity.py     tells a process from a later one with the same number
beacons.py      the page that steps write to: progress, and what the process is doing
own_record.py   the file that `ipu-monitor` finds: a beacon, and the command, IPUs and stages
jax_facts.py    what a record contains that jax knows: devices, stages, compilations, examples, memory
"""
