"""An agent of Anthropic's own SDK, whose tool runner calls the tools, over messages."""

import os

from anthropic import Anthropic, beta_tool


@beta_tool
def add(a: int, b: int) -> str:
    """Add two whole numbers.

    Args:
        a: the first.
        b: the second.
    """
    return str(a + b)


# The gateway's address and key are in ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY.
runner = Anthropic().beta.messages.tool_runner(
    model=os.environ["PENSTOCK_MODEL"],
    max_tokens=1000,
    max_iterations=8,
    tools=[add],
    messages=[{"role": "user", "content": os.environ["PENSTOCK_PROMPT"]}],
)
last = runner.until_done()
print("".join(block.text for block in last.content if block.type == "text"))
