"""vLLM without our plugin: what it is, how its requests go on, how it is controlled."""
