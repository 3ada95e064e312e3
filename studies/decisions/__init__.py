"""Decision records that runs have written: predicted waste and durations beside actual ones."""
