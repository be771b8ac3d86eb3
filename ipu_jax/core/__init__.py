"""What the IPUs run: stages, their placement and schedule, the staged scan, the weights, and the proof."""
