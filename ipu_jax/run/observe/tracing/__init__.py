"""Record what each IPU ran when, and compare it with the plan."""
