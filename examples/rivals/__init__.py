"""What others have published for agents, each as a policy or an order of your own; README.md says how each was read."""
