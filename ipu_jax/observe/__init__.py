"""Watch a run: traces of what each IPU ran when."""
