"""One engine: the interface, its HTTP implementation, and how a vLLM server is launched."""
