"""Models as folders that Hugging Face transformers reads: config.json, model.safetensors and tokenizer.json."""
