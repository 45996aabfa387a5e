"""A gateway for any agent: chat, Responses and Anthropic calls in, exact token rows out."""
