"""Random programs against dense ones: pipelines, schedules, training steps and ops (docs/design/random-programs.md)."""
