"""What good and bad predictions of call durations are worth."""
