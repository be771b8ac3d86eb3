"""Pictures of schedules: what is where in time, drawn as SVG by code of our own or as a figure of matplotlib."""
