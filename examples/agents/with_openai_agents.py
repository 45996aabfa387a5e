"""An agent of openai-agents with one tool, over the Responses API; `chat` as its argument: over chat completions."""

import asyncio
import os
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


async def main() -> None:
    """Do the task of this episode; the gateway's address and key are in OPENAI_BASE_URL and OPENAI_API_KEY."""
    set_tracing_disabled(True)
    wire = OpenAIChatCompletionsModel if sys.argv[1:] == ["chat"] else OpenAIResponsesModel
    model = wire(model=os.environ["PENSTOCK_MODEL"], openai_client=AsyncOpenAI())
    agent = Agent(
        name="adder",
        instructions="Add with the tool, then say the sum.",
        model=model,
        model_settings=ModelSettings(tool_choice="required"),  # of the first turn; then the model may answer
        tools=[add],
    )
    result = await Runner.run(agent, os.environ["PENSTOCK_PROMPT"], max_turns=8)
    print(result.final_output)


asyncio.run(main())
