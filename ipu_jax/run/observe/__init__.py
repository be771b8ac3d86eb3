"""Watch a run: what each IPU ran when, how the run went, and which processes use which IPUs."""
