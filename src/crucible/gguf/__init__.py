"""GGUF, the format of llama.cpp: a file's structure, and what it means as a model and as a tokenizer."""
