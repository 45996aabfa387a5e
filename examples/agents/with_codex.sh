#!/bin/sh
# Codex CLI (npm: @openai/codex) over the Responses API. Run it in a container: its commands are not sandboxed here.
set -eu
CODEX_HOME=$(mktemp -d "${TMPDIR:-/tmp}/codex-XXXXXX")
export CODEX_HOME
trap 'rm -rf "$CODEX_HOME"' EXIT
cat >"$CODEX_HOME/config.toml" <<CONFIG
model = "$PENSTOCK_MODEL"
model_provider = "penstock"
approval_policy = "never"
sandbox_mode = "danger-full-access"
web_search = "disabled"
[model_providers.penstock]
name = "penstock"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
[analytics]
enabled = false
CONFIG
codex exec --skip-git-repo-check "$PENSTOCK_PROMPT" </dev/null
