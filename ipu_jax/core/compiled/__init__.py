"""Read what XLA made of a program: its instructions, and what it put into the stages."""
