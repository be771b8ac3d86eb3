"""Trace the programs that an IPU runs: segments of neighbouring stages, with their backward passes."""
