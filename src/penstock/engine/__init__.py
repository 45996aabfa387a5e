"""One engine: the interface, its HTTP implementation, and the launch of a vLLM server."""
