"""Several host processes as one run: the launcher poprun, the library popdist, and supervision."""
