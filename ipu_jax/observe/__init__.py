"""Watch a run: what each IPU ran when, what became of a run, and what runs on which IPUs."""
