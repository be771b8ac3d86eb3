"""What the IPUs run: stages, their places and schedule, the staged scan, the weights, the comparison by `verify`."""
