"""A discrete-event fleet: routing policies at the scale of many GPU engines, in seconds of a laptop."""
