#!/bin/sh
# Claude Code (npm: @anthropic-ai/claude-code) over Anthropic messages. Run it in a container: it may use its shell.
set -eu
CLAUDE_CONFIG_DIR=$(mktemp -d "${TMPDIR:-/tmp}/claude-XXXXXX")
export CLAUDE_CONFIG_DIR DISABLE_AUTOUPDATER=1 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
trap 'rm -rf "$CLAUDE_CONFIG_DIR"' EXIT
# ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY are the gateway's; the smaller model of side jobs is the same one.
export ANTHROPIC_MODEL="$PENSTOCK_MODEL" ANTHROPIC_SMALL_FAST_MODEL="$PENSTOCK_MODEL"
claude --print --allowedTools Bash -- "$PENSTOCK_PROMPT" </dev/null
