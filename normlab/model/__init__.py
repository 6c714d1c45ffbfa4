"""The GPT; its norm and its placement are arguments."""
