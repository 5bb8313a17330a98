"""The layers of a decoder. Each owns its weights and knows which part of them its rank holds."""
