"""Run the staged scan: one `lax.scan` over ticks, in which every IPU runs its own tasks and exchanges messages."""
