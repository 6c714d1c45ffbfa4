"""The GPT: its norm and its placement are objects that it is handed."""
