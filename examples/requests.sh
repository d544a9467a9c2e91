#!/bin/sh
# The HTTP interface with curl: models, a chat, a streamed chat, text from a prompt, tokens, health.
# The address of the server is the first argument.
set -eu
url=${1:-http://127.0.0.1:8000}

post() {  # post PATH BODY
    curl --silent --show-error --fail-with-body --no-buffer "$url$1" -H 'Content-Type: application/json' -d "$2"
    echo
}

curl --silent --show-error --fail "$url/health" && echo
curl --silent --show-error --fail "$url/v1/models" && echo

post /v1/chat/completions '{"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16, "seed": 7}'
post /v1/chat/completions '{"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16, "seed": 7, "stream": true}'
post /v1/completions '{"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}'
post /tokenize '{"prompt": "The capital of France is"}'
