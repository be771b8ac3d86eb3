"""Trace what an IPU runs for its stages: segments of neighbouring stages, with their backward passes."""
