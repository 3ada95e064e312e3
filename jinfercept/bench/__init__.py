"""Things to run that show something: the demo."""
