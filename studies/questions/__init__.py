"""What a reader of InferCept asks, each question with a module whose `ask` returns a `StudyAnswer`."""
