"""Reading and writing checkpoints: HF safetensors, orbax."""
