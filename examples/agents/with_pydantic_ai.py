"""An agent of pydantic-ai with one tool, over the Responses API; `chat` as its argument: over chat completions."""

import os
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

wire = OpenAIChatModel if sys.argv[1:] == ["chat"] else OpenAIResponsesModel
# The gateway's address and key are in OPENAI_BASE_URL and OPENAI_API_KEY.
agent = Agent(wire(os.environ["PENSTOCK_MODEL"]), instructions="Add with the tool, then say the sum.")


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


print(agent.run_sync(os.environ["PENSTOCK_PROMPT"]).output)
