"""The only code that runs inside vLLM, hung in by its own extension points."""
