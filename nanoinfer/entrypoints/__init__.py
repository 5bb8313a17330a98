"""Where people and programs meet the engine: the OpenAI-compatible server, the command line and the web page."""
