"""What an IPU runs for its stages: segments of neighbouring stages, traced once, with their backward passes."""
