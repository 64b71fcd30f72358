"""From what was asked, what the model is and what the machine has to a `Plan`, with reasons; and what it promises."""
