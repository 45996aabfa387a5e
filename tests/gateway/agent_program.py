"""An agent as a command: two turns over plain HTTP, a child that would outlive it, and its output."""

import json
import os
import subprocess
import sys
import urllib.request

prompt, mode = sys.argv[1:]
child = subprocess.Popen(["sleep", "600"])
print("child", child.pid, flush=True)
messages = [{"role": "user", "content": prompt}]
for _ in range(2):
    request = urllib.request.Request(  # noqa: S310
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": os.environ["PENSTOCK_MODEL"], "messages": messages}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    answer = json.load(urllib.request.urlopen(request, timeout=60))  # noqa: S310
    text = answer["choices"][0]["message"]["content"]
    print("said", text, flush=True)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "again"}]
sys.exit(3 if mode == "fail" else 0)
