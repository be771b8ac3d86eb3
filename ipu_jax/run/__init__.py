"""What a person starts and looks at: the loop around a training step, its record, pictures, and the monitor."""
