"""HTTP as such: connections, framing, bodies, streams of events, error answers, pages."""
