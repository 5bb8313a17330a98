"""Qwen3's own forms in generated text: think blocks and tool calls."""
