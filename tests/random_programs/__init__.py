"""Compare random pipelines, schedules, training steps and ops with dense ones (docs/design/tests.md)."""
