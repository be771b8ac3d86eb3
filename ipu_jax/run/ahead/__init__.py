"""Compile programs for chips that are not there, and say what they would need and cost."""
