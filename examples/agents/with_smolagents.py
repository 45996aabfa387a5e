"""A tool-calling agent of smolagents with one tool, over chat completions. It ends by a call of `final_answer`."""

import os

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two whole numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


model = OpenAIModel(
    os.environ["PENSTOCK_MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = ToolCallingAgent(tools=[add], model=model, max_steps=8, verbosity_level=0)
print(agent.run(os.environ["PENSTOCK_PROMPT"]))
