"""Run several host processes as one: the launcher poprun, the library popdist, and supervision."""
