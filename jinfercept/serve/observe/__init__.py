"""What an operator sees: metrics, traces, log lines and the live page."""
