"""How the embedded pair is made: prompts, the teacher's texts, a tokenizer, a target, a drafter."""
