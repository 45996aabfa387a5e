"""How long tests wait for what must happen."""

WAIT_S = 120.0
"""A test that passes never waits it out, so it is long: the machine may be busy with other things."""
