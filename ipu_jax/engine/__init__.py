"""The staged scan: one `lax.scan` over ticks in which every IPU does its own tasks and exchanges messages."""
