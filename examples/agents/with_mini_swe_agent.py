"""mini-swe-agent, whose one tool is a shell, over chat completions. It ends by a command that says so."""

import os

os.environ |= {"MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

SYSTEM = "You work in a shell. When you are done, run `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo ANSWER`."

# The gateway's address and key are in OPENAI_API_BASE and OPENAI_API_KEY.
model = LitellmModel(model_name=f"openai/{os.environ['PENSTOCK_MODEL']}", cost_tracking="ignore_errors")
agent = DefaultAgent(
    model, LocalEnvironment(), system_template=SYSTEM, instance_template="{{task}}", step_limit=16, cost_limit=0
)
print(agent.run(os.environ["PENSTOCK_PROMPT"])["submission"])
