"""A graph of langgraph with one tool, over chat completions; `stream` as its argument: over their streams."""

import os
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


# The gateway's address and key are in OPENAI_API_BASE and OPENAI_API_KEY.
model = ChatOpenAI(model=os.environ["PENSTOCK_MODEL"], streaming=sys.argv[1:] == ["stream"])
agent = create_react_agent(model, [add], prompt="Add with the tool, then say the sum.")
state = agent.invoke({"messages": [("user", os.environ["PENSTOCK_PROMPT"])]}, {"recursion_limit": 16})
print(state["messages"][-1].content)
