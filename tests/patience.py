"""How long tests wait for what must happen."""

WAIT_S = 120.0
"""A test that passes never waits it out, so it is long: the machine may be busy with other things."""

HANG_S = 30.0
"""`hang_timeout_s` where a hang must be noticed: within `WAIT_S`, and longer than a busy machine stands still."""
