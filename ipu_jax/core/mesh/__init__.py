"""IPUs: devices in a mesh, its axes, guards of tasks, and what processes share."""
