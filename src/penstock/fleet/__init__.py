"""Many engines as one: client, control fan-out, lifecycle, supervision, launchers."""
