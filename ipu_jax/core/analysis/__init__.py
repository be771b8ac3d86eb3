"""Analyse a model before it runs: FLOPs, bytes, an even split of its layers, and a report per IPU."""
