"""Which engine serves a request: pure functions of a frozen snapshot and of what the request's headers say."""
