"""What is a call, and who answers it: detectors read the token stream, the dispatcher runs endpoints off-thread."""
