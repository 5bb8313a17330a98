"""The OpenAI-compatible HTTP server (fastapi on uvicorn; the extra `serve`)."""
