"""The wire: HTTP, OpenAI's shapes, SSE, limits. Knows no tensor."""
