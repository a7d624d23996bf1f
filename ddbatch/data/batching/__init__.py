"""What a row means: columns and turns become prompts, prompts become token ids."""
