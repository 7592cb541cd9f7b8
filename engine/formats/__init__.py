"""What the files of models say and hold: Hugging Face directories and GGUF. The weights need torch, the rest does without."""
